"""Products beside hops: how the pieces of a ring are multiplied with a weight, in both passes. Tensors are matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tplab.errors import ShapeError, one_of
from tplab.mesh import Axis
from tplab.models.checks import check_ring_weight
from tplab.rings import DIRECTIONS, RingPiece, gather_lanes, scatter_lanes
from tplab.sharding import share
from tplab.torch.comm.collectives import Handle, all_gather, axis_index, axis_size, reduce_scatter, ring_shift, start
from tplab.torch.private import transform
from tplab.torch.ranks.meter import mark_sum
from tplab.torch.ranks.outcomes import check_divides, check_tensor, dim_of
from tplab.torch.ranks.rank import this_rank


class Ring(NamedTuple):
    """How one layer's tensors, as matrices [tokens, features], are cut into pieces that travel.

    size         of a piece: of its features (dim 1), or with by_tokens of its tokens (dim 0)
    is_stacked   the weight is [R, ..], one piece per rank, in the order of the ring
    """

    mode: str
    axis: Axis
    direction: str
    size: int
    by_tokens: bool = False
    is_stacked: bool = False

    @property
    def dim(self) -> int:
        return 0 if self.by_tokens else 1

    def weight_of(self, weight: Tensor, piece: RingPiece) -> Tensor:
        """The part of the weight that a piece is multiplied with (gather), or computed with (scatter)."""
        if self.by_tokens:
            return weight
        dim = 1 if self.mode == "gather" else 0
        if self.is_stacked:
            place = piece.distance if self.mode == "gather" else piece.distance - 1  # its own part leaves last: -1
            return weight[place].narrow(dim, piece.begin, piece.size)
        return weight.narrow(dim, piece.owner * self.size + piece.begin, piece.size)

    def unstacked(self, weight: Tensor) -> Tensor:
        """The weight in the form of a blocking layer, joined from its pieces."""
        if not self.is_stacked:
            return weight
        lanes = gather_lanes(axis_index(self.axis), axis_size(self.axis), self.size, self.direction)
        pieces = sorted([lanes.own, *lanes.up, *lanes.down], key=lambda piece: (piece.owner, piece.begin))
        return torch.cat([self.weight_of(weight, piece) for piece in pieces], 1 if self.mode == "gather" else 0)

    def tokens_of(self, whole: Tensor, piece: RingPiece) -> Tensor:
        """The tokens that a piece covers, out of `whole`, which has the tokens of all ranks."""
        return whole.narrow(0, piece.owner * self.size + piece.begin, piece.size) if self.by_tokens else whole


def _arrivals(x: Tensor, ring: Ring) -> Iterator[tuple[RingPiece, Tensor]]:
    """Every rank's x, piece by piece, this rank's own first; while one is used, the next one travels."""
    lanes = gather_lanes(axis_index(ring.axis), axis_size(ring.axis), ring.size, ring.direction)
    ways = {shift: lane for shift, lane in ((1, lanes.up), (-1, lanes.down)) if lane}
    flights = {shift: _sent(_part(x, lane[0], ring), ring, shift) for shift, lane in ways.items()}
    yield lanes.own, x
    for hop in range(max(map(len, ways.values()), default=0)):
        for shift, lane in ways.items():
            if hop < len(lane):
                arrived = flights[shift].wait()
                _check_arrived(arrived, _part(x, lane[0], ring), ring)
                if hop + 1 < len(lane):
                    flights[shift] = _sent(arrived, ring, shift)
                yield lane[hop], arrived


def _sums(part: Callable[[RingPiece], Tensor], ring: Ring, beside: Iterator[Any]) -> Tensor:
    """The sum of every rank's `part` for this rank; sums travel while the next part is computed.

    beside   other work, done one step after each send
    """
    lanes = scatter_lanes(axis_index(ring.axis), axis_size(ring.axis), ring.size, ring.direction)
    ways = {shift: lane for shift, lane in ((1, lanes.up), (-1, lanes.down)) if lane}
    flights: dict[int, Handle] = {}
    for hop in range(max(map(len, ways.values()), default=0)):
        for shift, lane in ways.items():
            if hop < len(lane):
                total = part(lane[hop])
                if hop:
                    _add(flights[shift].wait(), total, ring)
                else:
                    this_rank().starts_with(total)
                flights[shift] = _sent(total, ring, shift)
                next(beside, None)
    total = part(lanes.own)
    for _ in beside:
        pass
    for shift, lane in ways.items():
        _add(flights[shift].wait(), _part(total, lane[0], ring), ring)
    return total


def _sent(x: Tensor, ring: Ring, shift: int) -> Handle:
    return start(ring_shift, x, ring.axis, shift)


def _part(x: Tensor, piece: RingPiece, ring: Ring) -> Tensor:
    """The half of x that a piece covers, or all of x."""
    return x if piece.size == ring.size else x.narrow(ring.dim, piece.begin, piece.size)


def _add(arrived: Tensor, total: Tensor, ring: Ring) -> None:
    """total += arrived, marked in the trace as holding the data of both."""
    _check_arrived(arrived, total, ring)
    mine = total.detach()
    mark_sum(total.add_(arrived), arrived, mine)


def _product(a: Tensor, b: Tensor, into: Tensor, add: bool, bias: Tensor | None = None) -> None:
    """into = a @ b (+ bias), or into += a @ b."""
    if add:
        into.addmm_(a, b)
    elif bias is None:
        torch.mm(a, b, out=into)
    else:
        torch.addmm(bias, a, b, out=into)


class _RingProduct(torch.autograd.Function):
    """The common part of both: what they keep for their backward passes."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, _, ctx.ring = inputs
        ctx.save_for_backward(x, weight)


