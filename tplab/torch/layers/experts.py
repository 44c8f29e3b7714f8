"""A mixture of experts over ranks: each rank of an axis holds some of the experts, and tokens travel to them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tplab.errors import one_of
from tplab.experts.routing import Routing
from tplab.mesh import Axis
from tplab.models.checks import ACTIVATIONS, check_dispatch, check_routed
from tplab.sharding import P
from tplab.torch.comm.collectives import axis_size
from tplab.torch.comm.regions import copy_to, reduce_from
from tplab.torch.layers.dispatch import Level, gathered, local, per_choice, per_rank
from tplab.torch.layers.linear import activated, share
from tplab.torch.layers.parameters import Layer, drawn_uniform, note_cuts
from tplab.torch.layers.router import Routed, Router
from tplab.torch.private import no_dispatch


class ParallelExperts(Layer):
    """E MLPs without biases, of which each rank of `axis` (R ranks) holds E/R: expert e is on rank e // (E/R).

    x [T, D], this rank's own tokens   Routed, what the router chose for them   ->   y [T, D]
    up [E/R, H, D]   down [E/R, D, H]   and with "swiglu" gate [E/R, H, D]
    y_t = sum_j weights_tj down_e (silu(gate_e x_t) * up_e x_t),  e = choices_tj

    dispatch    how tokens travel. Rows of D numbers sent to other ranks, forward and again backward:
      "all_to_all"   a row for each choice to the expert's rank, and one back: 2 (R-1)/R T k rows if loads are equal
      "per_rank"     a row for each rank that holds any of the token's experts: tplab.experts.expected_copies has their
                     expected number; the k choices and weights travel with it
      "gather"       every row to every rank, and the sum of results back: 2 (R-1) T rows, whatever is chosen
      "two_levels"   axis=(outer, inner): once to each outer position, which is a node, and there once to each rank
    tensor_axis       each expert's H features are also cut over these ranks, which exchange their tokens
    same_tokens       the ranks of tensor_axis all have the same tokens, and the results of their features are added up:
                      2 all_reduces of [T, D], one forward and one backward, and one of [T, k] backward

    Meta tensors have no choices: all experts count as chosen equally often, and a token's experts as evenly spaced.
    Ranks may have different numbers of tokens, also none. Gradients of experts are sums over the tokens of all ranks;
    their mean is over all ranks that have tokens, not over the copies of an expert: `average_gradients` handles this.
    Raises ShapeError where R does not divide E, or the ranks of tensor_axis H.
    """

    gate: nn.Parameter
    up: nn.Parameter
    down: nn.Parameter

    def __init__(
        self,
        width: int,
        hidden: int,
        routing: Routing,
        axis: Axis,
        *,
        activation: str = "swiglu",
        dispatch: str = "all_to_all",
        tensor_axis: Axis | None = None,
        same_tokens: bool = False,
    ):
        super().__init__()
        one_of("activation", activation, ACTIVATIONS)
        check_dispatch(dispatch, axis)
        self.width, self.hidden, self.routing, self.axis = width, hidden, routing, axis
        self.activation, self.dispatch, self.tensor_axis = activation, dispatch, tensor_axis
        self.same_tokens = same_tokens and tensor_axis is not None
        experts = routing.experts
        share(experts, axis, "experts")
        if tensor_axis is not None:
            share(hidden, tensor_axis, "hidden")
        names = ("gate", "up", "down") if activation == "swiglu" else ("up", "down")
        for name in names:
            is_down = name == "down"
            shape = (experts, width, hidden) if is_down else (experts, hidden, width)
            spec = P(axis, None, tensor_axis) if is_down else P(axis, tensor_axis)
            setattr(self, name, nn.Parameter(drawn_uniform(shape, spec, shape[-1] ** -0.5)))
        note_cuts(self, axis, *names)
        if tensor_axis is not None:
            note_cuts(self, tensor_axis, *names)

    def forward(self, x: Tensor, routed: Routed) -> Tensor:
        check_routed(x.shape, routed.choices.shape, self.width)
        level, axis, choices, weights = self._level(), self.tensor_axis, routed.choices, routed.weights
        if choices.is_meta:
            choices = _equally_often(len(x), self.routing)
        if axis is None or not self.same_tokens:
            return level(x, choices, weights)
        return reduce_from(level(copy_to(x, axis), choices, copy_to(weights, axis)), axis)

    def _level(self) -> Level:
        """The levels that this rank's tokens pass through."""
        experts, level = self.routing.experts, local(self._mlps, len(self.up))
        if self.tensor_axis is not None and not self.same_tokens:
            level = gathered(self.tensor_axis, len(self.up), level, is_split=True)
        if self.dispatch == "two_levels":
            outer, inner = self.axis
            return per_rank(outer, experts, per_rank(inner, experts // axis_size(outer), level))
        if self.dispatch == "gather":
            return gathered(self.axis, experts, level)
        level = per_rank(self.axis, experts, level)
        return per_choice(level) if self.dispatch == "all_to_all" else level

    def _mlps(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Every expert of this rank on its own rows; rows [N, D] are sorted by expert."""
        gates = self.gate if self.activation == "swiglu" else [None] * len(self.up)
        each = zip(rows.split(list(counts)), self.up, self.down, gates, strict=True)
        return torch.cat([mlp(x, up, down, gate, self.activation) for x, up, down, gate in each])


def _equally_often(tokens: int, rule: Routing) -> Tensor:
    """Choices [T, k] to replace those of meta tensors: each expert is chosen equally often, give or take one."""
    with no_dispatch():
        first = torch.arange(tokens, device="cpu")[:, None]
        return (first + torch.arange(rule.top_k, device="cpu") * (rule.experts // rule.top_k)) % rule.experts


class SharedExpert(nn.Module):
    """An MLP without biases that every token passes through, beside the experts that it chooses.

    x [..., D]   up [H, D]   down [D, H]   and with "swiglu" gate [H, D]   ->   y [..., D]; nothing is sent
    """

    up: nn.Parameter
    down: nn.Parameter

    def __init__(self, width: int, hidden: int, activation: str = "swiglu"):
        super().__init__()
        one_of("activation", activation, ACTIVATIONS)
        self.activation = activation
        for name in ("gate", "up", "down") if activation == "swiglu" else ("up", "down"):
            shape = (width, hidden) if name == "down" else (hidden, width)
            setattr(self, name, nn.Parameter(drawn_uniform(shape, P(), shape[-1] ** -0.5)))

    def forward(self, x: Tensor) -> Tensor:
        return mlp(x, self.up, self.down, getattr(self, "gate", None), self.activation)


class MixtureOfExperts(nn.Module):
    """A router and its experts; with `shared` features, also an MLP that every token passes through.

    x [..., D], this rank's own tokens   ->   y [..., D], and what the router chose (`Routed`), for its losses

        y, routed = experts(x)
        loss = task_loss(y) + 0.01 * balance_loss(routed)

    choices   given to forward, [T, k] whole numbers replace the router's own; the weights stay its own. Programs that
              must route alike, such as training after generation, record routed.choices and replay them
    Every rank holds the whole router and the whole shared MLP. See `Router` and `ParallelExperts`.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        routing: Routing,
        axis: Axis,
        *,
        activation: str = "swiglu",
        dispatch: str = "all_to_all",
        tensor_axis: Axis | None = None,
        shared: int = 0,
    ):
        super().__init__()
        self.router = Router(width, routing)
        self.experts = ParallelExperts(
            width, hidden, routing, axis, activation=activation, dispatch=dispatch, tensor_axis=tensor_axis
        )
        self.shared = SharedExpert(width, shared, activation) if shared else None

    def forward(self, x: Tensor, choices: Tensor | None = None) -> tuple[Tensor, Routed]:
        rows = x.reshape(-1, x.shape[-1])
        routed = self.router(rows, choices)
        y = self.experts(rows, routed).view(x.shape)
        return (y if self.shared is None else y + self.shared(x)), routed


def mlp(x: Tensor, up: Tensor, down: Tensor, gate: Tensor | None, activation: str) -> Tensor:
    """x [N, D]   up [H, D]   down [D, H]   gate [H, D]   ->   [N, D]. With a gate it is SwiGLU."""
    return F.linear(activated(F.linear(x, up), None if gate is None else F.linear(x, gate), activation), down)
