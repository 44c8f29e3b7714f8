"""Block quantisation of JAX's arrays. `tplab.data.quantization` says what it computes, also for zeros, inf and NaN; its
NumPy version gives the same bits."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import Array, lax

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

jax.tree_util.register_dataclass(Quantized, data_fields=["codes", "scales"], meta_fields=["shape", "bits", "block"])


def quantize(x: Array, bits: int = 8, block: int | None = 256) -> Quantized:
    """x [...], n elements   ->   codes and scales: each block of `block` elements shares one scale.

    scale = max |x| / L,  code = round(x / scale)      L = 127 for 8 bits, 7 for 4 bits
    block     None: one scale for the whole array
    bytes     ceil(n * bits / 8) of codes, 4 per block of scales
    inf, NaN  the block comes back as NaN
    Raises ValueError for other bits, TypeError for an array of whole or complex numbers. It has no gradient.
    """
    x = lax.stop_gradient(jnp.asarray(x))
    codes, scales = quantize_rows(x.reshape(1, -1), bits, block)
    return Quantized(codes[0], scales[0], x.shape, bits, block)


def dequantize(quantized: Quantized) -> Array:
    """Codes and scales   ->   x' [...] = code * scale, float32. |x' - x| <= scale / 2."""
    codes, scales, shape, bits, block = (getattr(quantized, name) for name in Quantized.__dataclass_fields__)
    return dequantize_rows(codes[None], scales[None], math.prod(shape), bits, block).reshape(shape)


def quantize_rows(x: Array, bits: int, block: int | None) -> tuple[Array, Array]:
    """Quantise each row separately, so that no block crosses from one to the next.

    x [r, n]   ->   codes int8 [r, n] or uint8 [r, ceil(n/2)], scales float32 [r, blocks of n]
    """
    check_quantization(bits, block)
    check_is_float(x.dtype, is_float=bool(jnp.issubdtype(x.dtype, jnp.floating)))
    num_rows, n = x.shape
    size, blocks = block_size(n, block), num_blocks(n, block)
    padded = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, blocks * size - n))).reshape(num_rows, blocks, size)
    scales = jnp.abs(padded).max(-1) * INVERSE[bits]
    scales = jnp.where(scales < SMALLEST, 0.0, jnp.where(jnp.isinf(scales), jnp.nan, scales))
    steps = scales[..., None]
    codes = jnp.where(steps > 0, jnp.round(padded / steps), 0.0).clip(-LEVELS[bits], LEVELS[bits])
    codes = codes.astype(jnp.int8).reshape(num_rows, -1)[:, :n]
    return (codes if bits == 8 else _packed(codes)), scales


def dequantize_rows(codes: Array, scales: Array, n: int, bits: int, block: int | None) -> Array:
    """The reverse, for rows of n elements   ->   [r, n], float32."""
    codes = codes if bits == 8 else _unpacked(codes)[:, :n]
    return codes.astype(jnp.float32) * jnp.repeat(scales, block_size(n, block), 1)[:, :n]


def _packed(codes: Array) -> Array:
    """Pack two 4-bit codes per byte; for an odd number of them, the last half byte is empty."""
    nibbles = lax.bitcast_convert_type(jnp.pad(codes, ((0, 0), (0, codes.shape[1] % 2))), jnp.uint8) & 15
    return nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)


def _unpacked(packed: Array) -> Array:
    nibbles = jnp.stack([packed & 15, packed >> 4], -1).reshape(packed.shape[0], -1)
    nibbles = lax.bitcast_convert_type(nibbles, jnp.int8)
    return nibbles - ((nibbles & 8) << 1)  # 15 is -1
