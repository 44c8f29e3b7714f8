"""A classifier whose linear layers overlap with their communication or block: one model in two forms.

Between the layers each rank holds its share of the features, as in S. Lippe's tutorial on asynchronous linear layers:
the input layer needs no communication, each block one gather and one scatter, the output layer one sum.

The tutorial keeps one module per piece, and stacks the layers. For 3 layers of width 512 on 4 ranks it has scale and
bias (3, 4, 128) and, for each of 4 arrivals, kernel (3, 4, 128, 128) as [layer, rank, in, out]. Here a layer's
`norm.weight` and biases are [512], which 4 ranks share, and its `up.weight` and `down.weight` are [16, 128, 128] as
[rank and arrival, out, in].
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

import jax
from jax import Array

from tplab.jax.comm.rings import Direction
from tplab.jax.layers.linear import ColumnParallelLinear, RowParallelLinear
from tplab.jax.layers.norms import ParallelRMSNorm
from tplab.jax.layers.overlap import AsyncLinear, BlockingLinear, Mode
from tplab.jax.layers.parameters import Params, nested
from tplab.mesh import Axis
from tplab.models.state import classifier_specs


@dataclass(frozen=True)
class ParallelMLPBlock:
    """y = x + down(silu(up(norm(x)))) on features that are sharded over `axis` (R ranks).

    x [..., W/R]   ->   y [..., W/R]: this rank's features
    norm      RMSNorm of all W features: one all_reduce of 1 number per token
    up        W -> H: the pieces of x are gathered        down   H -> W: the parts of y are scattered
    overlap   True: AsyncLinear, R-1 hops beside R products. False: all_gather before up, reduce_scatter after down
    cost      (R-1)/R of all of x is gathered and the same is scattered, in either form
    One key gives the same model in both forms. Raises ShapeError if R does not divide width and hidden.
    """

    width: int
    hidden: int
    axis: Axis
    _: KW_ONLY
    overlap: bool = True
    direction: Direction = "up"

    @property
    def norm(self) -> ParallelRMSNorm:
        return ParallelRMSNorm(self.width, self.axis)

    @property
    def up(self) -> AsyncLinear | BlockingLinear:
        return self._linear(self.width, self.hidden, "gather")

    @property
    def down(self) -> AsyncLinear | BlockingLinear:
        return self._linear(self.hidden, self.width, "scatter")

    def _linear(self, inputs: int, outputs: int, mode: Mode) -> AsyncLinear | BlockingLinear:
        if self.overlap:
            return AsyncLinear(inputs, outputs, self.axis, mode=mode, direction=self.direction)
        return BlockingLinear(inputs, outputs, self.axis, mode=mode)

    @property
    def specs(self) -> Params:
        """How the parameters are sharded."""
        return {"norm": self.norm.specs, "up": self.up.specs, "down": self.down.specs}

    def init(self, key: Any) -> Params:
        """The parameters of the norm and the linear layers; inside a rank's program, its piece."""
        first, second = jax.random.split(key)
        return {"norm": self.norm.init(), "up": self.up.init(first), "down": self.down.init(second)}

    def __call__(self, params: Params, x: Array) -> Array:
        hidden = jax.nn.silu(self.up(params["up"], self.norm(params["norm"], x)))
        return x + self.down(params["down"], hidden)


@dataclass(frozen=True)
class ParallelClassifier:
    """Input features -> `width` -> `num_layers` blocks -> one logit per class.

    x [..., I], the same on every rank   ->   logits [..., C], the same on every rank
    input     each rank computes its own W/R features: nothing is sent
    blocks    ParallelMLPBlock(width, expansion * width), overlapped or blocking
    output    the contributions of each rank's features to the logits, summed by one blocking all_reduce
    """

    in_features: int
    width: int
    num_classes: int
    axis: Axis
    _: KW_ONLY
    num_layers: int = 3
    expansion: int = 1
    overlap: bool = True
    direction: Direction = "up"

    @property
    def input(self) -> ColumnParallelLinear:
        return ColumnParallelLinear(self.in_features, self.width, self.axis)

    @property
    def block(self) -> ParallelMLPBlock:
        return ParallelMLPBlock(
            self.width, self.expansion * self.width, self.axis, overlap=self.overlap, direction=self.direction
        )

    @property
    def output(self) -> RowParallelLinear:
        return RowParallelLinear(self.width, self.num_classes, self.axis)

    @property
    def specs(self) -> Params:
        """How the parameters are sharded."""
        return nested(classifier_specs(self.num_layers, self.axis, overlap=self.overlap))

    def init(self, key: Any) -> Params:
        """The parameters of all layers; inside a rank's program, its piece. With overlap=True, call it only there."""
        first, last, *keys = jax.random.split(key, self.num_layers + 2)
        blocks = {str(number): self.block.init(k) for number, k in enumerate(keys)}
        return {"input": self.input.init(first), "blocks": blocks, "output": self.output.init(last)}

    def __call__(self, params: Params, x: Array) -> Array:
        x = self.input(params["input"], x)
        for number in range(self.num_layers):
            x = self.block(params["blocks"][str(number)], x)
        return self.output(params["output"], x)
