"""Overlapped linear layers: products whose communication travels while they are computed (collective matmul).

A product that needs an all_gather before it is cut into one product a piece: while one is multiplied the next one is on
its way. A product that needs a reduce_scatter after it is cut into one product a part: while one is computed the sum of
those before it is on its way. Wang et al. 2023, "Overlap communication with dependent computation via
decomposition"; Megatron's tp-comm-overlap is the same over tokens.

A hop and the product beside it need nothing of each other, and that is all XLA has to know to overlap them: there is
nothing here to start or to wait for. The backward pass is this one read backwards, and overlaps as well.

R ranks, index i. Pieces travel as in `ring`: "up" to i + 1, "down" to i - 1, "both" half of the pieces each way,
"split" half of every piece each way. A sum is rounded once a hop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from tplab.errors import ShapeError
from tplab.jax.comm import all_gather, axis_index, axis_size, reduce_scatter, ring_shift
from tplab.jax.context import this_mesh, vary, varying_axes
from tplab.jax.layers import check_weight, linear, share, with_bias
from tplab.jax.parameters import Params, uniform
from tplab.jax.ring import Direction, checked_direction, varying
from tplab.mesh import Axis
from tplab.ring_order import Lanes, Piece, gather_lanes, scatter_lanes
from tplab.sharding import P

Mode = Literal["gather", "scatter", "none"]
MODES = ("gather", "scatter", "none")


def all_gather_matmul(x: Array, weight: Array, axis: Axis, *, dim: int = -1, direction: Direction = "up") -> Array:
    """all_gather(x, axis, dim) @ weight.T, one product a piece: each hop runs beside the product of the piece before.

    dim=-1      features: x [..., D/R]   weight [F, D]   ->   y [..., F], the products of the pieces added up
    another     tokens: x [.., n, .., D]   weight [F, D]   ->   y [.., R n, .., F], the products one behind the other
    forward     R-1 hops of x beside R products; the first is of this rank's own x
    backward    dx = matmul_reduce_scatter(dy, weight.T): R-1 hops beside 2R products. dweight is made of the pieces
                that came in the forward pass
    memory      all pieces of x and the weight are kept for the backward pass
    Raises ShapeError where the sizes do not fit.
    """
    ring, by_tokens = _ring("gather", x, weight, axis, dim, direction)
    if not by_tokens:
        return _gathered(x, _of_each(_cut(_as_varying_as(x, weight, ring), ring, 1), ring), ring)
    products = {_key(piece): linear(arrived, weight) for piece, arrived in _arrivals(x, ring, dim)}
    return _joined(tuple(products[_key(piece)] for piece in ring.pieces()), ring, dim)


def matmul_reduce_scatter(x: Array, weight: Array, axis: Axis, *, dim: int = -1, direction: Direction = "up") -> Array:
    """reduce_scatter(x @ weight.T, axis, dim), one product a part: each hop runs beside the product of the next part.

    dim=-1      features: x [..., K]   weight [F, K]   ->   y [..., F/R]: part i of the sum over ranks
    another     tokens: x [.., R n, .., K]   weight [F, K]   ->   y [.., n, .., F]
    forward     R-1 hops of y beside R products; the last one is this rank's own part
    backward    dx = all_gather_matmul(dy, weight.T), and dweight of the same pieces: R-1 hops of dy beside 2R products
    memory      x and weight are kept for the backward pass
    Raises ShapeError where R does not divide F, or the tokens.
    """
    ring, by_tokens = _ring("scatter", x, weight, axis, dim, direction)
    if not by_tokens:
        weights = _of_each(_cut(_as_varying_as(x, weight, ring), ring, 0), ring)
        return _sums(lambda piece: linear(x, weights[_key(piece)]), ring, -1)
    tokens = _of_each(_cut(varying(x, axis), ring, dim), ring)
    return _sums(lambda piece: linear(tokens[_key(piece)], weight), ring, dim)


@dataclass(frozen=True)
class AsyncLinear:
    """y = x W^T + b between features that are sharded over `axis` (R ranks) on both sides, overlapped.

    x [..., D/R]   weight [R, F/R, D/R], in the order of the ring   bias [F/R]   ->   y [..., F/R]: this rank's features
    "gather"    all_gather_matmul: R-1 hops of x. weight[k] is multiplied with the k-th piece that arrives
    "scatter"   matmul_reduce_scatter: R-1 hops of y. weight[k] makes the k-th part that leaves, the own one last
    "none"      y = x @ weight[0].T + b, weight [1, F/R, D/R]: each rank for itself, nothing is sent. With one rank the
                other modes are this one
    bias        one per feature of y, on the rank that has the feature; added once

    `async_weight` brings the weight of a blocking layer into this order, `blocking_weight` back. A layer's specs put
    the pieces of all ranks behind one another, [R R, F/R, D/R].
    Raises ShapeError where R does not divide D and F.
    """

    in_features: int
    out_features: int
    axis: Axis
    _: KW_ONLY
    mode: Mode = "gather"
    direction: Direction = "up"
    bias: bool = True

    def __post_init__(self) -> None:
        check_mode(self.mode)
        checked_direction(self.direction)

    @property
    def specs(self) -> Params:
        """How the parameters lie on the mesh."""
        return {"weight": P(self.axis)} | ({"bias": P(self.axis)} if self.bias else {})

    def init(self, key: Any) -> Params:
        """The pieces of the weight that BlockingLinear has for this key: evenly over +-D^-1/2, which is the bound of a
        layer of D/R features times R^-1/2, since R products are added up ("none": +-(D/R)^-1/2). The bias is zero.

        Inside a rank's program: how many pieces there are depends on R.
        """
        this_mesh()
        shape, ring = self._shape, self._ring
        if self.mode == "none":
            weight = uniform(key, (self.out_features, shape[2]), P(self.axis), shape[2] ** -0.5)[None]
        else:
            spec, dim = (P(self.axis), 1) if self.mode == "gather" else (P(None, self.axis), 0)
            whole = uniform(key, (self.out_features, self.in_features), spec, self.in_features**-0.5)
            pieces: tuple[Array, ...] = _cut(whole, ring, dim)
            weight: Array = _stacked(pieces, ring, dim)
        return with_bias(weight, self.out_features if self.bias else 0, P(self.axis))

    def __call__(self, params: Params, x: Array) -> Array:
        shape, ring = self._shape, self._ring
        _check_features("AsyncLinear", x, shape[2], self.in_features)
        check_weight("AsyncLinear", params["weight"], shape, self.axis)
        if shape[0] == 1:
            y = linear(x, params["weight"][0])
        elif self.mode == "gather":
            y = _gathered(x, _of_each(_unstacked(_as_varying_as(x, params["weight"], ring), ring, 1), ring), ring)
        else:
            weights = _of_each(_unstacked(_as_varying_as(x, params["weight"], ring), ring, 0), ring)
            y = _sums(lambda piece: linear(x, weights[_key(piece)]), ring, -1)
        return y + params["bias"] if self.bias else y

    @property
    def _shape(self) -> tuple[int, int, int]:
        """That of a rank's weight."""
        inputs = share(self.in_features, self.axis, "in_features")
        outputs = share(self.out_features, self.axis, "out_features")
        return (1 if self.mode == "none" else axis_size(self.axis), outputs, inputs)

    @property
    def _ring(self) -> Ring:
        size = self._shape[2] if self.mode == "gather" else self._shape[1]
        return Ring(self.mode, self.axis, self.direction, size)


