"""Block quantisation: numbers become small integers, and every block of them shares one scale.

    scale = max |x| of the block / L       L = 127 for 8 bits, 7 for 4 bits
    code  = round(x / scale)               an integer from -L to L; halves round to even
    x'    = code * scale                   |x' - x| <= scale / 2: at most half a step

A block is `block` consecutive elements; the last block may be shorter. Two codes of 4 bits share a byte, the first one
in its lower half. All this holds for `quantize` in NumPy (this module), torch and JAX, which agree to the bit:

    all zeros     the scale is 0, and zeros come back
    tiny numbers  a scale below 2.4e-38 counts as 0: devices that flush subnormal numbers would not agree on the codes
    inf, NaN      the scale is NaN, and so is the whole block when it comes back: an overflow stays visible
    dtypes        any float goes in; scales are float32, all arithmetic is in float32, and float32 comes back
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tplab.comm import whole_number
from tplab.data.pieces import Levels
from tplab.mesh import Axis

LEVELS = {8: 127, 4: 7}
"""Bits -> the largest code."""

INVERSE = {bits: np.float32(1 / level) for bits, level in LEVELS.items()}
"""1 / L. The scale is computed as a product, because compilers may turn a division by a constant into a product, and
the bits must not depend on that."""

SMALLEST = np.float32(2.0**-125)
"""The smallest scale: twice the smallest normal float32, so that a subnormal x rounds to 0 whether flushed or not."""

SCALE_BYTES = 4


@dataclass(frozen=True)
class Quantized:
    """A tensor as codes and scales, of NumPy, torch or JAX.

    codes    int8 [n] for 8 bits, uint8 [ceil(n / 2)] for 4 bits: the elements row by row
    scales   float32, one per block
    shape    the shape of the tensor, which has n elements
    bits     8 or 4
    block    elements per scale; None: one scale for the whole tensor
    """

    codes: Any
    scales: Any
    shape: tuple[int, ...]
    bits: int
    block: int | None

    @property
    def num_bytes(self) -> QuantizedBytes:
        return quantized_bytes(math.prod(self.shape), self.bits, self.block)


class QuantizedBytes(NamedTuple):
    """The bytes of a quantised tensor, in memory and when it is sent."""

    codes: int
    scales: int

    @property
    def total(self) -> int:
        return self.codes + self.scales

    def times(self, count: int) -> QuantizedBytes:
        return QuantizedBytes(count * self.codes, count * self.scales)


class How(NamedTuple):
    """The options of a quantised collective, over all of `axis` or on two levels."""

    axis: Axis
    dim: int
    op: str
    bits: int | None
    block: int | None
    levels: Levels | None

    @property
    def exact(self) -> How:
        """The same options without quantisation."""
        return self._replace(bits=None)


def quantized_bytes(num_elements: int, bits: int, block: int | None) -> QuantizedBytes:
    """n elements take ceil(n * bits / 8) bytes of codes, and 4 bytes of scale per block."""
    check_quantization(bits, block)
    return QuantizedBytes(-(-num_elements * bits // 8), SCALE_BYTES * num_blocks(num_elements, block))


def check_quantization(bits: Any, block: Any) -> None:
    """Raise ValueError for impossible bits or block sizes, and TypeError for a block size that is not an integer."""
    if bits not in LEVELS:
        raise ValueError(f"bits is {bits!r}; it must be 8 or 4")
    if block is not None and whole_number(block, "block") < 1:
        raise ValueError(f"block is {block}; a scale needs 1 element at least, or None for a single scale")


def check_is_float(dtype: Any, *, is_float: bool) -> None:
    """Raise TypeError for a dtype that is not real floating point."""
    if not is_float:
        raise TypeError(f"quantize takes floating-point numbers, not {dtype}; convert the tensor to float32 first")


def block_size(num_elements: int, block: int | None) -> int:
    """The elements of a full block."""
    return max(1, num_elements) if block is None else block


def num_blocks(num_elements: int, block: int | None) -> int:
    """How many scales there are."""
    return -(-num_elements // block_size(num_elements, block))


# --- NumPy: what the frameworks are compared with ---------------------------------------------------------------------


def quantize(x: np.ndarray, bits: int = 8, block: int | None = 256) -> Quantized:
    """x [...], n elements   ->   codes and scales, as described at the top of this module."""
    check_quantization(bits, block)
    check_is_float(x.dtype, is_float=np.issubdtype(x.dtype, np.floating))
    flat = x.astype(np.float32).reshape(-1)
    size, blocks = block_size(flat.size, block), num_blocks(flat.size, block)
    padded = np.zeros((blocks, size), np.float32)
    padded.reshape(-1)[: flat.size] = flat
    with np.errstate(all="ignore"):  # inf, NaN and 0 / 0 are handled below
        scales = np.abs(padded).max(-1) * INVERSE[bits]
        scales = np.where(scales >= SMALLEST, scales, np.where(np.isnan(scales), np.float32(np.nan), np.float32(0)))
        scales = np.where(np.isinf(scales), np.float32(np.nan), scales)
        codes = np.where((scales > 0)[:, None], np.rint(padded / scales[:, None]), 0)
    codes = codes.clip(-LEVELS[bits], LEVELS[bits]).astype(np.int8).reshape(-1)[: flat.size]
    return Quantized(codes if bits == 8 else _packed(codes), scales.astype(np.float32), x.shape, bits, block)


def dequantize(quantized: Quantized) -> np.ndarray:
    """Codes and scales   ->   x' [...] = code * scale, float32."""
    n = math.prod(quantized.shape)
    codes = quantized.codes if quantized.bits == 8 else _unpacked(quantized.codes)[:n]
    scales = np.repeat(quantized.scales, block_size(n, quantized.block))[:n]
    return (codes.astype(np.float32) * scales).reshape(quantized.shape)


def _packed(codes: np.ndarray) -> np.ndarray:
    """Two codes of 4 bits per byte; if their number is odd, the last half byte is empty."""
    nibbles = np.pad(codes, (0, codes.size % 2)).view(np.uint8) & 15
    return nibbles[0::2] | (nibbles[1::2] << 4)


def _unpacked(packed: np.ndarray) -> np.ndarray:
    nibbles = np.stack([packed & 15, packed >> 4], -1).reshape(-1).view(np.int8)
    return nibbles - ((nibbles & 8) << 1)  # 15 becomes -1
