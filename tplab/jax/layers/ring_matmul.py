"""The engine of `overlap`: how pieces go around the ring and are multiplied by the weight."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from tplab.comm import dim_of
from tplab.errors import one_of
from tplab.jax.comm.collectives import axis_index, axis_size, ring_shift
from tplab.jax.comm.derivatives import with_backward
from tplab.jax.comm.rings import varying
from tplab.jax.layers.linear import linear, share
from tplab.jax.ranks.context import vary, varying_axes
from tplab.mesh import Axis
from tplab.models.checks import check_ring_weight
from tplab.rings import DIRECTIONS, Lanes, RingPiece, gather_lanes, scatter_lanes


class Ring(NamedTuple):
    """How one layer's arrays are cut into pieces for the ring.

    size         of a piece along the dim that is cut
    is_stacked   the whole is a weight [R, .., ..], one piece per rank, in the order of the ring, and the dim is that of
                 a row, which "split" cuts in two; otherwise pieces lie along the dim, in the order of the ranks
    """

    mode: str
    axis: Axis
    direction: str
    size: int
    is_stacked: bool = False

    def lanes(self) -> Lanes:
        """This rank's pieces. Their owners are known only at run time."""
        lanes = gather_lanes if self.mode == "gather" else scatter_lanes
        return lanes(axis_index(self.axis), axis_size(self.axis), self.size, self.direction)

    def pieces(self) -> list[RingPiece]:
        """This rank's own piece, those that go up, and those that go down."""
        lanes = self.lanes()
        return [lanes.own, *lanes.up, *lanes.down]

    def place(self, piece: RingPiece) -> int:
        """The index of a piece's block in a stacked weight. In a scatter this rank's own part comes last."""
        return piece.distance if self.mode == "gather" else (piece.distance - 1) % axis_size(self.axis)


_Key = tuple[int, int]


def key_of(piece: RingPiece) -> _Key:
    """What distinguishes a piece from the others of a rank."""
    return piece.distance, piece.begin


def of_each(arrays: tuple[Array, ...], ring: Ring) -> dict[_Key, Array]:
    """The arrays by piece."""
    return {key_of(piece): array for piece, array in zip(ring.pieces(), arrays, strict=True)}


def arrivals(x: Array, ring: Ring, dim: int) -> Iterator[tuple[RingPiece, Array]]:
    """Every rank's x, piece by piece, this rank's own first; while one is used, the next is being sent."""
    x, lanes = varying(x, ring.axis), ring.lanes()
    ways = {shift: lane for shift, lane in ((1, lanes.up), (-1, lanes.down)) if lane}
    flights = {shift: _part(x, lane[0], ring, dim) for shift, lane in ways.items()}
    arrived = [(lanes.own, x)]
    for hop in range(max(map(len, ways.values()), default=0)):
        coming = []
        for shift, lane in ways.items():
            if hop < len(lane):
                flights[shift] = ring_shift(flights[shift], ring.axis, shift)
                coming.append((lane[hop], flights[shift]))
        yield from arrived  # after the next hops: in reverse, a gradient is sent before the next is computed
        arrived = coming
    yield from arrived


def gathered(x: Array, weights: dict[_Key, Array], ring: Ring) -> Array:
    """The sum over pieces of x, each times its weight."""
    products = (linear(arrived, weights[key_of(piece)]) for piece, arrived in arrivals(x, ring, -1))
    total = next(products)
    for product in products:
        total = total + product
    return total


def sums(part: Callable[[RingPiece], Array], ring: Ring, dim: int) -> Array:
    """The sum of every rank's `part` for this rank; a sum is sent while the next part is computed."""
    lanes = ring.lanes()
    ways = {shift: lane for shift, lane in ((1, lanes.up), (-1, lanes.down)) if lane}
    flights: dict[int, Array] = {}
    for hop in range(max(map(len, ways.values()), default=0)):
        for shift, lane in ways.items():
            if hop < len(lane):
                total = part(lane[hop])
                flights[shift] = ring_shift(total + flights[shift] if hop else total, ring.axis, shift)
    total = part(lanes.own)
    if ring.direction == "split" and flights:
        return total + jnp.concatenate(list(flights.values()), dim)
    for arrived in flights.values():
        total = total + arrived
    return total


