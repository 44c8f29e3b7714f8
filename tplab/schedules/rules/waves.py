"""Chimera and Hanayo: microbatches that run down the ranks while others run up."""

from __future__ import annotations

import numpy as np

from tplab.errors import ScheduleError
from tplab.schedules.action import B, F
from tplab.schedules.placement import counts, two_way, wave
from tplab.schedules.rules.greedy import Durations, list_schedule
from tplab.schedules.schedule import Row, Schedule, row


def chimera(ranks: int, microbatches: int) -> Schedule:
    """Two pipes, one down and one up the ranks, each with half of every p microbatches. Li and Hoefler, SC'21.

    In each unit of p microbatches, the j-th of those that go down has its forward on rank r at slot r + 2j and its
    backward at slot 2p-1-r + 2j; those that go up are the mirror image. If p is even, no two ever share a slot.

    The bubble is about half of GPipe's, at the cost of two copies of the weights. Units follow each other by "direct
    concatenation".

    0F0 1F1 1B1 0B0
    0F1 1F0 1B0 0B1
    """
    ranks, microbatches = counts(ranks=ranks, microbatches=microbatches)
    if ranks % 2:
        raise ScheduleError(
            f"chimera has {ranks} ranks and needs an even number, so that its two pipes never meet; take {ranks + 1}"
        )
    k = np.arange(microbatches)
    unit = k // ranks
    size = np.minimum(microbatches - unit * ranks, ranks)  # the last unit may be smaller
    within = k % ranks
    goes_down = within < (size + 1) // 2
    j = np.where(goes_down, within, within - (size + 1) // 2)
    rows: list[Row] = []
    for rank in range(ranks):
        stage = np.where(goes_down, rank, ranks - 1 - rank)
        slot = 2 * ranks * unit + 2 * j
        slots = np.append(slot + stage, slot + 2 * ranks - 1 - stage)
        passes = np.concatenate([row(F, stage, k), row(B, stage, k)])
        rows.append(passes[np.argsort(slots, kind="stable")])
    return Schedule(rows, two_way(ranks), "chimera")


def hanayo(ranks: int, microbatches: int, virtual_stages: int = 2) -> Schedule:
    """Waves: every microbatch goes down the ranks and up again, virtual_stages / 2 times over, so that two directions
    share one copy of the weights. Liu et al., SC'23.

    In each slot, a rank takes a backward if one is ready, and otherwise the ready forward of its deepest stage. It
    holds at most p microbatches.

    0F0 0F1 ... 3F0 3B0 3F1 3B1 0B0 ... 0B1
    ... 1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1 ...
    """
    ranks, microbatches, virtual_stages = counts(ranks=ranks, microbatches=microbatches, virtual_stages=virtual_stages)
    if virtual_stages % 2:
        raise ScheduleError(
            f"hanayo has {virtual_stages} stages per rank and needs an even number, since a wave goes down and up; "
            f"take {virtual_stages + 1}"
        )
    slot = [1.0] * (ranks * virtual_stages)
    placement = wave(ranks, virtual_stages)
    rows = list_schedule(
        placement, microbatches, Durations(slot, slot, slot), [ranks * virtual_stages] * ranks, split=False
    )
    return Schedule(rows, placement, "hanayo")
