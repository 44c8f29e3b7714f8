"""The router of a mixture of experts: scores, the choice of k experts per token, and the losses that balance them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from tplab.experts.routing import Routing, check_balance
from tplab.jax.comm.collectives import all_reduce, axis_size
from tplab.jax.layers.linear import linear
from tplab.jax.layers.parameters import Params, uniform
from tplab.mesh import Axis
from tplab.sharding import P


class Routed(NamedTuple):
    """The choices of a router for T tokens.

    choices   [T, k] whole numbers: each token's experts, the best first; -1 where an expert had no room
    weights   [T, k]: the factors of their results; 0 where a choice was dropped
    scores    [T, E]: softmax or sigmoid of the logits   logits   [T, E]
    """

    choices: Array
    weights: Array
    scores: Array
    logits: Array


@dataclass(frozen=True)
class Router:
    """Chooses k of E experts for each token, by the rule of `routing`. Every rank holds the whole router.

    x [..., D], T tokens   weight [E, D]   ->   Routed
    logits   x @ weight.T, in float32 at least    scores   softmax or sigmoid of them
    choices  the k largest of scores + bias       weights  scores[choices], normalized and scaled
    nothing is sent, forward or backward

    bias      params may have one, [E], which `init` does not create. It affects the choice of experts but not their
              weights, and has no gradient: see `balanced_bias`
    choices   choices passed to a call are replayed: the weights are still this router's, and have its gradient
    """

    width: int
    routing: Routing

    @property
    def specs(self) -> Params:
        """How the parameters are sharded."""
        return {"weight": P()}

    def init(self, key: Any) -> Params:
        """The weight spread evenly over +-1/sqrt(D)."""
        return {"weight": uniform(key, (self.routing.experts, self.width), P(), self.width**-0.5)}

    def __call__(self, params: Params, x: Array, choices: Array | None = None) -> Routed:
        rule = self.routing
        x = x.reshape(-1, self.width)
        wide = jnp.promote_types(x.dtype, jnp.float32)
        logits = linear(x.astype(wide), params["weight"].astype(wide))
        scores = jax.nn.softmax(logits) if rule.score == "softmax" else jax.nn.sigmoid(logits)
        if choices is None:
            choices = _with_room(_chosen(lax.stop_gradient(scores + params.get("bias", 0)), rule), rule)
        weights = jnp.where(choices < 0, 0, jnp.take_along_axis(scores, jnp.maximum(choices, 0), 1))
        if rule.normalized:
            total = weights.sum(-1, keepdims=True)
            weights = weights / jnp.where(total == 0, 1, total)
        return Routed(choices, weights * rule.scale, scores, logits)


def _chosen(scores: Array, rule: Routing) -> Array:
    """The k experts with the highest scores in the best groups; of equal ones, the first. [T, E] -> [T, k]."""
    if rule.top_groups < rule.groups:
        grouped = scores.reshape(-1, rule.groups, rule.group_size)
        of_group = lax.top_k(grouped, min(2, rule.group_size))[0].sum(-1)
        is_open = jax.nn.one_hot(lax.top_k(of_group, rule.top_groups)[1], rule.groups, dtype=bool).any(1)
        scores = jnp.where(is_open[..., None], grouped, -jnp.inf).reshape(scores.shape)
    return lax.top_k(scores, rule.top_k)[1]


def _with_room(choices: Array, rule: Routing) -> Array:
    """The same choices, -1 where the expert has no room: first choices come first, and then the tokens in order."""
    if rule.capacity is None:
        return choices
    by_rank = choices.T.reshape(-1)
    wanted = jax.nn.one_hot(by_rank, rule.experts, dtype=jnp.int32)
    place = jnp.take_along_axis(wanted.cumsum(0) - 1, by_rank[:, None], 1).reshape(choices.T.shape).T
    return jnp.where(place >= rule.room(len(choices)), -1, choices)


def chosen_counts(routed: Routed, axis: Axis | None = None) -> Array:
    """How many choices fall on each expert [E], over all ranks of `axis` if it is given."""
    counts = jax.nn.one_hot(routed.choices, routed.scores.shape[-1], dtype=jnp.int32).sum((0, 1))
    return counts if axis is None else all_reduce(counts, axis)


def balance_loss(
    routed: Routed,
    *,
    over: str = "microbatch",
    axis: Axis | None = None,
    sequence_axis: Axis | None = None,
    sequence: int | None = None,
) -> Array:
    """E sum_e f_e p_e: 1 if tokens choose all experts equally, at most E/k if all choose the same k.

    over            "microbatch": f counts the tokens of this rank; "sequence": each `sequence` tokens by themselves;
                    "global": those of all ranks along `axis`, which the other two do not accept
    sequence_axis   the axis whose ranks share each sequence: "microbatch" and "sequence" count over all of them
    Each axis costs an all_reduce of E numbers, for each sequence. p is the mean of this rank's scores, as
    probabilities. So the mean of the ranks' losses is that of the whole batch.
    Raises ValueError if an axis does not go with `over`. See tplab.experts.routing for the equations and their sources.
    """
    tokens, experts = routed.scores.shape
    each, counted = check_balance(over, tokens, sequence, axis, sequence_axis)
    probabilities = routed.scores / routed.scores.sum(-1, keepdims=True)
    chosen = jax.nn.one_hot(routed.choices, experts, dtype=probabilities.dtype).sum(1)
    counts, total = chosen.reshape(-1, each, experts).sum(1), each
    if counted is not None:
        counts, total = all_reduce(counts, counted), each * axis_size(counted)
    fractions = counts / (total * routed.choices.shape[-1])
    means = probabilities.reshape(len(fractions), -1, experts).mean(1)
    return experts * (fractions * means).sum(-1).mean()


def z_loss(routed: Routed) -> Array:
    """mean_t (log sum_e exp logits_te)^2: keeps the router's logits small."""
    return jnp.square(jax.nn.logsumexp(routed.logits, -1)).mean()


def excess_load(routed: Routed, bias: Array) -> Array:
    """0 [], whose gradient with respect to the bias [E] is E times each expert's choices in excess of the mean.

    So adding up gradients over microbatches and ranks adds up loads. bias -= rate * sign(gradient) is
    `balanced_bias`.
    """
    counts = chosen_counts(routed)
    excess = len(bias) * counts - counts.sum()
    return (excess.astype(bias.dtype) * (bias - lax.stop_gradient(bias))).sum()


def balanced_bias(bias: Array, counts: Array, rate: float = 1e-3) -> Array:
    """The next bias of a router: higher by `rate` for experts below the mean count, lower for those above it.

        bias = balanced_bias(bias, chosen_counts(routed, "ep"))     after each step

    bias + rate * sign(mean(counts) - counts); counts [E] are of all ranks that train the router. It replaces a balance
    loss, and changes no gradient. Wang et al. 2024 (arXiv:2408.15664); DeepSeek-V3 trains with it at 0.001.
    """
    loads = counts.astype(bias.dtype)
    return bias + rate * jnp.sign(loads.mean() - loads)
