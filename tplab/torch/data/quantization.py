"""Block quantisation of torch's tensors. `tplab.data.quantization` says what it computes, also for zeros, inf and NaN;
its NumPy version gives the same bits."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tplab.data.quantization import (
    INVERSE,
    LEVELS,
    SMALLEST,
    Quantized,
    block_size,
    check_is_float,
    check_quantization,
    num_blocks,
)


def quantize(x: Tensor, bits: int = 8, block: int | None = 256) -> Quantized:
    """x [...], n elements   ->   codes and scales: each block of `block` elements shares one scale.

    scale = max |x| / L,  code = round(x / scale)      L = 127 for 8 bits, 7 for 4 bits
    block     None: one scale for the whole tensor
    bytes     ceil(n * bits / 8) of codes, 4 per block of scales
    inf, NaN  the block comes back as NaN
    Raises ValueError for other bits, TypeError for a tensor of whole or complex numbers. It has no gradient.
    """
    codes, scales = quantize_rows(x.detach().reshape(1, -1), bits, block)
    return Quantized(codes[0], scales[0], tuple(x.shape), bits, block)


def dequantize(quantized: Quantized) -> Tensor:
    """Codes and scales   ->   x' [...] = code * scale, float32. |x' - x| <= scale / 2."""
    codes, scales, shape, bits, block = (getattr(quantized, name) for name in Quantized.__dataclass_fields__)
    return dequantize_rows(codes[None], scales[None], math.prod(shape), bits, block).reshape(shape)


def quantize_rows(x: Tensor, bits: int, block: int | None) -> tuple[Tensor, Tensor]:
    """Quantise each row separately, so that no block crosses from one to the next.

    x [r, n]   ->   codes int8 [r, n] or uint8 [r, ceil(n/2)], scales float32 [r, blocks of n]
    """
    check_quantization(bits, block)
    check_is_float(x.dtype, is_float=x.is_floating_point())
    num_rows, n = x.shape
    size, blocks = block_size(n, block), num_blocks(n, block)
    padded = torch.nn.functional.pad(x.float(), (0, blocks * size - n)).reshape(num_rows, blocks, size)
    scales = padded.abs().amax(-1) * float(INVERSE[bits])
    scales = torch.where(scales < float(SMALLEST), 0.0, torch.where(scales.isinf(), math.nan, scales))
    steps = scales[..., None]
    codes = torch.where(steps > 0, (padded / steps).round(), 0.0).clamp(-LEVELS[bits], LEVELS[bits])
    codes = codes.to(torch.int8).reshape(num_rows, -1)[:, :n]
    return (codes.contiguous() if bits == 8 else _packed(codes)), scales


def dequantize_rows(codes: Tensor, scales: Tensor, n: int, bits: int, block: int | None) -> Tensor:
    """The reverse, for rows of n elements   ->   [r, n], float32."""
    codes = codes if bits == 8 else _unpacked(codes)[:, :n]
    return codes.float() * scales.repeat_interleave(block_size(n, block), 1)[:, :n]


def _packed(codes: Tensor) -> Tensor:
    """Pack two 4-bit codes per byte; for an odd number of them, the last half byte is empty."""
    nibbles = torch.nn.functional.pad(codes, (0, codes.shape[1] % 2)).view(torch.uint8) & 15
    return nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)


def _unpacked(packed: Tensor) -> Tensor:
    nibbles = torch.stack([packed & 15, packed >> 4], -1).flatten(1).view(torch.int8)
    return nibbles - ((nibbles & 8) << 1)  # 15 is -1
