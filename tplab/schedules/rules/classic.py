"""Schedules with a whole backward: naive, GPipe and 1F1B; interleaved 1F1B and looped breadth-first."""

from __future__ import annotations

import numpy as np

from tplab.schedules.placement import counts, linear, wrapped
from tplab.schedules.rules.row import Row, backwards, chain, forwards, riffle
from tplab.schedules.schedule import Schedule
from tplab.sharding import cut


def naive(ranks: int, microbatches: int = 1) -> Schedule:
    """Vertical model parallelism: one microbatch at a time, all but one rank idle.

    F0 .. .. B0
    .. F0 B0 ..
    """
    ranks, microbatches = counts(ranks=ranks, microbatches=microbatches)
    k = np.arange(microbatches)
    rows = [riffle(forwards(rank, k), backwards(rank, k), lead=0) for rank in range(ranks)]
    return Schedule(rows, linear(ranks), "naive")


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards. Huang et al. 2018.

    F0 F1 F2 .. .. B0 B1 B2
    .. F0 F1 F2 B0 B1 B2 ..
    """
    ranks, microbatches = counts(ranks=ranks, microbatches=microbatches)
    k = np.arange(microbatches)
    rows = [chain(forwards(rank, k), backwards(rank, k)) for rank in range(ranks)]
    return Schedule(rows, linear(ranks), "gpipe")


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """Rank r runs p-1-r forwards ahead, then alternates one forward and one backward. Narayanan et al. 2020
    (PipeDream-Flush), Fan et al. 2020 (DAPPLE).

    The bubble is the same as GPipe's, but rank r holds only p-r microbatches at once, not m.

    F0 F1 .. B0 F2 B1 .. B2
    .. F0 B0 F1 B1 F2 B2 ..
    """
    ranks, microbatches = counts(ranks=ranks, microbatches=microbatches)
    k = np.arange(microbatches)
    rows = [riffle(forwards(rank, k), backwards(rank, k), lead=ranks - 1 - rank) for rank in range(ranks)]
    return Schedule(rows, linear(ranks), "one_f_one_b")


# --- several stages per rank ------------------------------------------------------------------------------------------


def interleaved_1f1b(ranks: int, microbatches: int, virtual_stages: int = 2) -> Schedule:
    """1F1B over `virtual_stages` (v) stages per rank, a group of p microbatches at a time. Narayanan et al. SC'21.

    Rank r runs 2(p-r-1) + (v-1)p forwards ahead. Compared with 1F1B, the bubble is divided by v and the transfers are
    multiplied by v.

    0F0 0F1 2F0 2F1 ... 2B0 ... 2B1 0B0 0B1
    ... 1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1 ...
    """
    ranks, microbatches, virtual_stages = counts(ranks=ranks, microbatches=microbatches, virtual_stages=virtual_stages)
    rows = []
    for rank in range(ranks):
        F, B, group = in_groups(rank, ranks, microbatches, virtual_stages)
        lead = 2 * (ranks - 1 - rank) + (virtual_stages - 1) * group
        rows.append(riffle(F, B, lead))
    return Schedule(rows, wrapped(ranks, virtual_stages), "interleaved_1f1b")


def looped_bfs(ranks: int, microbatches: int, virtual_stages: int = 2) -> Schedule:
    """All microbatches go through one stage, then through the next; the backward in reverse. Lamy-Poirier 2022.

    The bubble is interleaved 1F1B's and the memory is GPipe's. Each stage's weights are needed in one go, once in
    the forward and once in the backward.

    0F0 0F1 2F0 2F1 ... ... 2B0 2B1 0B0 0B1
    ... 1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1 ...
    """
    ranks, microbatches, virtual_stages = counts(ranks=ranks, microbatches=microbatches, virtual_stages=virtual_stages)
    k, rows = np.arange(microbatches), []
    for rank in range(ranks):
        held = range(rank, ranks * virtual_stages, ranks)
        rows.append(chain(*(forwards(stage, k) for stage in held), *(backwards(stage, k) for stage in reversed(held))))
    return Schedule(rows, wrapped(ranks, virtual_stages), "looped_bfs")


def in_groups(rank: int, ranks: int, microbatches: int, virtual_stages: int) -> tuple[Row, Row, int]:
    """(forwards, backwards, size of the first group) of a rank that takes groups of microbatches in turn.

    A group goes through the rank's first stage, then through its next. A group of p is just long enough for its first
    microbatch to come round all ranks. If m is not a multiple of p, the m // p groups are made as equal as possible
    (torch requires equal groups; Megatron-LM's have p microbatches unless it is told another number).
    """
    groups = cut(microbatches, max(1, microbatches // ranks), "even")
    stage = np.concatenate([np.arange(virtual_stages).repeat(len(group)) for group in groups]) * ranks + rank
    last = (virtual_stages - 1) * ranks + 2 * rank
    microbatch = np.concatenate([np.tile(group, virtual_stages) for group in groups])
    return forwards(stage, microbatch), backwards(last - stage, microbatch), len(groups[0])
