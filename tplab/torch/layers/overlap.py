"""Overlapped linear layers: the communication of a product runs while the product is computed (collective matmul).

A product that needs an all_gather before it is cut into one product per piece: while one piece is multiplied, the next
one travels. A product that needs a reduce_scatter after it is cut into one product per part: while one part is
computed, the sum of the parts before it travels. Wang et al. 2023, "Overlap communication with dependent computation
via decomposition"; Megatron's tp-comm-overlap does the same over tokens.

With R ranks, at index i: pieces travel as in `rings`: "up" to i + 1, "down" to i - 1, "both" half of them each way,
"split" half of every piece each way. A sum is rounded once per hop.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tplab.errors import one_of
from tplab.mesh import Axis
from tplab.models.checks import MODES, check_sharded_input
from tplab.rings import DIRECTIONS, Direction, async_weight
from tplab.sharding import P
from tplab.torch.comm.collectives import all_gather, axis_index, axis_size, reduce_scatter
from tplab.torch.layers.linear import share
from tplab.torch.layers.parameters import Layer, drawn_piece, drawn_uniform, note_cuts
from tplab.torch.layers.ring_matmul import AllGatherMatmul, MatmulReduceScatter, Ring, applied, ring_of

Mode = Literal["gather", "scatter", "none"]


def all_gather_matmul(x: Tensor, weight: Tensor, axis: Axis, *, dim: int = -1, direction: Direction = "up") -> Tensor:
    """all_gather(x, axis, dim) @ weight.T, one product per piece: each hop runs beside the product of the piece before.

    dim=-1      features: x [..., D/R]   weight [F, D]   ->   y [..., F], the products of the pieces added up
    another     tokens: x [.., n, .., D]   weight [F, D]   ->   y [.., R n, .., F], the products concatenated
    forward     R-1 hops of x beside R products; the first is of this rank's own x
    backward    dx = matmul_reduce_scatter(dy, weight.T); for dweight x goes around once more: (R-1) hops of each,
                beside 2R products
    memory      an arrived piece is freed after its product: the backward pass keeps x and weight, not the whole x
    Raises ShapeError where the sizes do not fit. Its second derivatives are exact, but not overlapped.
    """
    ring = ring_of("gather", x, weight, axis, dim, direction)
    return applied(AllGatherMatmul, x, weight, None, ring, dim)


def matmul_reduce_scatter(
    x: Tensor, weight: Tensor, axis: Axis, *, dim: int = -1, direction: Direction = "up"
) -> Tensor:
    """reduce_scatter(x @ weight.T, axis, dim), one product per part: each hop runs beside the product of the next part.

    dim=-1      features: x [..., K]   weight [F, K]   ->   y [..., F/R]: part i of the sum over ranks
    another     tokens: x [.., R n, .., K]   weight [F, K]   ->   y [.., n, .., F]
    forward     R-1 hops of y beside R products; the last one is this rank's own part
    backward    dx = all_gather_matmul(dy, weight.T), and dweight of the same pieces: R-1 hops of dy beside 2R products
    memory      x and weight are kept for the backward pass
    Raises ShapeError where R does not divide F, or the tokens. Its second derivatives are exact, but not overlapped.
    """
    ring = ring_of("scatter", x, weight, axis, dim, direction)
    return applied(MatmulReduceScatter, x, weight, None, ring, dim)


class AsyncLinear(Layer):
    """y = x W^T + b between features that are sharded over `axis` (R ranks) on both sides, overlapped.

    x [..., D/R]   weight [R, F/R, D/R], in the order of the ring   bias [F/R]   ->   y [..., F/R]: this rank's features
    "gather"    all_gather_matmul: R-1 hops of x. weight[k] is multiplied with the k-th piece that arrives
    "scatter"   matmul_reduce_scatter: R-1 hops of y. weight[k] makes the k-th part that leaves, its own last
    "none"      y = x @ weight[0].T + b, weight [1, F/R, D/R]: each rank on its own, nothing is sent. With one rank the
                other modes do the same
    bias        one per feature of y, on the rank that has the feature; added once, with the product of its own piece

    `async_weight` puts the weight of a blocking layer in this order; `blocking_weight` does the reverse. The whole
    weight is drawn, and each rank keeps its pieces: evenly over +-D^-1/2, the bound of a layer of D/R features times
    R^-1/2, because R products are added up. For "none" nothing is added up: +-(D/R)^-1/2.
    Raises ShapeError where R does not divide D and F.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        axis: Axis,
        *,
        mode: Mode = "gather",
        direction: Direction = "up",
        bias: bool = True,
    ):
        super().__init__()
        self.in_features, self.out_features, self.axis = in_features, out_features, axis
        one_of("mode", mode, MODES)
        one_of("direction", direction, DIRECTIONS)
        self.mode, self.direction = mode, direction
        inputs, outputs = share(in_features, axis, "in_features"), share(out_features, axis, "out_features")
        num_ranks = axis_size(axis)
        if mode == "none" or num_ranks == 1:
            weight = drawn_uniform((out_features, inputs), P(axis), inputs**-0.5)[None]
        else:
            index, bound = axis_index(axis), in_features**-0.5

            def pieces(whole: Tensor) -> Tensor:
                stacked = async_weight(whole, num_ranks, mode, direction)
                return (stacked[index] * (2 * bound) - bound).contiguous()

            weight = drawn_piece((out_features, in_features), pieces, torch.rand)
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None
        note_cuts(self, axis, "weight", "bias")

    def forward(self, x: Tensor) -> Tensor:
        check_sharded_input("AsyncLinear", x.shape, self.weight.shape[-1], self.in_features)
        if len(self.weight) == 1:
            return F.linear(x, self.weight[0], self.bias)
        function = AllGatherMatmul if self.mode == "gather" else MatmulReduceScatter
        size = self.weight.shape[-1] if self.mode == "gather" else self.weight.shape[-2]
        ring = Ring(self.mode, self.axis, self.direction, size, is_stacked=True)
        return applied(function, x, self.weight, self.bias, ring, -1)


class BlockingLinear(Layer):
    """The same function as AsyncLinear, with one collective and one product. Tests compare the two.

    x [..., D/R]   bias [F/R]   ->   y [..., F/R]
    "gather"    weight [F/R, D]   y = all_gather(x, -1) @ weight.T + bias
    "scatter"   weight [F, D/R]   y = reduce_scatter(x @ weight.T, -1) + bias
    "none"      weight [F/R, D/R]   y = x @ weight.T + bias
    With one seed, AsyncLinear and this have the same weight.
    """

    def __init__(self, in_features: int, out_features: int, axis: Axis, *, mode: Mode = "gather", bias: bool = True):
        super().__init__()
        one_of("mode", mode, MODES)
        self.in_features, self.out_features, self.axis, self.mode = in_features, out_features, axis, mode
        self.inputs, outputs = share(in_features, axis, "in_features"), share(out_features, axis, "out_features")
        fan_in = self.inputs if mode == "none" else in_features
        spec = P(None, axis) if mode == "scatter" else P(axis)
        self.weight = nn.Parameter(drawn_uniform((out_features, fan_in), spec, fan_in**-0.5))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None
        note_cuts(self, axis, "weight", "bias")

    def forward(self, x: Tensor) -> Tensor:
        check_sharded_input("BlockingLinear", x.shape, self.inputs, self.in_features)
        if self.mode != "scatter":
            return F.linear(all_gather(x, self.axis, -1) if self.mode == "gather" else x, self.weight, self.bias)
        y = reduce_scatter(F.linear(x, self.weight), self.axis, -1)
        return y if self.bias is None else y + self.bias
