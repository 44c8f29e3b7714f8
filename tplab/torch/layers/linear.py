"""Linear layers whose weights are sharded over an axis of the mesh, and the MLP made of two of them.

A column-parallel layer gives each rank some of the features; a row-parallel one takes each rank's features and adds up
their contributions. As a pair they need one sum in the forward pass and one in the backward pass, whatever elementwise
function is between them (Shoeybi et al. 2019, section 3).

With `sequence_dim` the activations outside the pair are sharded along that dim (Korthikanti et al. 2022, section
4.2.2): the sum becomes an all_gather before and a reduce_scatter after, which together send the same bytes.

Modules are made inside a rank's program, which knows the rank's position, and hold this rank's piece of each weight.
The whole weight is drawn, and each rank keeps its piece: for one seed of `run` the whole is the same on any mesh.
Biases start at zero.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tplab import sharding
from tplab.errors import one_of
from tplab.mesh import Axis
from tplab.models.checks import (
    ACTIVATIONS,
    check_column_input,
    check_row_input,
    check_row_modes,
    check_sequence_dim,
)
from tplab.sharding import P
from tplab.torch.comm.collectives import all_gather, all_reduce, reduce_scatter
from tplab.torch.comm.regions import copy_to, gather_from, scatter_to
from tplab.torch.layers.parameters import Layer, drawn_uniform, note_cuts
from tplab.torch.ranks.rank import this_rank


class ColumnParallelLinear(Layer):
    """y = x W^T + b, where each rank of `axis` (R ranks) has some of the output features.

    x [..., D], the same on every rank   weight [F/R, D]   bias [F/R]   ->   y [..., F/R]: this rank's features
    forward   y = x @ weight.T + bias             nothing is sent
    backward  dx = all_reduce(dy @ weight)        2(R-1)/R of x is sent by each rank; dW, db: nothing

    gather_output   y [..., F] on every rank: one more all_gather
    sequence_dim    x is this rank's piece along that dim: all_gather(x) first; dx = reduce_scatter(dy @ weight). Each
                    sends (R-1)/R of the whole x
    Raises ShapeError where R does not divide F. Shoeybi et al. 2019, operator f.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        axis: Axis,
        *,
        bias: bool = True,
        gather_output: bool = False,
        sequence_dim: int | None = None,
    ):
        super().__init__()
        self.in_features, self.out_features, self.axis = in_features, out_features, axis
        self.gather_output, self.sequence_dim = gather_output, sequence_dim
        num_here = share(out_features, axis, "out_features")
        self.weight = nn.Parameter(drawn_uniform((out_features, in_features), P(axis), in_features**-0.5))
        self.bias = nn.Parameter(torch.zeros(num_here)) if bias else None
        note_cuts(self, axis, "weight", "bias")

    def forward(self, x: Tensor) -> Tensor:
        y = self.features(enter(x, self.axis, self.sequence_dim))
        return gather_from(y, self.axis) if self.gather_output else y

    def features(self, x: Tensor) -> Tensor:
        """This rank's features of an x that has entered the region: nothing is sent, forward or backward."""
        check_column_input(x.shape, self.in_features, self.axis)
        return F.linear(x, self.weight, self.bias)


