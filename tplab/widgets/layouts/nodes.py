"""Which ranks of a plan share a node, and over how many nodes a group of each axis is spread."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tplab.forecast import Plan
from tplab.forecast.plan import AXES


class Group(NamedTuple):
    """The groups of one axis, or "ep" for the consecutive ranks that share the experts of a layer: the number of ranks
    of each, and the most nodes over which one is spread."""

    axis: str
    ranks: int
    nodes: int


def groups(plan: Plan, node_size: int | None) -> list[Group]:
    """The groups of each axis with more than one rank. node_size None: all ranks are in one node."""
    nodes = (np.arange(plan.ranks) // (node_size or plan.ranks)).reshape([getattr(plan, axis) for axis in AXES])
    most = [int((np.diff(nodes, axis=at) > 0).sum(axis=at).max()) + 1 for at in range(len(AXES))]
    found = [Group(axis, ranks, many) for axis, ranks, many in zip(AXES, nodes.shape, most) if ranks > 1]
    if plan.ep > 1:
        spread = (np.diff(nodes.reshape(-1, plan.ep), axis=1) > 0).sum(axis=1)
        found.append(Group("ep", plan.ep, int(spread.max()) + 1))
    return found


def on_nodes(plan: Plan, node_size: int | None) -> str:
    """Which axes stay within a node, and over how many nodes the groups of the others are spread: "Inside a node of
    8 GPUs: tp 8. Across nodes: dp 16, each group on 16 nodes."."""
    found = groups(plan, node_size)
    inside = [f"{axis} {ranks}" for axis, ranks, nodes in found if nodes == 1]
    across = [f"{axis} {ranks}, each group on {nodes:,} nodes" for axis, ranks, nodes in found if nodes > 1]
    size = f"{node_size or plan.ranks:,}"
    parts = [f"Inside a node of {size} GPUs: {', '.join(inside)}."] if inside else []
    return " ".join([*parts, f"Across nodes: {'; '.join(across)}."] if across else parts)


def coordinates(plan: Plan, rank: int) -> str:
    """The coordinates of a rank on the axes with more than one rank: "pp 0 dp 1 tp 5"."""
    sizes = [getattr(plan, axis) for axis in AXES]
    return " ".join(f"{axis} {at}" for axis, size, at in zip(AXES, sizes, np.unravel_index(rank, sizes)) if size > 1)


def group_of(plan: Plan, rank: int, axis: str) -> list[int]:
    """The ranks that differ from `rank` only along an axis, including itself; for "ep", those with its experts."""
    if axis == "ep":
        first = rank - rank % plan.ep
        return list(range(first, first + plan.ep))
    ranks = np.arange(plan.ranks).reshape([getattr(plan, one) for one in AXES])
    place = [int(at) for at in np.unravel_index(rank, ranks.shape)]
    return ranks[tuple(slice(None) if one == axis else at for one, at in zip(AXES, place))].tolist()
