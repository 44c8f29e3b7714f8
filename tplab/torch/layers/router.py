"""The router of a mixture of experts: scores, the choice of k experts per token, and the losses that balance them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tplab.experts.routing import Routing, check_balance
from tplab.mesh import Axis
from tplab.sharding import P
from tplab.torch.comm.collectives import all_reduce, axis_size
from tplab.torch.layers.linear import shared
from tplab.torch.layers.parameters import Layer, drawn_uniform


class Routed(NamedTuple):
    """What a router has chosen for T tokens.

    choices   [T, k] whole numbers: each token's experts, the best first; -1 where an expert had no room
    weights   [T, k]: what their results are multiplied by; 0 where a choice was dropped
    scores    [T, E]: softmax or sigmoid of the logits   logits   [T, E]
    """

    choices: Tensor
    weights: Tensor
    scores: Tensor
    logits: Tensor


class Router(Layer):
    """Chooses k of E experts for each token, by the rule of `routing`. Every rank holds the whole router.

    x [..., D], T tokens   weight [E, D]   bias [E]   ->   Routed
    logits   x @ weight.T, in float32 at least    scores   softmax or sigmoid of them
    choices  the k largest of scores + bias       weights  scores[choices], normalized and scaled
    nothing is sent, forward or backward

    bias      a buffer of zeros, added where experts are chosen but not where they are weighted: see `balanced_bias`
    choices   given to forward, these are replayed: the weights are still this router's, with its gradient
    sequence_axis   along which ranks share each sequence and count as one: the weight's gradient is added up over them
    """

    bias: Tensor

    def __init__(self, width: int, routing: Routing, *, sequence_axis: Axis | None = None):
        super().__init__()
        self.width, self.routing, self.sequence_axis = width, routing, sequence_axis
        self.weight = nn.Parameter(drawn_uniform((routing.experts, width), P(), width**-0.5))
        self.register_buffer("bias", torch.zeros(routing.experts))

    def forward(self, x: Tensor, choices: Tensor | None = None) -> Routed:
        rule = self.routing
        x = x.reshape(-1, self.width)
        wide = torch.promote_types(x.dtype, torch.float32)
        logits = F.linear(x.to(wide), shared(self.weight, self.sequence_axis).to(wide))
        scores = logits.softmax(-1) if rule.score == "softmax" else logits.sigmoid()
        if choices is None:
            choices = _with_room(_chosen(scores.detach() + self.bias, rule), rule)
        weights = scores.gather(1, choices.clamp(min=0)).masked_fill(choices < 0, 0)
        if rule.normalized:
            total = weights.sum(-1, keepdim=True)
            weights = weights / total.masked_fill(total == 0, 1)
        return Routed(choices, weights * rule.scale, scores, logits)


def _chosen(scores: Tensor, rule: Routing) -> Tensor:
    """The k experts with the highest scores, from the best groups only; first ones win ties. [T, E] -> [T, k]."""
    if rule.top_groups < rule.groups:
        grouped = scores.unflatten(-1, (rule.groups, rule.group_size))
        of_group = grouped.topk(min(2, rule.group_size), -1).values.sum(-1)
        best = of_group.argsort(stable=True, dim=-1, descending=True)[:, : rule.top_groups]
        is_open = torch.zeros_like(of_group, dtype=torch.bool).scatter(1, best, True)
        scores = grouped.masked_fill(~is_open[..., None], -torch.inf).flatten(-2)
    return scores.argsort(stable=True, dim=-1, descending=True)[:, : rule.top_k]


def _with_room(choices: Tensor, rule: Routing) -> Tensor:
    """The same choices, -1 where the expert has no room. First choices have priority, then earlier tokens."""
    if rule.capacity is None:
        return choices
    by_rank = choices.T.reshape(-1)
    wanted = F.one_hot(by_rank, rule.experts)
    place = (wanted.cumsum(0) - 1).gather(1, by_rank[:, None]).reshape(choices.T.shape).T
    return choices.masked_fill(place >= rule.room(len(choices)), -1)


def chosen_counts(routed: Routed, axis: Axis | None = None) -> Tensor:
    """How many choices fall on each expert [E], over all ranks of `axis` if given."""
    choices, experts = routed.choices.reshape(-1), routed.scores.shape[-1]
    counts = F.one_hot(choices.clamp(min=0), experts).mul((choices >= 0)[:, None]).sum(0)
    return counts if axis is None else all_reduce(counts, axis)


def balance_loss(
    routed: Routed,
    *,
    over: str = "microbatch",
    axis: Axis | None = None,
    sequence_axis: Axis | None = None,
    sequence: int | None = None,
) -> Tensor:
    """E sum_e f_e p_e: 1 if tokens choose all experts equally, at most E/k if all choose the same k.

    over            "microbatch": f counts the tokens of this rank; "sequence": each `sequence` tokens by themselves;
                    "global": those of all ranks along `axis`, which the other two do not accept
    sequence_axis   along which ranks share each sequence: what "microbatch" and "sequence" count is spread over them
    An axis costs an all_reduce of E numbers for each sequence. p is the mean of this rank's scores, as probabilities.
    So the mean of the ranks' losses is the loss of the whole batch.
    Raises ValueError if an axis does not fit `over`. See tplab.experts.routing for the equations and their sources.
    """
    tokens, experts = routed.scores.shape
    each, counted = check_balance(over, tokens, sequence, axis, sequence_axis)
    probabilities = routed.scores / routed.scores.sum(-1, keepdim=True)
    chosen = F.one_hot(routed.choices.clamp(min=0), experts) * (routed.choices >= 0)[..., None]
    counts, total = chosen.sum(1).unflatten(0, (-1, each)).sum(1), each
    if counted is not None:
        counts, total = all_reduce(counts, counted), each * axis_size(counted)
    fractions = counts.to(probabilities.dtype) / (total * routed.choices.shape[-1])
    return experts * (fractions * probabilities.unflatten(0, (len(fractions), -1)).mean(1)).sum(-1).mean()


def z_loss(routed: Routed) -> Tensor:
    """mean_t (log sum_e exp logits_te)^2: keeps the router's logits small."""
    return routed.logits.logsumexp(-1).square().mean()


def excess_load(routed: Routed, bias: Tensor) -> Tensor:
    """0 [], with a gradient of the bias [E]: E times how many more choices than the mean fall on each expert.

    So code that adds up gradients, over microbatches and ranks, adds up loads. bias -= rate * sign(gradient) is
    `balanced_bias`.
    """
    counts = chosen_counts(routed)
    excess = len(bias) * counts - counts.sum()
    return (excess.to(bias.dtype) * (bias - bias.detach())).sum()


def balanced_bias(bias: Tensor, counts: Tensor, rate: float = 1e-3) -> Tensor:
    """The next bias of a router: higher by `rate` for experts below the mean count, lower for those above it.

        router.bias = balanced_bias(router.bias, chosen_counts(routed, "ep"))     after each step

    bias + rate * sign(mean(counts) - counts); counts [E] are of all ranks that train the router. It replaces a balance
    loss, and changes no gradient. Wang et al. 2024 (arXiv:2408.15664); DeepSeek-V3 trains with it at 0.001.
    """
    loads = counts.to(bias.dtype)
    return bias + rate * (loads.mean() - loads).sign()