def blocking(x: Tensor, weight: Tensor, bias: Tensor | None, ring: Ring) -> Tensor:
    """The same matrix product, with one collective."""
    whole = ring.unstacked(weight)
    if ring.mode == "gather":
        return F.linear(all_gather(x, ring.axis, ring.dim), whole, bias)
    y = reduce_scatter(F.linear(x, whole), ring.axis, ring.dim)
    return y if bias is None else y + bias


def _blocking_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    """The backward pass of `blocking`, for create_graph: autograd can differentiate it again."""
    x, weight = ctx.saved_tensors
    wanted = [tensor for tensor in (x, weight) if tensor.requires_grad]
    found = iter(())
    if wanted:
        found = iter(torch.autograd.grad(blocking(x, weight, None, ctx.ring), wanted, dy, create_graph=True))
    dx, dweight = (next(found) if tensor.requires_grad else None for tensor in (x, weight))
    return dx, dweight, dy.sum(0) if ctx.needs_input_grad[2] else None, None


class AllGatherMatmul(_RingProduct):
    """Matrices: x [n, d] (by tokens: [n, D]), weight [F, D] or [R, F, d]   ->   y [n, F] (by tokens: [R n, F])."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, ring: Ring) -> Tensor:
        y = x.new_empty(len(x) * axis_size(ring.axis) if ring.by_tokens else len(x), weight.shape[-2])
        for piece, arrived in _arrivals(x, ring):
            add = piece.distance > 0 and not ring.by_tokens
            _product(arrived, ring.weight_of(weight, piece).T, ring.tokens_of(y, piece), add, bias)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if torch.is_grad_enabled():
            return _blocking_backward(ctx, grads[0])
        (x, weight), ring, dy = ctx.saved_tensors, ctx.ring, grads[0].contiguous()
        needs_dx, needs_dweight, needs_dbias, _ = ctx.needs_input_grad
        dweight = torch.empty_like(weight) if needs_dweight else None
        beside = _weight_gradient(x, dy, dweight, ring)
        dx = None
        if needs_dx:
            dx = _sums(lambda piece: ring.tokens_of(dy, piece) @ ring.weight_of(weight, piece), ring, beside)
        for _ in beside:
            pass
        return dx, dweight, dy.sum(0) if needs_dbias else None, None


def _weight_gradient(x: Tensor, dy: Tensor, dweight: Tensor | None, ring: Ring) -> Iterator[None]:
    """dweight = dy.T @ x of all ranks, one step per piece of x."""
    if dweight is None:
        return
    for piece, arrived in _arrivals(x, ring):
        add = piece.distance > 0 and ring.by_tokens
        _product(ring.tokens_of(dy, piece).T, arrived, ring.weight_of(dweight, piece), add)
        yield


class MatmulReduceScatter(_RingProduct):
    """Matrices: x [n, K] (by tokens: [R n, K]), weight [F, K] or [R, F/R, K]   ->   y [n, F/R] (by tokens: [n, F])."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, ring: Ring) -> Tensor:
        def part(piece: RingPiece) -> Tensor:
            a, b = ring.tokens_of(x, piece), ring.weight_of(weight, piece).T
            return a @ b if bias is None or piece.distance else torch.addmm(bias, a, b)

        return _sums(part, ring, iter(()))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if torch.is_grad_enabled():
            return _blocking_backward(ctx, grads[0])
        (x, weight), ring, dy = ctx.saved_tensors, ctx.ring, grads[0].contiguous()
        needs_dx, needs_dweight, needs_dbias, _ = ctx.needs_input_grad
        dx = torch.empty_like(x) if needs_dx else None
        dweight = torch.empty_like(weight) if needs_dweight else None
        for piece, arrived in _arrivals(dy, ring) if needs_dx or needs_dweight else ():
            add = piece.distance > 0
            if dx is not None:
                into = ring.tokens_of(dx, piece)
                _product(arrived, ring.weight_of(weight, piece), into, add and not ring.by_tokens)
            if dweight is not None:
                into = ring.weight_of(dweight, piece)
                _product(arrived.T, ring.tokens_of(x, piece), into, add and ring.by_tokens)
        return dx, dweight, dy.sum(0) if needs_dbias else None, None


