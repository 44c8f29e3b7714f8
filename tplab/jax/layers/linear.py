"""Linear layers whose weights are sharded over an axis of the mesh, and the MLP made of two of them.

A column-parallel layer gives each rank some of the features; a row-parallel one takes each rank's features and adds up
their contributions. As a pair they need one sum in the forward pass and one in the backward pass, whatever elementwise
function is between them (Shoeybi et al. 2019, section 3).

With `sequence_dim` the activations outside the pair are sharded along that dim (Korthikanti et al. 2022, section
4.2.2): the sum becomes an all_gather before and a reduce_scatter after, which together send the same bytes.

A layer holds its configuration, not its parameters. They are a dict of arrays with the names and layouts of torch's
state_dict:

    layer = ParallelMLP(512, 2048, "tp")
    params = layer.init(jax.random.key(0))                        # whole; inside a rank's program: the rank's piece
    run(program, mesh, params, x, in_specs=(layer.specs, P()))    # where program calls layer(params, x)
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from tplab import sharding
from tplab.errors import ShapeError, one_of
from tplab.jax.comm.collectives import all_gather, all_reduce, axis_size, reduce_scatter
from tplab.jax.comm.regions import copy_to, gather_from, scatter_to
from tplab.jax.layers.parameters import Composite, Params, here, uniform
from tplab.mesh import Axis
from tplab.models.checks import (
    ACTIVATIONS,
    check_column_input,
    check_row_input,
    check_row_modes,
    check_sequence_dim,
)
from tplab.sharding import P


@dataclass(frozen=True)
class ColumnParallelLinear:
    """y = x W^T + b, where each rank of `axis` (R ranks) has some of the output features.

    x [..., D], the same on every rank   weight [F/R, D]   bias [F/R]   ->   y [..., F/R]: this rank's features
    forward   y = x @ weight.T + bias             nothing is sent
    backward  dx = all_reduce(dy @ weight)        2(R-1)/R of x is sent by each rank; dW, db: nothing

    gather_output   y [..., F] on every rank: one more all_gather
    sequence_dim    x is this rank's piece along that dim: all_gather(x) first; dx = reduce_scatter(dy @ weight). Each
                    sends (R-1)/R of the whole x
    Raises ShapeError if R does not divide F. Shoeybi et al. 2019, operator f.
    """

    in_features: int
    out_features: int
    axis: Axis
    _: KW_ONLY
    bias: bool = True
    gather_output: bool = False
    sequence_dim: int | None = None

    @property
    def specs(self) -> Params:
        """How the parameters are sharded."""
        return {"weight": P(self.axis)} | ({"bias": P(self.axis)} if self.bias else {})

    def init(self, key: Any) -> Params:
        """The weight spread evenly over +-1/sqrt(D), the bias zero. Whole; inside a rank's program, its piece."""
        check_share(self.out_features, self.axis, "out_features")
        weight = uniform(key, (self.out_features, self.in_features), P(self.axis), self.in_features**-0.5)
        return with_bias(weight, self.out_features if self.bias else 0, P(self.axis))

    def __call__(self, params: Params, x: Array) -> Array:
        y = self.features(params, enter(x, self.axis, self.sequence_dim))
        return gather_from(y, self.axis) if self.gather_output else y

    def features(self, params: Params, x: Array) -> Array:
        """This rank's features of an x that has entered the region: nothing is sent, forward or backward."""
        check_column_input(x.shape, self.in_features, self.axis)
        num_here = share(self.out_features, self.axis, "out_features")
        check_weight("ColumnParallelLinear", params["weight"], (num_here, self.in_features), self.axis)
        y = linear(x, params["weight"])
        return y + params["bias"] if self.bias else y


@dataclass(frozen=True)
class RowParallelLinear:
    """y = x W^T + b, where each rank of `axis` (R ranks) has some of the input features.

    x [..., F/R], this rank's features   weight [D, F/R]   bias [D]   ->   y [..., D], the same on every rank
    forward   y = all_reduce(x @ weight.T) + bias   2(R-1)/R of y is sent by each rank
    backward  dx = dy @ weight                      nothing is sent

    The bias is added once, after the sum: added before, it would count R times.

    input_is_parallel   False: x [..., F] is the same on every rank, and each takes its piece of it
    sequence_dim        y is this rank's piece along that dim: reduce_scatter instead of all_reduce, (R-1)/R of all y.
                        The bias is then added to pieces, and its gradient is summed: 2(R-1)/R of D in backward
    reduce_output       False: y is this rank's part of the sum, to be summed together with others; needs bias=False
    Raises ShapeError if R does not divide F. Shoeybi et al. 2019, operator g.
    """

    in_features: int
    out_features: int
    axis: Axis
    _: KW_ONLY
    bias: bool = True
    input_is_parallel: bool = True
    sequence_dim: int | None = None
    reduce_output: bool = True

    def __post_init__(self) -> None:
        check_row_modes(self.bias, self.input_is_parallel, self.sequence_dim, self.reduce_output)

    @property
    def specs(self) -> Params:
        """How the parameters are sharded."""
        return {"weight": P(None, self.axis)} | ({"bias": P()} if self.bias else {})

    def init(self, key: Any) -> Params:
        """The weight spread evenly over +-1/sqrt(F), the bias zero. Whole; inside a rank's program, its piece."""
        check_share(self.in_features, self.axis, "in_features")
        weight = uniform(key, (self.out_features, self.in_features), P(None, self.axis), self.in_features**-0.5)
        return with_bias(weight, self.out_features if self.bias else 0, P())

    def __call__(self, params: Params, x: Array) -> Array:
        num_here = share(self.in_features, self.axis, "in_features")
        expected = num_here if self.input_is_parallel else self.in_features
        check_row_input(x.shape, expected, self.in_features, self.axis)
        check_weight("RowParallelLinear", params["weight"], (self.out_features, num_here), self.axis)
        if not self.input_is_parallel:
            x = scatter_to(x, self.axis)
        part = linear(x, params["weight"])
        if not self.reduce_output:
            return part
        y = leave(part, self.axis, self.sequence_dim)
        return y + shared(params["bias"], None if self.sequence_dim is None else self.axis) if self.bias else y


