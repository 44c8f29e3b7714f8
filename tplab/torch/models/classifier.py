"""A classifier whose linear layers are overlapped or blocking: one model in two forms.

Between the layers each rank holds its share of the features, as in S. Lippe's tutorial on asynchronous linear layers:
the input layer needs no communication, each block a gather and a scatter, and the output layer a sum.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from tplab.mesh import Axis
from tplab.torch.comm.rings import Direction
from tplab.torch.layers.linear import ColumnParallelLinear, RowParallelLinear
from tplab.torch.layers.norms import ParallelRMSNorm
from tplab.torch.layers.overlap import AsyncLinear, BlockingLinear, Mode


class ParallelMLPBlock(nn.Module):
    """y = x + down(silu(up(norm(x)))) on features that are sharded over `axis` (R ranks).

    x [..., W/R]   ->   y [..., W/R]: this rank's features
    norm      RMSNorm of all W features: one all_reduce of 1 number per token
    up        W -> H: gathers the pieces of x        down   H -> W: scatters the parts of y
    overlap   True: AsyncLinear, R-1 hops beside R products. False: all_gather before up, reduce_scatter after down
    cost      (R-1)/R of all of x is gathered and the same is scattered, either way
    One seed gives the same model in both forms. Raises ShapeError where R does not divide width and hidden.
    """

    def __init__(self, width: int, hidden: int, axis: Axis, *, overlap: bool = True, direction: Direction = "up"):
        super().__init__()
        self.overlap = overlap

        def linear(inputs: int, outputs: int, mode: Mode) -> nn.Module:
            if overlap:
                return AsyncLinear(inputs, outputs, axis, mode=mode, direction=direction)
            return BlockingLinear(inputs, outputs, axis, mode=mode)

        self.norm = ParallelRMSNorm(width, axis)
        self.up = linear(width, hidden, "gather")
        self.down = linear(hidden, width, "scatter")

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))


class ParallelClassifier(nn.Module):
    """Input features -> `width` -> `num_layers` blocks -> one logit per class.

    x [..., I], the same on every rank   ->   logits [..., C], the same on every rank
    input     each rank computes its own W/R features: nothing is sent
    blocks    ParallelMLPBlock(width, expansion * width), overlapped or blocking
    output    the part of the logits from each rank's features, summed by one blocking all_reduce
    """

    def __init__(
        self,
        in_features: int,
        width: int,
        num_classes: int,
        axis: Axis,
        *,
        num_layers: int = 3,
        expansion: int = 1,
        overlap: bool = True,
        direction: Direction = "up",
    ):
        super().__init__()
        self.input = ColumnParallelLinear(in_features, width, axis)
        self.blocks = nn.ModuleList(
            ParallelMLPBlock(width, expansion * width, axis, overlap=overlap, direction=direction)
            for _ in range(num_layers)
        )
        self.output = RowParallelLinear(width, num_classes, axis)

    def forward(self, x: Tensor) -> Tensor:
        x = self.input(x)
        for block in self.blocks:
            x = block(x)
        return self.output(x)