class RowParallelLinear(Layer):
    """y = x W^T + b, where each rank of `axis` (R ranks) has some of the input features.

    x [..., F/R], this rank's features   weight [D, F/R]   bias [D]   ->   y [..., D], the same on every rank
    forward   y = all_reduce(x @ weight.T) + bias   2(R-1)/R of y is sent by each rank
    backward  dx = dy @ weight                      nothing is sent

    The bias is added once, after the sum: added before, it would count R times.

    input_is_parallel   False: x [..., F] is the same on every rank, and each takes its piece of it
    sequence_dim        y is this rank's piece along that dim: reduce_scatter replaces all_reduce, (R-1)/R of all y.
                        The bias is then added to pieces, and its gradient is summed: 2(R-1)/R of D in backward
    reduce_output       False: y is this rank's part of the sum, to be added up with others later; needs bias=False
    Raises ShapeError where R does not divide F. Shoeybi et al. 2019, operator g.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        axis: Axis,
        *,
        bias: bool = True,
        input_is_parallel: bool = True,
        sequence_dim: int | None = None,
        reduce_output: bool = True,
    ):
        super().__init__()
        check_row_modes(bias, input_is_parallel, sequence_dim, reduce_output)
        self.in_features, self.out_features, self.axis = in_features, out_features, axis
        self.input_is_parallel, self.sequence_dim, self.reduce_output = input_is_parallel, sequence_dim, reduce_output
        self.num_here = share(in_features, axis, "in_features")
        self.weight = nn.Parameter(drawn_uniform((out_features, in_features), P(None, axis), in_features**-0.5))
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None
        note_cuts(self, axis, "weight")

    def forward(self, x: Tensor) -> Tensor:
        expected = self.num_here if self.input_is_parallel else self.in_features
        check_row_input(x.shape, expected, self.in_features, self.axis)
        if not self.input_is_parallel:
            x = scatter_to(x, self.axis)
        part = F.linear(x, self.weight)
        if not self.reduce_output:
            return part
        y = leave(part, self.axis, self.sequence_dim)
        return y if self.bias is None else y + shared(self.bias, None if self.sequence_dim is None else self.axis)


class ParallelMLP(nn.Module):
    """Two linear layers and the nonlinearity between them; each rank of `axis` has some of the hidden features.

    x [..., D]   up.weight [H/R, D]   down.weight [D, H/R]   ->   y [..., D], the same on every rank
    "gelu"       y = down(gelu(up(x)))          "gelu_tanh": gelu by its tanh formula, as in GPT-2
    "swiglu"     y = down(silu(gate(x)) * up(x)), gate.weight [H/R, D]: gate and up are sharded together, so that each
                 rank has both factors of its hidden features (Shazeer 2020)
    cost         one all_reduce forward and one backward, 2(R-1)/R of x each, for swiglu too
    sequence_dim replaces each all_reduce with an all_gather and a reduce_scatter, which together send the same bytes

    With columns first and rows second, no rank needs all hidden features. The other order needs a second sum before the
    nonlinearity, because gelu(a + b) is not gelu(a) + gelu(b).
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        axis: Axis,
        *,
        activation: str = "gelu",
        bias: bool = True,
        sequence_dim: int | None = None,
    ):
        super().__init__()
        one_of("activation", activation, ACTIVATIONS)
        self.axis, self.activation, self.sequence_dim = axis, activation, sequence_dim
        share(hidden, axis, "hidden")
        if activation == "swiglu":
            self.gate = ColumnParallelLinear(width, hidden, axis, bias=bias, sequence_dim=sequence_dim)
        self.up = ColumnParallelLinear(width, hidden, axis, bias=bias, sequence_dim=sequence_dim)
        self.down = RowParallelLinear(hidden, width, axis, bias=bias, sequence_dim=sequence_dim)

    def forward(self, x: Tensor) -> Tensor:
        x = enter(x, self.axis, self.sequence_dim)  # once, for gate and up together
        gate = self.gate.features(x) if self.activation == "swiglu" else None
        return self.down(activated(self.up.features(x), gate, self.activation))


# --- shared by the layers of this package ----------------------------------------------------------------------------


def activated(hidden: Tensor, gate: Tensor | None, activation: str) -> Tensor:
    """The nonlinearity between the two layers of an MLP; with a gate it is SwiGLU."""
    if gate is not None:
        return F.silu(gate) * hidden
    return F.gelu(hidden, approximate="tanh" if activation == "gelu_tanh" else "none")


def enter(x: Tensor, axis: Axis, sequence_dim: int | None) -> Tensor:
    """The whole x on every rank, as input to work that the ranks divide; its gradient is the sum of theirs."""
    if sequence_dim is None:
        return copy_to(x, axis)
    check_sequence_dim(x.shape, sequence_dim)
    return all_gather(x, axis, sequence_dim)


def leave(part: Tensor, axis: Axis, sequence_dim: int | None) -> Tensor:
    """The sum of every rank's part: whole on every rank, or this rank's piece along `sequence_dim`."""
    if sequence_dim is None:
        return all_reduce(part, axis)
    check_sequence_dim(part.shape, sequence_dim)
    return reduce_scatter(part, axis, sequence_dim)


def shared(parameter: Tensor, sequence_axis: Axis | None) -> Tensor:
    """A parameter that all ranks hold, ready for use. Under sequence parallelism each rank uses it on its own part of
    the sequence, so its gradient is summed here, where that cannot be forgotten."""
    return parameter if sequence_axis is None else copy_to(parameter, sequence_axis)


def share(size: int, axis: Axis, what: str) -> int:
    """How many of `size` things each rank has. Raises ShapeError where they cannot be shared equally."""
    place = this_rank().place(axis)
    return sharding.share(size, len(place.group), f"{what} is", axis=place.label, least=1)
