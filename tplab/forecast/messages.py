"""How long the messages of a plan take over their ranks and networks, and how much of that is not hidden."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from tplab.cost import Cluster, Cost
from tplab.cost.algorithms import GATHERS
from tplab.forecast.model import Model
from tplab.forecast.plan import Plan
from tplab.forecast.stacks import Stack
from tplab.forecast.traffic import Sent


@lru_cache(maxsize=64)
def over_cards(cluster: Cluster, cards: int | None) -> Cluster:
    """The cluster with only this many network cards per node; None: with all of them."""
    return cluster if cards is None or cluster.outer_link is None else replace(cluster, cards=cards)


def ranks_along(plan: Plan, axis: str, size: int = 0) -> tuple[int, ...]:
    """The ranks of rank 0's group along an axis. "dp" includes cp; a group of experts or nodes has another `size`."""
    stride, ranks = {
        "tp": (1, plan.tp),
        "cp": (plan.tp, plan.cp),
        "ep": (plan.expert_tp, plan.ep),
        "ep inside": (plan.expert_tp, size),
        "etp": (1, plan.expert_tp),
        "dp": (plan.tp, plan.copies),
        "pp": (plan.tp * plan.copies, plan.pp),
    }[axis]
    return tuple(range(0, stride * ranks, stride * ranks // (size or ranks)))


@lru_cache(maxsize=1 << 16)
def price(cluster: Cluster, op: str, num_bytes: float, ranks: tuple[int, ...]) -> Cost:
    """One collective over these ranks, or a "send" to the next, while all groups of its axis do the same.

    num_bytes   the whole tensor
    """
    if len(ranks) == 1 or not num_bytes:
        return Cost(0.0, 0, 0)
    if op == "send":
        link = cluster.link(ranks[0], ranks[1], at_once=True)
        return Cost(link.seconds(num_bytes), 1, num_bytes)
    of_rank = num_bytes / len(ranks) if op in GATHERS else num_bytes
    return cluster.collective_cost(op, of_rank, ranks, at_once=True)


def shown(
    sent: Iterable[Sent], model: Model, plan: Plan, cluster: Cluster, stack: Stack, axis: str, is_forward: bool
) -> float:
    """Seconds of messages along `axis` in one pass that are not hidden. The backward pass includes recomputation."""
    axes = ("ep", "ep inside", "etp") if axis == "ep" else (axis,)
    chosen = [one for one in sent if one.axis in axes and (one.phase == "forward") == is_forward]
    if not chosen:
        return 0.0
    shown = once = 1 - stack.hidden[0] if plan.overlap else 1.0
    if axis == "ep" and plan.dispatch is None and not stack.plain:
        nodes = 1 if cluster.node_size is None else -(-plan.ep * plan.expert_tp // cluster.node_size)
        once *= sent_once(model.experts_per_token, nodes if nodes > 1 else plan.ep)
    taken = [(one, price(cluster, one.op, one.bytes, ranks_along(plan, one.axis, one.ranks))) for one in chosen]
    share = {"ep": once}
    return sum(one.count * (c.latency + share.get(one.axis, shown) * (c.seconds - c.latency)) for one, c in taken)


def sent_once(copies: int, groups: int) -> float:
    """The share of a token's copies that are sent if a node (or within a node, a rank) with several of its experts
    receives it only once, as with DeepEP: groups (1 - (1 - 1 / groups)^copies) if all groups are equally likely."""
    return groups * (1 - (1 - 1 / groups) ** copies) / copies


def send_seconds(model: Model, plan: Plan, cluster: Cluster, sequence: int) -> float:
    """Seconds to send the activations of a microbatch from one stage to the next."""
    if plan.pp == 1:
        return 0.0
    tokens = plan.microbatch * sequence // plan.cp // (plan.tp if plan.sequence_parallel else 1)
    num_bytes = tokens * model.hidden * plan.kept_size
    return price(cluster, "send", num_bytes, ranks_along(plan, "pp")).seconds
