"""A mixture of experts over ranks: each rank of an axis holds some of the experts, and tokens are sent to them."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from tplab.errors import one_of
from tplab.experts.routing import Routing
from tplab.jax.comm.collectives import all_reduce, axis_size
from tplab.jax.layers.dispatch import Level, gathered, local, per_choice, per_rank
from tplab.jax.layers.linear import activated, check_share, share
from tplab.jax.layers.parameters import Params, uniform
from tplab.jax.layers.router import Routed, Router
from tplab.mesh import Axis
from tplab.models.checks import ACTIVATIONS, check_dispatch, check_routed
from tplab.sharding import P


@dataclass(frozen=True)
class ParallelExperts:
    """E MLPs without biases, of which each rank of `axis` (R ranks) holds E/R: expert e is on rank e // (E/R).

    x [T, D], this rank's own tokens   Routed, what the router chose for them   ->   y [T, D]
    up [E/R, H, D]   down [E/R, D, H]   and with "swiglu" gate [E/R, H, D]
    y_t = sum_j weights_tj down_e (silu(gate_e x_t) * up_e x_t),  e = choices_tj

    dispatch    how tokens are sent. Rows of D numbers to each other rank, forward and again backward, if an expert
                takes at most C of a rank's tokens (`Routing.room`; all T without a capacity):
      "all_to_all"   E/R C rows, one for each possible choice, and as many back
      "per_rank"     min(T, E/R C) rows: one for all of a token's experts there, with k choices and weights
      "gather"       T rows to every rank, and the results' sum back, whatever is chosen
      "two_levels"   axis=(outer, inner): once to each outer position, which is a node, and there once to each rank
    tensor_axis       each expert's H features are also cut over the ranks of this axis, which exchange their tokens
    same_tokens       the ranks of tensor_axis all have the same tokens, and the results of their features are added up:
                      2 all_reduces of [T, D], one forward and one backward, and one of [T, k] backward

    All ranks have the same number of tokens. An expert computes at most C of a rank's tokens, as chosen by a router
    with the same capacity. Differentiate the mean of the ranks' losses, and all gradients are right.
    Raises ShapeError if R does not divide E, or the ranks of tensor_axis H.
    """

    width: int
    hidden: int
    routing: Routing
    axis: Axis
    _: KW_ONLY
    activation: str = "swiglu"
    dispatch: str = "all_to_all"
    tensor_axis: Axis | None = None
    same_tokens: bool = False

    def __post_init__(self) -> None:
        one_of("activation", self.activation, ACTIVATIONS)
        check_dispatch(self.dispatch, self.axis)

    @property
    def specs(self) -> Params:
        """How the parameters are sharded."""
        rows, columns = P(self.axis, self.tensor_axis), P(self.axis, None, self.tensor_axis)
        return {name: columns if name == "down" else rows for name in names_of(self.activation)}

    def init(self, key: Any) -> Params:
        """Weights spread evenly over +-1/sqrt of their input features. Whole; inside a rank's program, its piece."""
        check_share(self.routing.experts, self.axis, "experts")
        if self.tensor_axis is not None:
            check_share(self.hidden, self.tensor_axis, "hidden")
        return drawn(key, (self.routing.experts,), self.width, self.hidden, self.specs)

    def __call__(self, params: Params, x: Array, routed: Routed) -> Array:
        check_routed(x.shape, routed.choices.shape, self.width)
        y = self._level(params)(x, routed.choices, routed.weights, self.routing.room(len(x)))
        return all_reduce(y, self.tensor_axis) if self.tensor_axis is not None and self.same_tokens else y

    def _level(self, params: Params) -> Level:
        """The dispatch of this rank's tokens."""
        here = share(self.routing.experts, self.axis, "experts")
        level = local(lambda rows: mlp(params, rows, self.activation), here)
        if self.tensor_axis is not None and not self.same_tokens:
            level = gathered(self.tensor_axis, here, level, is_split=True)
        if self.dispatch == "two_levels":
            outer, inner = self.axis
            return per_rank(
                outer, self.routing.experts, per_rank(inner, self.routing.experts // axis_size(outer), level)
            )
        if self.dispatch == "gather":
            return gathered(self.axis, self.routing.experts, level)
        level = per_rank(self.axis, self.routing.experts, level)
        return per_choice(level) if self.dispatch == "all_to_all" else level


@dataclass(frozen=True)
class MixtureOfExperts:
    """A router and its experts; with `shared` features, also an MLP that every token uses.

    x [..., D], this rank's own tokens   ->   y [..., D], and the router's choices (`Routed`), for its losses

        y, routed = layer(params, x)
        loss = task_loss(y) + 0.01 * balance_loss(routed)

    choices   [T, k] whole numbers passed to a call replace the router's choices; the weights stay the router's.
              Programs that must route alike, as training after generation, record routed.choices and replay them. All
              are followed, whatever the capacity, so that there are slots for all T tokens at each expert
    Every rank holds the router and the shared MLP whole. See `Router` and `ParallelExperts`.
    """

    width: int
    hidden: int
    routing: Routing
    axis: Axis
    _: KW_ONLY
    activation: str = "swiglu"
    dispatch: str = "all_to_all"
    tensor_axis: Axis | None = None
    shared: int = 0

    @property
    def router(self) -> Router:
        return Router(self.width, self.routing)

    @property
    def experts(self) -> ParallelExperts:
        return ParallelExperts(
            self.width,
            self.hidden,
            self.routing,
            self.axis,
            activation=self.activation,
            dispatch=self.dispatch,
            tensor_axis=self.tensor_axis,
        )

    @property
    def specs(self) -> Params:
        """How the parameters are sharded."""
        found = {"router": self.router.specs, "experts": self.experts.specs}
        return found | ({"shared": dict.fromkeys(names_of(self.activation), P())} if self.shared else {})

    def init(self, key: Any) -> Params:
        """The parameters of all parts. Whole; inside a rank's program, its piece."""
        first, second, third = jax.random.split(key, 3)
        found = {"router": self.router.init(first), "experts": self.experts.init(second)}
        if self.shared:
            found["shared"] = drawn(third, (), self.width, self.shared, self.specs["shared"])
        return found

    def __call__(self, params: Params, x: Array, choices: Array | None = None) -> tuple[Array, Routed]:
        rows = x.reshape(-1, x.shape[-1])
        routed = self.router(params["router"], rows, choices)
        experts = self.experts  # replayed choices may exceed the capacity
        if choices is not None:
            experts = replace(experts, routing=replace(self.routing, capacity=None))
        y = experts(params["experts"], rows, routed).reshape(x.shape)
        return (y + mlp(params["shared"], x, self.activation) if self.shared else y), routed


def names_of(activation: str) -> tuple[str, ...]:
    """The names of the weights of an MLP."""
    return ("gate", "up", "down") if activation == "swiglu" else ("up", "down")


def drawn(key: Any, experts: tuple[int, ...], width: int, hidden: int, specs: Params) -> Params:
    """The weights of one MLP, or of several in one array, spread evenly over +-1/sqrt of their input features."""
    found = {}
    for one, (name, spec) in zip(jax.random.split(key, len(specs)), specs.items(), strict=True):
        shape = (*experts, width, hidden) if name == "down" else (*experts, hidden, width)
        found[name] = uniform(one, shape, spec, shape[-1] ** -0.5)
    return found


def mlp(params: Params, x: Array, activation: str) -> Array:
    """x [.., N, D]   up [.., H, D]   down [.., D, H]   gate [.., H, D]   ->   [.., N, D]. With a gate it is SwiGLU."""
    gate = _linear(x, params["gate"]) if activation == "swiglu" else None
    return _linear(activated(_linear(x, params["up"]), gate, activation), params["down"])


def _linear(x: Array, weight: Array) -> Array:
    return jnp.einsum("...ni,...oi->...no", x, weight)