@dataclass(frozen=True)
class BlockingLinear:
    """What AsyncLinear computes, by one collective and one product: what it is held against.

    x [..., D/R]   bias [F/R]   ->   y [..., F/R]
    "gather"    weight [F/R, D]   y = all_gather(x, -1) @ weight.T + bias
    "scatter"   weight [F, D/R]   y = reduce_scatter(x @ weight.T, -1) + bias
    "none"      weight [F/R, D/R]   y = x @ weight.T + bias
    One key gives AsyncLinear and this the same weight.
    """

    in_features: int
    out_features: int
    axis: Axis
    _: KW_ONLY
    mode: Mode = "gather"
    bias: bool = True

    def __post_init__(self) -> None:
        check_mode(self.mode)

    @property
    def specs(self) -> Params:
        """How the parameters lie on the mesh."""
        weight = P(None, self.axis) if self.mode == "scatter" else P(self.axis)
        return {"weight": weight} | ({"bias": P(self.axis)} if self.bias else {})

    def init(self, key: Any) -> Params:
        """The weight spread evenly over +-1/sqrt of the features that are added up, the bias zero. Whole (but "none",
        whose size depends on R); inside a rank's program, its piece."""
        fan_in = share(self.in_features, self.axis, "in_features") if self.mode == "none" else self.in_features
        weight = uniform(key, (self.out_features, fan_in), self.specs["weight"], fan_in**-0.5)
        return with_bias(weight, self.out_features if self.bias else 0, P(self.axis))

    def __call__(self, params: Params, x: Array) -> Array:
        inputs = share(self.in_features, self.axis, "in_features")
        outputs = share(self.out_features, self.axis, "out_features")
        _check_features("BlockingLinear", x, inputs, self.in_features)
        shape = {
            "gather": (outputs, self.in_features), "scatter": (self.out_features, inputs), "none": (outputs, inputs)
        }[self.mode]  # fmt: skip
        check_weight("BlockingLinear", params["weight"], shape, self.axis)
        whole = all_gather(x, self.axis, -1) if self.mode == "gather" else x
        y = linear(whole, params["weight"])
        if self.mode == "scatter":
            y = reduce_scatter(y, self.axis, -1)
        return y + params["bias"] if self.bias else y


