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
from typing import Any

import torch
from torch import Tensor

from tplab.data.pieces import Levels, levels_of
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
from tplab.data.zero_plus_plus import options_over
from tplab.errors import one_of
from tplab.mesh import Axis
from tplab.torch.comm.collectives import Handle, all_gather, all_to_all, axis_size, reduce_scatter, start
from tplab.torch.data.pieces import gather_rows
from tplab.torch.ranks.outcomes import check_divides, check_tensor, dim_of
from tplab.torch.ranks.rank import this_rank


def quantized_all_gather(
    x: Tensor, axis: Axis, dim: int = 0, *, bits: int | None = 8, block: int | None = 256, inside: Axis | None = None
) -> Tensor:
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
    return _Gathered.apply(x, axis, dim, bits, block, inside, None)  # type: ignore[return-value]


def quantized_reduce_scatter(
    x: Tensor,
    axis: Axis,
    dim: int = 0,
    op: str = "sum",
    *,
    bits: int | None = 4,
    block: int | None = 256,
    inside: Axis | None = None,
) -> Tensor:
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
    return _Reduced.apply(x, axis, dim, op, bits, block, inside, None)  # type: ignore[return-value]


# --- in flight --------------------------------------------------------------------------------------------------------


class Gathering(Handle):
    """A quantised all_gather that has been started, across nodes if there are two levels. Its gradient's reduce_scatter
    starts and ends where the backward pass reaches `wait`."""

    def __init__(
        self,
        x: Tensor,
        axis: Axis,
        dim: int = 0,
        *,
        bits: int | None = 8,
        block: int | None = 256,
        inside: Axis | None = None,
    ):
        dim = dim_of(check_tensor("quantized_all_gather", x), dim, "quantized_all_gather")
        self.x = x if torch.is_grad_enabled() else x.detach()
        self.about = axis, dim, bits, block, inside
        self.like, self.dim, self.bits, self.block = x.detach(), dim, bits, block
        self.levels = _levels(axis, inside)
        first = axis if self.levels is None else self.levels.across
        self.pending = [start(all_gather, part, first) for part in _encoded(self.like.reshape(1, -1), bits, block)]

    def crossed(self) -> list[Tensor]:
        """The codes and scales from across: the shards [O, ..] of the ranks at this position in every node."""
        return [pending.wait() for pending in self.pending]

    def wait(self) -> Tensor:
        return _Gathered.apply(self.x, *self.about, self)  # type: ignore[return-value]

    def landed(self) -> Tensor:
        """What has arrived, outside the graph."""
        return self.joined(self.crossed())

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Spread inside the node what came from across, and turn it into numbers."""
        if self.levels is not None:
            parts = [_in_order(all_gather(part[None], self.levels.inside), self.levels) for part in parts]
        rows = _decoded(parts, self.like.numel(), self.bits, self.block).to(self.like.dtype)
        return rows.reshape(len(rows), *self.like.shape).movedim(0, self.dim).flatten(self.dim, self.dim + 1)


class Reducing(Handle):
    """A quantised reduce_scatter that has been started, inside the node if there are two levels. Its gradient's
    all_gather starts and ends where the backward pass reaches `wait`."""

    def __init__(
        self,
        x: Tensor,
        axis: Axis,
        dim: int = 0,
        op: str = "sum",
        *,
        bits: int | None = 4,
        block: int | None = 256,
        inside: Axis | None = None,
    ):
        dim = dim_of(check_tensor("quantized_reduce_scatter", x), dim, "quantized_reduce_scatter")
        one_of("op", op, ("sum", "mean"))
        check_divides("quantized_reduce_scatter", x, dim, this_rank().place(axis))
        self.x = x if torch.is_grad_enabled() else x.detach()
        self.about = axis, dim, op, bits, block, inside
        num_ranks = axis_size(axis)
        self.bits, self.block, self.divisor = bits, block, num_ranks if op == "mean" else 1
        self.levels = _levels(axis, inside)
        pieces = torch.stack(x.detach().chunk(num_ranks, dim))
        self.shape = pieces[0].shape
        rows, first = pieces.reshape(num_ranks, -1), axis
        if self.levels is not None:
            rows, first = _inside_first(rows, self.levels), self.levels.inside
        self.arriving = self._sent(rows, first)

    def wait(self) -> Tensor:
        return _Reduced.apply(self.x, *self.about, self)  # type: ignore[return-value]

    def landed(self) -> Tensor:
        """What has arrived, outside the graph."""
        total = self.arriving()
        if self.levels is not None:
            total = self._sent(total, self.levels.across)()
        return (total / self.divisor if self.divisor > 1 else total).reshape(self.shape).to(self.x.dtype)

    def _sent(self, rows: Tensor, axis: Axis) -> Callable[[], Tensor]:
        """Send rows [R k, n], k for each rank   ->   a function that waits for the sum [k, n] of the rows for this
        rank."""
        if self.bits is None:
            return start(reduce_scatter, rows, axis).wait
        pending = [start(all_to_all, part, axis) for part in _encoded(rows, self.bits, self.block)]
        num_ranks, n = axis_size(axis), rows.shape[1]

        def total() -> Tensor:
            arrived = _decoded([one.wait() for one in pending], n, self.bits, self.block)
            return arrived.unflatten(0, (num_ranks, -1)).sum(0)

        return total


quantized_all_gather.begin = Gathering  # type: ignore[attr-defined]
quantized_reduce_scatter.begin = Reducing  # type: ignore[attr-defined]


def _levels(axis: Axis, inside: Axis | None) -> Levels | None:
    return None if inside is None else levels_of(this_rank().mesh, axis, inside)


def _encoded(rows: Tensor, bits: int | None, block: int | None) -> list[Tensor]:
    """Rows [r, n] as they travel: codes and scales, or the rows themselves."""
    return [rows] if bits is None else list(quantize_rows(rows, bits, block))


def _decoded(parts: Sequence[Tensor], n: int, bits: int | None, block: int | None) -> Tensor:
    """The rows [r, n] from what has arrived."""
    return parts[0] if bits is None else dequantize_rows(parts[0], parts[1], n, bits, block)


def _inside_first(rows: Tensor, levels: Levels) -> Tensor:
    """Rows [R, n] in the order of positions   ->   [I O, n]: first by the position inside the node, then across."""
    return rows.reshape(*levels.sizes, rows.shape[1]).permute(*levels.places, len(levels.places)).reshape(rows.shape)


def _in_order(spread: Tensor, levels: Levels) -> Tensor:
    """The reverse: [I O, n]   ->   [R, n]."""
    rows = spread.reshape(*levels.inner_sizes, spread.shape[-1]).permute(*levels.back, len(levels.back))
    return rows.flatten(0, -2)


class _Gathered(torch.autograd.Function):
    """Forward: gather codes, or end the gather `begun`. Backward: reduce_scatter, in full precision."""

    @staticmethod
    def forward(
        x: Tensor,
        axis: Axis,
        dim: int,
        bits: int | None,
        block: int | None,
        inside: Axis | None,
        begun: Gathering | None,
    ) -> Tensor:
        return (begun or Gathering(x, axis, dim, bits=bits, block=block, inside=inside)).landed()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.axis, ctx.dim, _, _, ctx.inside, _ = inputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        dx = quantized_reduce_scatter(grads[0], ctx.axis, ctx.dim, bits=None, inside=ctx.inside)
        return dx, None, None, None, None, None, None


class _Reduced(torch.autograd.Function):
    """Forward: reduce through codes, or end the reduction `begun`. Backward: all_gather, in full precision."""

    @staticmethod
    def forward(
        x: Tensor,
        axis: Axis,
        dim: int,
        op: str,
        bits: int | None,
        block: int | None,
        inside: Axis | None,
        begun: Reducing | None,
    ) -> Tensor:
        return (begun or Reducing(x, axis, dim, op, bits=bits, block=block, inside=inside)).landed()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.axis, ctx.dim, op, _, _, ctx.inside, _ = inputs
        ctx.divisor = axis_size(ctx.axis) if op == "mean" else 1

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        dx = quantized_all_gather(grads[0] / ctx.divisor, ctx.axis, ctx.dim, bits=None, inside=ctx.inside)
        return dx, None, None, None, None, None, None, None


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
