"""Which rank holds which expert, replicas included, and how many rows dispatch sends then.

An expert that many tokens choose makes the others wait for its rank. A placement may therefore hold replicas of it on
several ranks, each of which takes a part of its tokens, and put heavy and light experts together (DeepSeek-V3,
arXiv:2412.19437, section 3.4; its balancer, EPLB, is public).

A token's row [D] goes to the ranks that hold its experts, and their results come back the same way (combine). The
number of rows depends on how often a token is sent:

    per choice   k rows, one for each expert                       dispatch as all_to_all of sorted rows
    per rank     one row to each rank that holds any of them       the rank computes all its experts of the token, and
                                                                   returns their sum
    per node     one row to each node, which hands it on inside    two levels: once through the network, then NVLink
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import comb
from typing import Any

import numpy as np

from tplab.errors import ShapeError
from tplab.experts.routing import Routing, table_of
from tplab.sharding import share


@dataclass(frozen=True)
class Placement:
    """Which experts each rank holds: `slots[rank]` are their numbers, as many on each rank.

    Raises ShapeError if a rank holds two replicas of one expert, which would not reduce its load, or if an expert is
    missing.
    """

    slots: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        held = sorted({expert for rank in self.slots for expert in rank})
        if not held or held != list(range(len(held))):
            missing = sorted(set(range(max(held, default=0) + 1)) - set(held))
            raise ShapeError(f"no rank holds expert {', '.join(map(str, missing))}; each expert is on a rank")
        if len({len(rank) for rank in self.slots}) > 1:
            raise ShapeError(f"ranks hold {[len(rank) for rank in self.slots]} experts; each holds as many")
        for number, rank in enumerate(self.slots):
            twice = {expert for expert in rank if rank.count(expert) > 1}
            if twice:
                raise ShapeError(
                    f"rank {number} holds expert {min(twice)} twice; replicas of an expert belong on different ranks"
                )

    @property
    def ranks(self) -> int:
        return len(self.slots)

    @cached_property
    def experts(self) -> int:
        return max(expert for rank in self.slots for expert in rank) + 1

    @cached_property
    def holders(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that hold each expert, in order."""
        found: list[list[int]] = [[] for _ in range(self.experts)]
        for number, rank in enumerate(self.slots):
            for expert in rank:
                found[expert].append(number)
        return tuple(map(tuple, found))

    def rank_of(self, choices: np.ndarray) -> np.ndarray:
        """The rank that computes each choice: choices [T, k]   ->   ranks [T, k], -1 where the choice was dropped.

        Token t goes to replica t mod n of an expert that has n.
        """
        counts = np.array([len(holders) for holders in self.holders])
        table = np.array([[h[i % len(h)] for i in range(counts.max())] for h in self.holders])
        token = np.arange(len(choices))[:, None]
        return np.where(choices >= 0, table[choices, token % counts[choices]], -1)

    def load_of_ranks(self, loads: Any) -> np.ndarray:
        """The load of each rank if replicas share the load of an expert equally: loads [E]   ->   [R]."""
        each = np.asarray(loads) / [len(holders) for holders in self.holders]
        return np.array([each[list(rank)].sum() for rank in self.slots])


def contiguous(experts: int, ranks: int) -> Placement:
    """Expert e on rank e // (experts / ranks). Raises ShapeError if the ranks do not divide the experts."""
    each = share(experts, ranks, "the number of experts is", axis="ep", least=1)
    return Placement(tuple(tuple(range(rank * each, (rank + 1) * each)) for rank in range(ranks)))


