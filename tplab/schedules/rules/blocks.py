"""Families of building blocks, with every choice of slopes and pauses on the way down the stages and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np

from tplab.schedules.placement import Placement
from tplab.schedules.rules.stamp import Block

_MOST = 6_000  # combinations tried for one interval


def blocks(placement: Placement, slots: Sequence[int]) -> Iterator[Block]:
    """Blocks for a placement whose stages form arms of p (linear, wrapped, V, wave), the shortest first.

    Each arm has a slope: the number of slots from one stage's F (or I) to the next stage's. Each turn has a pause. A
    block without idle slots has an interval of three slots per stage; if memory is scarce, a longer one fits.
    Only blocks whose activations fit into `slots` are given.
    """
    p, num_stages = len(placement), sum(map(len, placement))
    arms = num_stages // p
    home = np.empty(num_stages, np.intp)
    for rank, stages in enumerate(placement):
        home[list(stages)] = rank
    for idle in range(4):
        interval = 3 * arms + idle
        forward, backward = _ways(arms, p, interval)
        slot = np.concatenate([forward, backward], axis=1) % interval
        owner = np.concatenate([home, home])
        fits = np.ones(len(slot), bool)
        for rank in range(p):
            mine = np.sort(slot[:, owner == rank], axis=1)
            fits &= ~np.any(mine[:, 1:] == mine[:, :-1], axis=1)
            kept = (backward - forward + 2)[:, home == rank].sum(axis=1) / interval  # W comes a slot or so after I
            fits &= kept <= slots[rank] + 0.5
        found = np.flatnonzero(fits)
        for row in found[np.argsort(backward[found, 0], kind="stable")].tolist():
            yield Block(placement, tuple(forward[row].tolist()), tuple(backward[row].tolist()), interval)


def _ways(arms: int, p: int, interval: int) -> tuple[np.ndarray, np.ndarray]:
    """(forward, backward) slots of microbatch 0 for every choice of slopes and pauses [choices, stages]."""
    slopes = range(1, 5) if arms == 1 else range(1, 4)
    one_slope = 3 ** (2 * arms) * 4 ** (2 * arms - 1) > _MOST  # too many: the same slope and pause on all arms each way
    kinds = [slopes] * (2 if one_slope else 2 * arms) + [range(interval if arms == 1 else 4)] * (
        2 if one_slope else 2 * arms - 1
    )
    choices = np.array(list(product(*kinds)), np.intp)
    if one_slope:
        down, up, pause, turn = choices.T
        pauses = [pause] * (arms - 1) + [turn] + [pause] * (arms - 1)
        slopes_of = [down] * arms + [up] * arms
    else:
        slopes_of, pauses = list(choices.T[: 2 * arms]), list(choices.T[2 * arms :])
    at = np.zeros(len(choices), np.intp)
    columns = []
    for leg, slope in enumerate(slopes_of):
        columns += [at + slope * step for step in range(p)]
        if leg < len(pauses):
            at = columns[-1] + 1 + pauses[leg]
    ways = np.stack(columns, axis=1)
    return ways[:, : arms * p], ways[:, arms * p :][:, ::-1]
