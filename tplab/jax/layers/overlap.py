"""Overlapped linear layers: matrix products that overlap with their own communication (collective matmul).

A product that needs an all_gather before it is cut into one product per piece: while one piece is multiplied, the next
is being sent. A product that needs a reduce_scatter after it is cut into one product per part: while one part is
computed, the sum of the previous ones is being sent. Wang et al. 2023, "Overlap communication with dependent
computation via decomposition"; Megatron's tp-comm-overlap is the same over tokens.

A hop and the product beside it are independent, which is all that XLA needs to overlap them: nothing has to be started
or waited for. The backward pass is the same loop in reverse, and overlaps as well.

R ranks, index i. Pieces travel as in `ring`: "up" to i + 1, "down" to i - 1, "both" half of the pieces each way,
"split" half of every piece each way. A sum is rounded once per hop.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

from jax import Array

from tplab.errors import one_of
from tplab.jax.comm.collectives import all_gather, axis_size, reduce_scatter
from tplab.jax.comm.rings import varying
from tplab.jax.layers.linear import check_weight, linear, share, with_bias
from tplab.jax.layers.parameters import Params, uniform
from tplab.jax.layers.ring_matmul import (
    Ring,
    arrivals,
    as_varying_as,
    cut,
    gathered,
    joined,
    key_of,
    of_each,
    ring_of,
    sums,
)
from tplab.jax.ranks.context import this_mesh
from tplab.mesh import Axis
from tplab.models.checks import MODES, check_sharded_input
from tplab.rings import DIRECTIONS, Direction
from tplab.sharding import P

Mode = Literal["gather", "scatter", "none"]


def all_gather_matmul(x: Array, weight: Array, axis: Axis, *, dim: int = -1, direction: Direction = "up") -> Array:
    """all_gather(x, axis, dim) @ weight.T, one product per piece: each hop runs beside the product of the piece before.

    dim=-1      features: x [..., D/R]   weight [F, D]   ->   y [..., F], the products of the pieces added up
    another     tokens: x [.., n, .., D]   weight [F, D]   ->   y [.., R n, .., F], the products concatenated
    forward     R-1 hops of x beside R products; the first is of this rank's own x
    backward    dx = matmul_reduce_scatter(dy, weight.T): R-1 hops beside 2R products. dweight is made from the
                pieces that arrived in the forward pass
    memory      all pieces of x and the weight are kept for the backward pass
    Raises ShapeError if the sizes do not fit.
    """
    ring, by_tokens = ring_of("gather", x, weight, axis, dim, direction)
    if not by_tokens:
        return _over_features(x, weight, ring)
    products = {key_of(piece): linear(arrived, weight) for piece, arrived in arrivals(x, ring, dim)}
    return joined(tuple(products[key_of(piece)] for piece in ring.pieces()), ring, dim)


def matmul_reduce_scatter(x: Array, weight: Array, axis: Axis, *, dim: int = -1, direction: Direction = "up") -> Array:
    """reduce_scatter(x @ weight.T, axis, dim), one product per part: each hop runs beside the product of the next part.

    dim=-1      features: x [..., K]   weight [F, K]   ->   y [..., F/R]: part i of the sum over ranks
    another     tokens: x [.., R n, .., K]   weight [F, K]   ->   y [.., n, .., F]
    forward     R-1 hops of y beside R products; the last one is this rank's own part
    backward    dx = all_gather_matmul(dy, weight.T), and dweight of the same pieces: R-1 hops of dy beside 2R products
    memory      x and weight are kept for the backward pass
    Raises ShapeError if R does not divide F, or the tokens.
    """
    ring, by_tokens = ring_of("scatter", x, weight, axis, dim, direction)
    if not by_tokens:
        return _over_features(x, weight, ring)
    tokens = of_each(cut(varying(x, axis), ring, dim), ring)
    return sums(lambda piece: linear(tokens[key_of(piece)], weight), ring, dim)


def _over_features(x: Array, weight: Array, ring: Ring) -> Array:
    """The product where features are cut: the weight of each piece that arrives, or leaves, is a piece of its own."""
    weights = of_each(cut(as_varying_as(x, weight, ring), ring, 1 if ring.mode == "gather" else 0), ring)
    if ring.mode == "gather":
        return gathered(x, weights, ring)
    return sums(lambda piece: linear(x, weights[key_of(piece)]), ring, -1)


@dataclass(frozen=True)
class AsyncLinear:
    """y = x W^T + b between features that are sharded over `axis` (R ranks) on both sides, overlapped.

    x [..., D/R]   weight [R, F/R, D/R], in the order of the ring   bias [F/R]   ->   y [..., F/R]: this rank's features
    "gather"    all_gather_matmul: R-1 hops of x. weight[k] is multiplied with the k-th piece that arrives
    "scatter"   matmul_reduce_scatter: R-1 hops of y. weight[k] makes the k-th part that leaves, its own last
    "none"      y = x @ weight[0].T + b, weight [1, F/R, D/R]: each rank by itself, nothing is sent. With one rank the
                other modes do the same
    bias        one per feature of y, on the rank that has the feature; added once

    `async_weight` puts the weight of a blocking layer in this order; `blocking_weight` does the reverse. A layer's
    specs concatenate the pieces of all ranks, [R R, F/R, D/R].
    Raises ShapeError if R does not divide D and F.
    """

    in_features: int
    out_features: int
    axis: Axis
    _: KW_ONLY
    mode: Mode = "gather"
    direction: Direction = "up"
    bias: bool = True

    def __post_init__(self) -> None:
        one_of("mode", self.mode, MODES)
        one_of("direction", self.direction, DIRECTIONS)

    @property
    def specs(self) -> Params:
        """How the parameters are sharded."""
        return {"weight": P(self.axis)} | ({"bias": P(self.axis)} if self.bias else {})

    def init(self, key: Any) -> Params:
        """The pieces of the weight that BlockingLinear has for this key: evenly over +-D^-1/2, which is the bound of a
        layer of D/R features times R^-1/2, since R products are added up ("none": +-(D/R)^-1/2). The bias is zero.

        Call it inside a rank's program: the number of pieces depends on R.
        """
        this_mesh()
        shape, ring = self._shape, self._ring
        if self.mode == "none":
            weight = uniform(key, (self.out_features, shape[2]), P(self.axis), shape[2] ** -0.5)[None]
        else:
            spec, dim = (P(self.axis), 1) if self.mode == "gather" else (P(None, self.axis), 0)
            whole = uniform(key, (self.out_features, self.in_features), spec, self.in_features**-0.5)
            weight = joined(cut(whole, ring._replace(is_stacked=False), dim), ring, dim)
        return with_bias(weight, self.out_features if self.bias else 0, P(self.axis))

    def __call__(self, params: Params, x: Array) -> Array:
        shape, ring = self._shape, self._ring
        check_sharded_input("AsyncLinear", x.shape, shape[2], self.in_features)
        check_weight("AsyncLinear", params["weight"], shape, self.axis)
        if shape[0] == 1:
            y = linear(x, params["weight"][0])
        else:
            y = _over_features(x, params["weight"], ring)
        return y + params["bias"] if self.bias else y

    @property
    def _shape(self) -> tuple[int, int, int]:
        """The shape of a rank's weight."""
        inputs = share(self.in_features, self.axis, "in_features")
        outputs = share(self.out_features, self.axis, "out_features")
        return (1 if self.mode == "none" else axis_size(self.axis), outputs, inputs)

    @property
    def _ring(self) -> Ring:
        size = self._shape[2] if self.mode == "gather" else self._shape[1]
        return Ring(self.mode, self.axis, self.direction, size, is_stacked=True)


