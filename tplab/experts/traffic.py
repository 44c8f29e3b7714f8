"""The rows sent by dispatch: exactly for a table of choices, and on average for tokens that choose at random.

A token's row [D] goes to the ranks that hold its experts, and their results come back the same way (combine). The
number of rows depends on how often a token is sent:

    per choice   k rows, one for each expert                       dispatch as all_to_all of sorted rows
    per rank     one row to each rank that holds any of them       the rank computes all its experts of the token, and
                                                                   returns their sum
    per node     one row to each node, which hands it on inside    two levels: once through the network, then NVLink
"""

from __future__ import annotations

from math import comb
from typing import Any

import numpy as np

from tplab.errors import ShapeError
from tplab.experts.placement import Placement
from tplab.experts.routing import Routing, table_of
from tplab.sharding import share


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
