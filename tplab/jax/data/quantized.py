"""all_gather and reduce_scatter that send codes of 8 or 4 bits instead of numbers: qwZ and qgZ of ZeRO++.

Codes cannot be added while they go around a ring: each rank's codes have their own scales, and the sum of two codes may
not fit. So reduce_scatter is an all_to_all here: every rank sends its codes directly to the rank that adds them up,
which decodes them first. Each number is rounded once on every level.

Wang et al. 2023, "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training" (arXiv:2306.10209),
section 3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from tplab.comm import dim_of
from tplab.data.pieces import Levels, levels_of
from tplab.data.quantization import (
    INVERSE,
    LEVELS,
    SMALLEST,
    How,
    Quantized,
    block_size,
    check_is_float,
    check_quantization,
    num_blocks,
)
from tplab.data.zero_plus_plus import options_over
from tplab.errors import one_of
from tplab.jax.comm.collectives import Handle, all_gather, all_to_all, axis_size, reduce_scatter, start
from tplab.jax.comm.derivatives import Differentiable, with_backward
from tplab.jax.data.pieces import gather_rows
from tplab.jax.ranks.context import this_mesh, vary
from tplab.mesh import Axis
from tplab.sharding import share


def quantized_all_gather(
    x: Any, axis: Axis, dim: int = 0, *, bits: int | None = 8, block: int | None = 256, inside: Axis | None = None
) -> Array:
    """all_gather of codes and scales, which every rank decodes.

    x [.., n, ..]   ->   y [.., R n, ..], the same on every rank, in x's dtype; a rank's own piece is rounded too
    bits      8 or 4; None sends x unquantised
    block     elements that share a scale; None: all of x
    inside    the part of `axis` whose ranks share a node: codes first cross to the other nodes, once to each, and then
              spread inside. The numbers are the same
    sent      (R-1) (ceil(n bits / 8) + 4 per block) bytes by each rank; with `inside`, O nodes of I ranks: O-1 times as
              much across, (I-1) O times inside
    error     half a step of each block: see `quantize`
    backward  dx = reduce_scatter(dy), in full precision: as if nothing had been rounded
    Every rank has the same number of elements. `start(quantized_all_gather, x, axis)` begins it. Wang et al. 2023,
    section 3.1.
    """
    x, names = jnp.asarray(x), this_mesh().names(axis)
    how = How(names, dim_of(x.shape, dim, "quantized_all_gather"), "sum", bits, block, _levels(axis, inside))
    return _gather(vary(x, names), how=how)


def quantized_reduce_scatter(
    x: Any,
    axis: Axis,
    dim: int = 0,
    op: str = "sum",
    *,
    bits: int | None = 4,
    block: int | None = 256,
    inside: Axis | None = None,
) -> Array:
    """reduce_scatter through an all_to_all of codes, which are decoded and then added up in float32.

    x [.., R n, ..]   ->   y [.., n, ..]: piece i on the rank at index i, in x's dtype
    op        sum or mean
    bits      4 or 8; None is reduce_scatter
    block     elements that share a scale; it ends where a piece ends. None: one scale for each piece
    inside    the part of `axis` whose ranks share a node: pieces are added up inside it first, rounded again, and then
              added up across. O nodes of I ranks then send 1/I of the bytes across
    sent      (R-1) (ceil(n bits / 8) + 4 per block) bytes by each rank, n being the elements of a piece; with `inside`,
              (I-1) O times as much inside, O-1 times across
    error     half a step of each rank's block, added up; with `inside`, plus that of the block of each node's sum
    backward  dx = all_gather(dy), in full precision: as if nothing had been rounded
    Raises ShapeError if R does not divide the dim. `start(quantized_reduce_scatter, x, axis)` begins it.
    Wang et al. 2023, section 3.3.
    """
    x, names = jnp.asarray(x), this_mesh().names(axis)
    dim = dim_of(x.shape, dim, "quantized_reduce_scatter")
    one_of("op", op, ("sum", "mean"))
    share(x.shape[dim], axis_size(axis), f"quantized_reduce_scatter: dim {dim} has size", axis=names)
    return _reduce(vary(x, names), how=How(names, dim, op, bits, block, _levels(axis, inside)))


# --- on their way -----------------------------------------------------------------------------------------------------


def _gathered(x: Array, how: How) -> Array:
    first = how.axis if how.levels is None else how.levels.across
    parts = [all_gather(part, first) for part in _encoded(x.reshape(1, -1), how)]
    if how.levels is not None:  # from across came the shards [O, ..] of the ranks at this place in every node
        parts = [_in_order(all_gather(part[None], how.levels.inside), how.levels) for part in parts]
    rows = _decoded(parts, x.size, how).astype(x.dtype)
    return jnp.concatenate([row.reshape(x.shape) for row in rows], how.dim)


def _reduced(x: Array, how: How) -> Array:
    num_ranks = axis_size(how.axis)
    pieces = jnp.stack(jnp.split(x, num_ranks, how.dim))
    rows, first = pieces.reshape(num_ranks, -1), how.axis
    if how.levels is not None:
        rows, first = _inside_first(rows, how.levels), how.levels.inside
    total = _summed(rows, first, how)
    if how.levels is not None:
        total = _summed(total, how.levels.across, how)
    total = total / num_ranks if how.op == "mean" else total
    return total.reshape(pieces.shape[1:]).astype(x.dtype)


def _summed(rows: Array, axis: Axis, how: How) -> Array:
    """Rows [R k, n], k for each rank   ->   the sum [k, n] of those for this rank."""
    if how.bits is None:
        return reduce_scatter(rows, axis)
    num_ranks, (count, n) = axis_size(axis), rows.shape
    arrived = _decoded([all_to_all(part, axis) for part in _encoded(rows, how)], n, how)
    return arrived.reshape(num_ranks, count // num_ranks, n).sum(0)


def _levels(axis: Axis, inside: Axis | None) -> Levels | None:
    return None if inside is None else levels_of(this_mesh(), axis, inside)


def _encoded(rows: Array, how: How) -> list[Array]:
    """The form in which rows [r, n] are sent: codes and scales, or the rows themselves."""
    return [rows] if how.bits is None else list(quantize_rows(rows, how.bits, how.block))


def _decoded(parts: Sequence[Array], n: int, how: How) -> Array:
    """The rows [r, n], from their received form."""
    return parts[0] if how.bits is None else dequantize_rows(parts[0], parts[1], n, how.bits, how.block)


def _inside_first(rows: Array, levels: Levels) -> Array:
    """Rows [R, n] in the order of positions   ->   [I O, n]: first by the position inside the node, then across."""
    return rows.reshape(*levels.sizes, rows.shape[1]).transpose(*levels.places, len(levels.places)).reshape(rows.shape)


def _in_order(spread: Array, levels: Levels) -> Array:
    """The reverse: [I O, n]   ->   [R, n]."""
    rows = spread.reshape(*levels.inner_sizes, spread.shape[-1]).transpose(*levels.back, len(levels.back))
    return rows.reshape(math.prod(rows.shape[:-1]), rows.shape[-1])


# --- derivatives: as if nothing had been rounded ----------------------------------------------------------------------


def _tangent(x: Array, y: Array, dx: Array, how: How, gathers: bool) -> Array:
    return with_backward(_as_is, _gradient, [dx], how.exact, gathers)[0]


def _as_is(xs: list[Array], how: How, gathers: bool) -> list[Array]:
    return [(_gathered if gathers else _reduced)(xs[0], how)]


def _gradient(dys: list[Array], axes: Any, how: How, gathers: bool) -> list[Array]:
    """The gradient of one is the other."""
    (dy,) = dys
    if gathers:
        how = how._replace(op="sum")
    elif how.op == "mean":
        dy = dy / axis_size(how.axis)
    return with_backward(_as_is, _gradient, [dy], how, not gathers)


_gather = Differentiable("tplab_quantized_all_gather", _gathered, partial(_tangent, gathers=True))
_reduce = Differentiable("tplab_quantized_reduce_scatter", _reduced, partial(_tangent, gathers=False))
quantized_all_gather.begin = lambda *args, **kwargs: Handle(quantized_all_gather(*args, **kwargs))  # type: ignore
quantized_reduce_scatter.begin = lambda *args, **kwargs: Handle(quantized_reduce_scatter(*args, **kwargs))  # type: ignore


zero_plus_plus = options_over(start, gather_rows, quantized_all_gather, quantized_reduce_scatter)
"""ZeRO++: the options of `shard_parameters` for a step that sends a quarter of the bytes across nodes."""


# --- codes ------------------------------------------------------------------------------------------------------------
# `tplab.data.quantization` says what is computed, also for zeros, inf and NaN; its NumPy version gives the same bits.


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