# --- how pieces meet the weight --------------------------------------------------------------------------------------


class Ring(NamedTuple):
    """How one layer's arrays are cut into pieces that travel; `size` is that of a piece, along the dim that is cut."""

    mode: str
    axis: Axis
    direction: str
    size: int

    def lanes(self) -> Lanes:
        """This rank's pieces. Who owns them is known when the program runs."""
        lanes = gather_lanes if self.mode == "gather" else scatter_lanes
        return lanes(axis_index(self.axis), axis_size(self.axis), self.size, self.direction)

    def pieces(self) -> list[Piece]:
        """The own one, those that go up, those that go down."""
        lanes = self.lanes()
        return [lanes.own, *lanes.up, *lanes.down]


    def place(self, piece: Piece) -> int:
        """Where a stacked weight has what belongs to a piece: of a scatter, the own part leaves last."""
        return piece.distance if self.mode == "gather" else (piece.distance - 1) % axis_size(self.axis)


_Key = tuple[int, int]


def _key(piece: Piece) -> _Key:
    """What tells a piece from the others of a rank."""
    return piece.distance, piece.begin


def _of_each(arrays: tuple[Array, ...], ring: Ring) -> dict[_Key, Array]:
    """An array a piece, to be looked up."""
    return {_key(piece): array for piece, array in zip(ring.pieces(), arrays, strict=True)}


def _arrivals(x: Array, ring: Ring, dim: int) -> Iterator[tuple[Piece, Array]]:
    """Every rank's x, piece by piece, this rank's own first; while one is used the next one's hop is under way."""
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
        yield from arrived  # after the hops that follow: read backwards, a gradient leaves before the next is made
        arrived = coming
    yield from arrived


def _gathered(x: Array, weights: dict[_Key, Array], ring: Ring) -> Array:
    """The sum over pieces of x, each times its weight."""
    products = (linear(arrived, weights[_key(piece)]) for piece, arrived in _arrivals(x, ring, -1))
    total = next(products)
    for product in products:
        total = total + product
    return total


def _sums(part: Callable[[Piece], Array], ring: Ring, dim: int) -> Array:
    """The sum of what every rank's `part` makes for this rank; sums are on their way while the next part is made."""
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


def _part(x: Array, piece: Piece, ring: Ring, dim: int) -> Array:
    """The half of x that a piece is, or x."""
    return x if piece.size == ring.size else lax.slice_in_dim(x, piece.begin, piece.begin + piece.size, axis=dim)


def _as_varying_as(x: Array, weight: Array, ring: Ring) -> Array:
    """The weight, before it is cut: its gradient is then summed over data-parallel ranks once, not piece by piece."""
    return vary(varying(weight, ring.axis), tuple(varying_axes(x)))


# --- from the order of the ranks to that of the ring, and back -------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _cut(whole: Array, ring: Ring, dim: int) -> tuple[Array, ...]:
    """The pieces of a dim that has those of all ranks. The gradient is put together in one go."""
    return tuple(
        lax.dynamic_slice_in_dim(whole, piece.owner * ring.size + piece.begin, piece.size, dim)
        for piece in ring.pieces()
    )


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _joined(pieces: tuple[Array, ...], ring: Ring, dim: int) -> Array:
    """What has these pieces. The reverse of _cut, and its gradient."""
    shape = list(pieces[0].shape)
    shape[dim] = ring.size * axis_size(ring.axis)
    whole = _empty(tuple(shape), pieces[0])
    for piece, array in zip(ring.pieces(), pieces, strict=True):
        whole = lax.dynamic_update_slice_in_dim(whole, array, piece.owner * ring.size + piece.begin, dim)
    return whole