def applied(
    function: type[torch.autograd.Function], x: Tensor, weight: Tensor, bias: Tensor | None, ring: Ring, dim: int
) -> Tensor:
    """The function on x as a matrix. The token dim comes first, so that a piece of tokens is contiguous."""
    kind = x.device.type
    is_cast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    if is_cast and x.dtype is not torch.float64:  # like torch's own products
        dtype = torch.get_autocast_dtype(kind)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    front = x.movedim(dim, 0) if ring.by_tokens else x
    y = (function.apply if transform() is None else blocking)(front.reshape(-1, front.shape[-1]), weight, bias, ring)
    assert isinstance(y, Tensor)
    if not ring.by_tokens:
        return y.reshape(*x.shape[:-1], y.shape[-1])
    return y.reshape(-1, *front.shape[1:-1], y.shape[-1]).movedim(0, dim)


def ring_of(mode: str, x: Tensor, weight: Tensor, axis: Axis, dim: int, direction: str) -> Ring:
    """The ring for a call of one of the two functions. Raises ShapeError if sizes do not fit."""
    op = "all_gather_matmul" if mode == "gather" else "matmul_reduce_scatter"
    dim = dim_of(check_tensor(op, x), dim, op)
    one_of("direction", direction, DIRECTIONS)
    place = this_rank().place(axis)
    num_ranks, by_tokens = len(place.group), dim != x.dim() - 1
    check_tensor(op, weight)
    num_pieces = num_ranks if mode == "gather" and not by_tokens else 1
    check_ring_weight(op, weight.shape, x.shape[-1], num_pieces)
    if mode == "gather":
        return Ring(mode, axis, direction, x.numel() // max(1, x.shape[-1]) if by_tokens else x.shape[-1], by_tokens)
    if by_tokens:
        check_divides(op, x, dim, place)
        return Ring(mode, axis, direction, x.numel() // max(1, x.shape[-1]) // num_ranks, by_tokens)
    size = share(weight.shape[0], num_ranks, f"{op}: dim 0 of the weight has size", axis=place.label)
    return Ring(mode, axis, direction, size, by_tokens)


def _check_arrived(arrived: Tensor, mine: Tensor, ring: Ring) -> None:
    if arrived.shape != mine.shape:
        raise ShapeError(
            f"the ranks of axis {ring.axis!r} have pieces of different shapes, as matrices {list(mine.shape)} here and "
            f"{list(arrived.shape)} on another; give every rank the same number of tokens and features"
        )