@dataclass(frozen=True)
class BlockingLinear:
    """The same as AsyncLinear, with one collective and one product. Tests compare the two.

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
        one_of("mode", self.mode, MODES)

    @property
    def specs(self) -> Params:
        """How the parameters are sharded."""
        weight = P(None, self.axis) if self.mode == "scatter" else P(self.axis)
        return {"weight": weight} | ({"bias": P(self.axis)} if self.bias else {})

    def init(self, key: Any) -> Params:
        """The weight spread evenly over +-1/sqrt of the number of features that are added up, the bias zero. Whole
        (except "none", whose size depends on R); inside a rank's program, its piece."""
        fan_in = share(self.in_features, self.axis, "in_features") if self.mode == "none" else self.in_features
        weight = uniform(key, (self.out_features, fan_in), self.specs["weight"], fan_in**-0.5)
        return with_bias(weight, self.out_features if self.bias else 0, P(self.axis))

    def __call__(self, params: Params, x: Array) -> Array:
        inputs = share(self.in_features, self.axis, "in_features")
        outputs = share(self.out_features, self.axis, "out_features")
        check_sharded_input("BlockingLinear", x.shape, inputs, self.in_features)
        shape = {
            "gather": (outputs, self.in_features), "scatter": (self.out_features, inputs), "none": (outputs, inputs)
        }[self.mode]  # fmt: skip
        check_weight("BlockingLinear", params["weight"], shape, self.axis)
        whole = all_gather(x, self.axis, -1) if self.mode == "gather" else x
        y = linear(whole, params["weight"])
        if self.mode == "scatter":
            y = reduce_scatter(y, self.axis, -1)
        return y + params["bias"] if self.bias else y