def _part(x: Array, piece: RingPiece, ring: Ring, dim: int) -> Array:
    """The half of x that a piece covers, or all of x."""
    return x if piece.size == ring.size else lax.slice_in_dim(x, piece.begin, piece.begin + piece.size, axis=dim)


def as_varying_as(x: Array, weight: Array, ring: Ring) -> Array:
    """The weight as varying as x, before it is cut, so that its gradient is summed over data-parallel ranks once."""
    return vary(varying(weight, ring.axis), tuple(varying_axes(x)))


# --- pieces of an array that holds those of all ranks, and back ------------------------------------------------------


def cut(whole: Array, ring: Ring, dim: int) -> tuple[Array, ...]:
    """The pieces, in the order of the ring. The gradient is joined in one step."""
    return tuple(with_backward(_cut, _joined_gradient, [whole], ring, dim))


def joined(pieces: tuple[Array, ...], ring: Ring, dim: int) -> Array:
    """The array with these pieces: the reverse of cut, and its gradient."""
    return with_backward(_joined, _cut_gradient, pieces, ring, dim)[0]


def _cut(wholes: list[Array], ring: Ring, dim: int) -> list[Array]:
    (whole,), found = wholes, []
    for piece in ring.pieces():
        if ring.is_stacked:
            row = whole[ring.place(piece)]
            found.append(lax.slice_in_dim(row, piece.begin, piece.begin + piece.size, axis=dim))
        else:
            found.append(lax.dynamic_slice_in_dim(whole, piece.owner * ring.size + piece.begin, piece.size, dim))
    return found


def _joined(pieces: list[Array], ring: Ring, dim: int) -> list[Array]:
    shape = [axis_size(ring.axis), *pieces[0].shape] if ring.is_stacked else list(pieces[0].shape)
    if not ring.is_stacked:
        shape[dim] = ring.size * axis_size(ring.axis)
    # an array to write piece by piece, which XLA does in place, while it would copy for a concatenation
    whole = vary(jnp.zeros(shape, pieces[0].dtype), tuple(varying_axes(pieces[0])))
    for piece, array in zip(ring.pieces(), pieces, strict=True):
        if ring.is_stacked:
            begin = [ring.place(piece), 0, 0]
            begin[1 + dim] = piece.begin
            whole = lax.dynamic_update_slice(whole, array[None], begin)
        else:
            whole = lax.dynamic_update_slice_in_dim(whole, array, piece.owner * ring.size + piece.begin, dim)
    return [whole]


def _joined_gradient(grads: list[Array], axes: Any, ring: Ring, dim: int) -> list[Array]:
    return [joined(tuple(grads), ring, dim)]


def _cut_gradient(grads: list[Array], axes: Any, ring: Ring, dim: int) -> list[Array]:
    return list(cut(grads[0], ring, dim))


# --- checks ----------------------------------------------------------------------------------------------------------


def ring_of(mode: str, x: Array, weight: Array, axis: Axis, dim: int, direction: str) -> tuple[Ring, bool]:
    """The ring of a call of one of the two functions, and whether tokens are cut rather than features.

    Raises ShapeError if sizes do not fit.
    """
    op = "all_gather_matmul" if mode == "gather" else "matmul_reduce_scatter"
    one_of("direction", direction, DIRECTIONS)
    num_ranks = axis_size(axis)
    dim = dim_of(x.shape, dim, op)
    by_tokens = dim != x.ndim - 1
    num_pieces = num_ranks if mode == "gather" and not by_tokens else 1
    check_ring_weight(op, weight.shape, x.shape[-1], num_pieces)
    if mode == "gather":
        return Ring(mode, axis, direction, x.shape[dim]), by_tokens
    if by_tokens:
        return Ring(mode, axis, direction, share(x.shape[dim], axis, f"{op}: dim {dim} of x")), by_tokens
    return Ring(mode, axis, direction, share(weight.shape[0], axis, f"{op}: dim 0 of the weight")), by_tokens