def balanced(loads: Any, ranks: int, *, slots: int | None = None, groups: int = 1, nodes: int = 1) -> Placement:
    """A placement in which ranks have nearly equal loads.

    loads    how many tokens choose each of E experts, as `chosen_counts` counts them
    slots    experts and replicas in total (E if None), the same number on each rank
    groups   groups of neighbouring experts, of which a token visits few: they stay together on one of `nodes`, if nodes
             divide groups

    Step by step, each greedy: whole groups are packed into nodes, the heaviest first, each into the lightest node with
    room; within a node the expert with the largest load per replica gets another one, until the slots are full; and
    replicas are packed into ranks as groups into nodes. If nodes do not divide the groups, all ranks are one node. This
    is what EPLB does (deepseek-ai/EPLB d52c72d, MIT); but two replicas of an expert never come to one rank.
    Raises ShapeError for numbers that do not divide, or if an expert would need more replicas than a node has ranks.
    """
    weight = np.asarray(loads, dtype=float)
    slots = len(weight) if slots is None else slots
    if weight.ndim != 1 or not weight.size or not np.isfinite(weight).all() or weight.min() < 0:
        raise ShapeError("loads are one number per expert, 0 or more")
    if slots < len(weight):
        raise ShapeError(f"{len(weight)} experts need as many slots at least, and there are {slots}")
    if groups % nodes:
        groups = nodes = 1
    size = share(len(weight), groups, "the number of experts is", axis="group", least=1)
    share(slots, ranks, "the number of slots is", axis="ep", least=1)
    ranks_here = share(ranks, nodes, "the number of ranks is", axis="node", least=1)

    on_node = _packed(weight.reshape(groups, size).sum(1), nodes)
    found: list[tuple[int, ...]] = []
    for node in on_node:
        experts = [group * size + i for group in node for i in range(size)]
        replicas = _replicated(weight, experts, slots // nodes, ranks_here)
        counts = np.bincount(replicas, minlength=len(weight))
        packed = _packed(weight[replicas] / counts[replicas], ranks_here, replicas)
        found += [tuple(replicas[i] for i in rank) for rank in packed]
    return Placement(tuple(found))


def _replicated(weight: np.ndarray, experts: list[int], slots: int, most: int) -> list[int]:
    """The experts, and after them the replicas that fill the slots; at most `most` of one."""
    if slots > most * len(experts):
        raise ShapeError(
            f"{slots} slots for {len(experts)} experts on {most} ranks: a rank would hold an expert twice; take "
            f"at most {most * len(experts)} slots per node"
        )
    found, counts = list(experts), dict.fromkeys(experts, 1)
    while len(found) < slots:
        heaviest = max((e for e in experts if counts[e] < most), key=lambda e: weight[e] / counts[e])
        counts[heaviest] += 1
        found.append(heaviest)
    return found


def _packed(weights: np.ndarray, packs: int, names: Sequence[int] = ()) -> list[list[int]]:
    """Put items into packs of equal size, the heaviest first, each into the lightest pack with room that does not hold
    its name yet. An item that is left over is swapped with an item of a full pack."""
    room = len(weights) // packs
    found: list[list[int]] = [[] for _ in range(packs)]
    if room == 1:
        return [[item] for item in range(packs)]
    total = [0.0] * packs

    def clashes(item: int, pack: int, leaving: int = -1) -> bool:
        return bool(names) and any(names[other] == names[item] for other in found[pack] if other != leaving)

    for item in sorted(range(len(weights)), key=lambda i: -weights[i]):
        open_packs = [pack for pack in range(packs) if len(found[pack]) < room]
        free = [pack for pack in open_packs if not clashes(item, pack)]
        if free:
            pack = min(free, key=total.__getitem__)
        else:
            pack = open_packs[0]
            other, place = next(
                (other, place)
                for other in sorted(range(packs), key=total.__getitem__)
                for place, held in enumerate(found[other])
                if other != pack and not clashes(item, other, held) and not clashes(held, pack)
            )
            held = found[other][place]
            found[other][place] = item
            total[other] += weights[item] - weights[held]
            item = held
        found[pack].append(item)
        total[pack] += weights[item]
    return found


def rows_between(choices: Any, placement: Placement, *, once: bool = False) -> np.ndarray:
    """How many rows each rank sends to each other one in dispatch: [R, R], by source and target.

    choices [T, k]   of all ranks together, each rank's T / R tokens after the other's; -1 is a dropped choice
    once             a token is sent to a rank once, however many of its experts are there

    The diagonal is what stays on its rank. Bytes: rows x D x bytes per number; combine sends the transposed table.
    """
    table = table_of(choices, placement.experts)
    targets = placement.rank_of(table)
    sources = _sources(len(table), placement.ranks)
    return _counted(sources, targets, placement.ranks, once)


def tokens_between(choices: Any, placement: Placement, nodes: int) -> np.ndarray:
    """How many rows each node sends to each other node if a token is sent to a node only once: [nodes, nodes]."""
    table = table_of(choices, placement.experts)
    each = share(placement.ranks, nodes, "the number of ranks is", axis="node", least=1)
    ranks = placement.rank_of(table)
    targets = np.where(ranks >= 0, ranks // each, -1)
    return _counted(_sources(len(table), placement.ranks) // each, targets, nodes, once=True)


def expected_copies(routing: Routing, places: int) -> float:
    """The average number of places to which a token is sent, if it is sent to each place only once.

    places   ranks or nodes that have equally many neighbouring experts each: whole groups, or equal parts of a group

    For a token that chooses G' of the G groups at random, and then k of their experts at random. With n experts in a
    group, a place that has m of them in each of its g groups is reached with the probability

        sum_j C(g, j) C(G - g, G' - j) / C(G, G') (1 - C(G' n - j m, k) / C(G' n, k))     j of its groups are chosen

    A router whose groups compete by their best experts reaches more: at most min(k, G') groups.
    Of these copies 1/places stay where the token is, if tokens are spread equally. Raises ShapeError if a place
    would have a part of one group and a part of another.
    """
    here = share(routing.experts, places, "the number of experts is", axis="place", least=1)
    size, groups, chosen = routing.group_size, routing.groups, routing.top_groups
    if here % size and size % here:
        raise ShapeError(
            f"a place has {here} experts and a group {size}: places must hold whole groups, or equal parts of one"
        )
    mine, each = max(1, here // size), min(here, size)  # groups that have experts here, and how many each of them has
    available = chosen * size
    reached = 0.0
    for visited in range(max(0, chosen - (groups - mine)), min(mine, chosen) + 1):
        likely = comb(mine, visited) * comb(groups - mine, chosen - visited) / comb(groups, chosen)
        reached += likely * (1 - comb(available - visited * each, routing.top_k) / comb(available, routing.top_k))
    return places * reached


def _sources(tokens: int, ranks: int) -> np.ndarray:
    return np.arange(tokens) // max(1, share(tokens, ranks, "the number of tokens is", axis="ep"))


def _counted(sources: np.ndarray, targets: np.ndarray, places: int, once: bool) -> np.ndarray:
    found = np.zeros((places, places), dtype=int)
    if once:
        for place in range(places):
            goes = (targets == place).any(axis=1)
            found[:, place] = np.bincount(sources[goes], minlength=places)
    else:
        pairs = np.broadcast_to(sources[:, None], targets.shape)[targets >= 0], targets[targets >= 0]
        np.add.at(found, pairs, 1)
    return found