_cut.defvjp(
    lambda whole, ring, dim: (_cut(whole, ring, dim), None),
    lambda ring, dim, _, pieces: (_joined(pieces, ring, dim),),
)
_joined.defvjp(
    lambda pieces, ring, dim: (_joined(pieces, ring, dim), None),
    lambda ring, dim, _, whole: (_cut(whole, ring, dim),),
)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _unstacked(weight: Array, ring: Ring, dim: int) -> tuple[Array, ...]:
    """The pieces of a weight [R, .., ..] that lie in the order of the ring; `dim` of a row is cut by "split"."""
    return tuple(
        lax.slice_in_dim(weight[ring.place(piece)], piece.begin, piece.begin + piece.size, axis=dim)
        for piece in ring.pieces()
    )


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _stacked(pieces: tuple[Array, ...], ring: Ring, dim: int) -> Array:
    """What has these pieces. The reverse of _unstacked, and its gradient."""
    weight = _empty((axis_size(ring.axis), *pieces[0].shape), pieces[0])
    for piece, array in zip(ring.pieces(), pieces, strict=True):
        begin = [ring.place(piece), 0, 0]
        begin[1 + dim] = piece.begin
        weight = lax.dynamic_update_slice(weight, array[None], begin)
    return weight


_unstacked.defvjp(
    lambda weight, ring, dim: (_unstacked(weight, ring, dim), None),
    lambda ring, dim, _, pieces: (_stacked(pieces, ring, dim),),
)
_stacked.defvjp(
    lambda pieces, ring, dim: (_stacked(pieces, ring, dim), None),
    lambda ring, dim, _, weight: (_unstacked(weight, ring, dim),),
)


def _empty(shape: tuple[int, ...], like: Array) -> Array:
    """To be written piece by piece: XLA does so in place, where it would copy what is concatenated."""
    return vary(jnp.zeros(shape, like.dtype), tuple(varying_axes(like)))


# --- checks ----------------------------------------------------------------------------------------------------------


def _ring(mode: str, x: Array, weight: Array, axis: Axis, dim: int, direction: str) -> tuple[Ring, bool]:
    """What a call of one of the two functions is about, and whether tokens are cut, not features.

    Raises ShapeError where sizes do not fit.
    """
    op = "all_gather_matmul" if mode == "gather" else "matmul_reduce_scatter"
    checked_direction(direction)
    num_ranks = axis_size(axis)
    if not -x.ndim <= dim < x.ndim:
        raise ShapeError(f"{op} along dim {dim}: the array has {x.ndim} dims {list(x.shape)}")
    if weight.ndim != 2:
        raise ShapeError(f"{op}: the weight is a matrix [F, D], as nn.Linear has it, not {list(weight.shape)}")
    by_tokens = dim % x.ndim != x.ndim - 1
    expected = x.shape[-1] * (num_ranks if mode == "gather" and not by_tokens else 1)
    if weight.shape[1] != expected:
        pieces = f" of {x.shape[-1]} on each of {num_ranks} ranks" if expected != x.shape[-1] else ""
        raise ShapeError(
            f"{op}: the weight {list(weight.shape)} takes {weight.shape[1]} features, and there are {expected}{pieces};"
            f"\ngive weight [F, {expected}], as nn.Linear({expected}, F) has it"
        )
    if mode == "gather":
        return Ring(mode, axis, direction, x.shape[dim]), by_tokens
    if by_tokens:
        return Ring(mode, axis, direction, share(x.shape[dim], axis, f"{op}: dim {dim} of x")), by_tokens
    return Ring(mode, axis, direction, share(weight.shape[0], axis, f"{op}: dim 0 of the weight")), by_tokens


def _check_features(layer: str, x: Array, num_here: int, in_features: int) -> None:
    if x.shape[-1] != num_here:
        way_out = "; that is all of x: scatter_to(x, axis) gives each rank its features"
        raise ShapeError(
            f"{layer} takes x [..., {num_here}], this rank's share of {in_features} features, and got {list(x.shape)}"
            + (way_out if x.shape[-1] == in_features else "")
        )


def check_mode(mode: str) -> str:
    """Raise ValueError for a mode that there is not."""
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}; it must be one of {', '.join(MODES)}")
    return mode
