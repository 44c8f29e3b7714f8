"""all_gather and reduce_scatter that send codes of 8 or 4 bits instead of numbers: qwZ and qgZ of ZeRO++.

Codes cannot be added on their way around a ring: each rank's codes have their own scales, and the sum of two codes may
not fit. So reduce_scatter is an all_to_all here: every rank sends its codes directly to the rank that adds them up,
which first turns them into numbers. Each number is rounded once on every level.

Wang et al. 2023, "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training" (arXiv:2306.10209),
section 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec

import torch
from torch import Tensor

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
from tplab.mesh import Axis
from tplab.torch.comm.collectives import Handle, all_gather, all_to_all, axis_size, reduce_scatter, start
from tplab.torch.data.pieces import gather_rows
from tplab.torch.ranks.outcomes import check_divides, check_tensor, dim_of
from tplab.torch.ranks.rank import this_rank

Arguments = ParamSpec("Arguments")


def _quantized(
    node: Callable[[], type[_Quantized]],
) -> Callable[[Callable[Arguments, How]], Callable[Arguments, Tensor]]:
    """Decorate a function that says how: the result sends codes, and `start` finds `begin`, which only starts to."""

    def decorate(how_of: Callable[Arguments, How]) -> Callable[Arguments, Tensor]:
        how: Any = how_of

        @wraps(how_of)
        def collective(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            return node().apply(x, how(x, *args, **kwargs), None)

        collective.begin = lambda x, *args, **kwargs: _Flight(x, how(x, *args, **kwargs), node())  # type: ignore
        collective.__signature__ = signature(how_of).replace(return_annotation="Tensor")  # type: ignore[attr-defined]
        collective.__annotations__ = {**how_of.__annotations__, "return": "Tensor"}
        return collective

    return decorate


@_quantized(lambda: _Gathered)
def quantized_all_gather(
    x: Tensor, axis: Axis, dim: int = 0, *, bits: int | None = 8, block: int | None = 256, inside: Axis | None = None
) -> How:
    """all_gather of codes and scales, which every rank turns back into numbers.

    x [.., n, ..]   ->   y [.., R n, ..], the same on every rank, in x's dtype; a rank's own piece is rounded too
    bits      8 or 4; None sends x as it is
    block     elements that share a scale; None: all of x
    inside    the part of `axis` whose ranks share a node: codes first cross to the other nodes, once to each, and then
              spread inside. The numbers are the same
    sent      (R-1) (ceil(n bits / 8) + 4 per block) bytes by each rank; with `inside`, O nodes of I ranks: O-1 times as
              much across, (I-1) O times inside
    error     half a step of each block: see `quantize`
    backward  dx = reduce_scatter(dy), in full precision: as if nothing had been rounded
    Every rank has the same number of elements. `start(quantized_all_gather, x, axis)` starts it. Wang et al. 2023,
    section 3.1.
    """
    dim = dim_of(check_tensor("quantized_all_gather", x), dim, "quantized_all_gather")
    return How(axis, dim, "sum", bits, block, _levels(axis, inside))


@_quantized(lambda: _Reduced)
def quantized_reduce_scatter(
    x: Tensor,
    axis: Axis,
    dim: int = 0,
    op: str = "sum",
    *,
    bits: int | None = 4,
    block: int | None = 256,
    inside: Axis | None = None,
) -> How:
    """reduce_scatter through an all_to_all of codes, which become numbers again before they are added up, in float32.

    x [.., R n, ..]   ->   y [.., n, ..]: piece i on the rank at index i, in x's dtype
    op        sum or mean
    bits      4 or 8; None is reduce_scatter
    block     elements that share a scale; it ends where a piece ends. None: one scale for each piece
    inside    the part of `axis` whose ranks share a node: pieces are added up inside it first, rounded again, and then
              added up across. O nodes of I ranks send 1/I of the bytes across that a single level would send
    sent      (R-1) (ceil(n bits / 8) + 4 per block) bytes by each rank, n being the elements of a piece; with `inside`,
              (I-1) O times as much inside, O-1 times across
    error     half a step of each rank's block, added up; with `inside`, plus that of the block of each node's sum
    backward  dx = all_gather(dy), in full precision: as if nothing had been rounded
    Raises ShapeError where R does not divide the dim. `start(quantized_reduce_scatter, x, axis)` starts it.
    Wang et al. 2023, section 3.3.
    """
    dim = dim_of(check_tensor("quantized_reduce_scatter", x), dim, "quantized_reduce_scatter")
    one_of("op", op, ("sum", "mean"))
    check_divides("quantized_reduce_scatter", x, dim, this_rank().place(axis))
    return How(axis, dim, op, bits, block, _levels(axis, inside))


# --- in flight --------------------------------------------------------------------------------------------------------


class _Flight(Handle):
    """A quantised collective that has been started, on its first level if there are two. Its gradient's collective
    starts and ends where the backward pass reaches `wait`."""

    def __init__(self, x: Tensor, how: How, node: Any):
        self.x, self.how, self.node = x if torch.is_grad_enabled() else x.detach(), how, node
        self.arriving = node.begun(x.detach(), how)

    def wait(self) -> Tensor:
        return self.node.apply(self.x, self.how, self)


class _Quantized(torch.autograd.Function):
    """Forward: send codes, or end what was begun. Backward: the other collective, in full precision."""

    @staticmethod
    def begun(x: Tensor, how: How) -> Callable[[], Tensor]:
        """Start it. Returns a function that waits for the result, outside the graph."""
        raise NotImplementedError

    @classmethod
    def _forward(cls, x: Tensor, how: How, flight: _Flight | None) -> Tensor:
        return (cls.begun(x, how) if flight is None else flight.arriving)()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, How, _Flight | None], output: Tensor) -> None:
        ctx.how = inputs[1].exact


class _Gathered(_Quantized):
    @staticmethod
    def begun(x: Tensor, how: How) -> Callable[[], Tensor]:
        first = how.axis if how.levels is None else how.levels.across
        pending = [start(all_gather, part, first) for part in _encoded(x.reshape(1, -1), how)]

        def landed() -> Tensor:
            parts = [one.wait() for one in pending]  # from across: the shards [O, ..] of this position in every node
            if how.levels is not None:
                parts = [_in_order(all_gather(part[None], how.levels.inside), how.levels) for part in parts]
            rows = _decoded(parts, x.numel(), how).to(x.dtype)
            return rows.reshape(len(rows), *x.shape).movedim(0, how.dim).flatten(how.dim, how.dim + 1)

        return landed

    @staticmethod
    def forward(x: Tensor, how: How, flight: _Flight | None) -> Tensor:
        return _Gathered._forward(x, how, flight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _Reduced.apply(grads[0], ctx.how, None), None, None


class _Reduced(_Quantized):
    @staticmethod
    def begun(x: Tensor, how: How) -> Callable[[], Tensor]:
        num_ranks = axis_size(how.axis)
        pieces = torch.stack(x.chunk(num_ranks, how.dim))
        rows, first, shape = pieces.reshape(num_ranks, -1), how.axis, pieces.shape[1:]
        if how.levels is not None:
            rows, first = _inside_first(rows, how.levels), how.levels.inside
        arriving = _sent(rows, first, how)

        def landed() -> Tensor:
            total = arriving()
            if how.levels is not None:
                total = _sent(total, how.levels.across, how)()
            return (total / num_ranks if how.op == "mean" else total).reshape(shape).to(x.dtype)

        return landed

    @staticmethod
    def forward(x: Tensor, how: How, flight: _Flight | None) -> Tensor:
        return _Reduced._forward(x, how, flight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        dy = grads[0] / axis_size(ctx.how.axis) if ctx.how.op == "mean" else grads[0]
        return _Gathered.apply(dy, ctx.how._replace(op="sum"), None), None, None


def _sent(rows: Tensor, axis: Axis, how: How) -> Callable[[], Tensor]:
    """Send rows [R k, n], k for each rank   ->   a function that waits for the sum [k, n] of the rows for this rank."""
    if how.bits is None:
        return start(reduce_scatter, rows, axis).wait
    pending = [start(all_to_all, part, axis) for part in _encoded(rows, how)]
    num_ranks, n = axis_size(axis), rows.shape[1]
    return lambda: _decoded([one.wait() for one in pending], n, how).unflatten(0, (num_ranks, -1)).sum(0)


def _levels(axis: Axis, inside: Axis | None) -> Levels | None:
    return None if inside is None else levels_of(this_rank().mesh, axis, inside)


def _encoded(rows: Tensor, how: How) -> list[Tensor]:
    """Rows [r, n] as they travel: codes and scales, or the rows themselves."""
    return [rows] if how.bits is None else list(quantize_rows(rows, how.bits, how.block))


def _decoded(parts: Sequence[Tensor], n: int, how: How) -> Tensor:
    """The rows [r, n] from what has arrived."""
    return parts[0] if how.bits is None else dequantize_rows(parts[0], parts[1], n, how.bits, how.block)


def _inside_first(rows: Tensor, levels: Levels) -> Tensor:
    """Rows [R, n] in the order of positions   ->   [I O, n]: first by the position inside the node, then across."""
    return rows.reshape(*levels.sizes, rows.shape[1]).permute(*levels.places, len(levels.places)).reshape(rows.shape)


def _in_order(spread: Tensor, levels: Levels) -> Tensor:
    """The reverse: [I O, n]   ->   [R, n]."""
    rows = spread.reshape(*levels.inner_sizes, spread.shape[-1]).permute(*levels.back, len(levels.back))
    return rows.flatten(0, -2)


zero_plus_plus = options_over(start, gather_rows, quantized_all_gather, quantized_reduce_scatter)
"""ZeRO++: the options of `shard_parameters` for a step that sends a quarter of the bytes across nodes."""


# --- codes ------------------------------------------------------------------------------------------------------------
# `tplab.data.quantization` defines the result, also for zeros, inf and NaN; its NumPy version gives the same bits.


def quantize(x: Tensor, bits: int = 8, block: int | None = 256) -> Quantized:
    """x [...], n elements   ->   codes and scales: each block of `block` elements shares one scale.

    scale = max |x| / L,  code = round(x / scale)      L = 127 for 8 bits, 7 for 4 bits
    block     None: one scale for the whole tensor
    bytes     ceil(n * bits / 8) of codes, 4 per block of scales
    inf, NaN  the whole block becomes NaN
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