@dataclass(frozen=True)
class ParallelMLP(Composite):
    """Two linear layers and the nonlinearity between them; each rank of `axis` has some of the hidden features.

    x [..., D]   up.weight [H/R, D]   down.weight [D, H/R]   ->   y [..., D], the same on every rank
    "gelu"       y = down(gelu(up(x)))          "gelu_tanh": gelu by its tanh formula, as in GPT-2
    "swiglu"     y = down(silu(gate(x)) * up(x)), gate.weight [H/R, D]: gate and up are sharded together, so that each
                 rank has both factors of its hidden features (Shazeer 2020)
    cost         one all_reduce forward and one backward, 2(R-1)/R of x each, for swiglu too
    sequence_dim replaces each all_reduce with an all_gather and a reduce_scatter, which together send the same bytes

    With columns first and rows second, no rank needs all hidden features. The other order needs a second
    sum before the nonlinearity, since gelu(a + b) is not gelu(a) + gelu(b).
    """

    width: int
    hidden: int
    axis: Axis
    _: KW_ONLY
    activation: str = "gelu"
    bias: bool = True
    sequence_dim: int | None = None

    def __post_init__(self) -> None:
        one_of("activation", self.activation, ACTIVATIONS)

    @property
    def up(self) -> ColumnParallelLinear:
        return ColumnParallelLinear(self.width, self.hidden, self.axis, bias=self.bias, sequence_dim=self.sequence_dim)

    @property
    def down(self) -> RowParallelLinear:
        return RowParallelLinear(self.hidden, self.width, self.axis, bias=self.bias, sequence_dim=self.sequence_dim)

    def parts(self) -> dict[str, Any]:
        gate = {"gate": self.up} if self.activation == "swiglu" else {}
        return {**gate, "up": self.up, "down": self.down}

    def check_ranks(self) -> None:
        share(self.hidden, self.axis, "hidden")

    def __call__(self, params: Params, x: Array) -> Array:
        self.check_ranks()
        x = enter(x, self.axis, self.sequence_dim)  # once, for gate and up together
        gate = self.up.features(params["gate"], x) if self.activation == "swiglu" else None
        return self.down(params["down"], activated(self.up.features(params["up"], x), gate, self.activation))


# --- what the layers of this package share ---------------------------------------------------------------------------


def activated(hidden: Array, gate: Array | None, activation: str) -> Array:
    """The nonlinearity between the two layers of an MLP; with a gate it is SwiGLU."""
    if gate is not None:
        return jax.nn.silu(gate) * hidden
    return jax.nn.gelu(hidden, approximate=activation == "gelu_tanh")


def enter(x: Array, axis: Axis, sequence_dim: int | None) -> Array:
    """All of x on every rank, where it enters work that the ranks divide; its gradient is the sum of theirs."""
    if sequence_dim is None:
        return copy_to(x, axis)
    check_sequence_dim(x.shape, sequence_dim)
    return all_gather(x, axis, sequence_dim)


def leave(part: Array, axis: Axis, sequence_dim: int | None) -> Array:
    """The sum of every rank's part: whole on every rank, or this rank's piece along `sequence_dim`."""
    if sequence_dim is None:
        return all_reduce(part, axis)
    check_sequence_dim(part.shape, sequence_dim)
    return reduce_scatter(part, axis, sequence_dim)


def linear(x: Array, weight: Array) -> Array:
    """x @ weight.T, without a transposed weight: its gradient also comes as [out, in], so that nothing need be
    transposed before it is summed over data-parallel ranks."""
    return jnp.einsum("...i,oi->...o", x, weight)


def shared(parameter: Array, sequence_axis: Axis | None) -> Array:
    """A parameter that all ranks hold, where it is used. Under sequence parallelism each rank uses it on its own part
    of the sequence, so its gradient must be summed, which this function ensures."""
    return parameter if sequence_axis is None else copy_to(parameter, sequence_axis)


def share(size: int, axis: Axis, what: str) -> int:
    """How many of `size` elements each rank has. Raises ShapeError if they cannot be shared equally."""
    return sharding.share(size, axis_size(axis), f"{what} is", axis=axis, least=1)


def check_share(size: int, axis: Axis, what: str) -> None:
    """The same check as `share`, if there are ranks; outside `run` any size will do."""
    if jax.sharding.get_abstract_mesh().manual_axes:
        share(size, axis, what)


def check_weight(layer: str, weight: Array, shape: tuple[int, ...], axis: Axis) -> None:
    """Raise ShapeError if a rank's weight has a different shape."""
    if tuple(weight.shape) != shape:
        raise ShapeError(
            f"{layer}: each of the {axis_size(axis)} ranks of axis {axis!r} holds a weight {list(shape)}, but got "
            f"{list(weight.shape)}; in_specs=layer.specs gives each rank its piece of the whole parameters"
        )


def with_bias(weight: Array, num_biases: int, spec: P) -> Params:
    """A layer's initial parameters. The zeros also have the type of a rank's piece, so that their gradient does."""
    return {"weight": weight} | ({"bias": here(jnp.zeros(num_biases, weight.dtype), spec)} if num_biases else {})
