"""Schedules with one stage per rank and a whole backward: naive, GPipe, 1F1B."""

from __future__ import annotations

import numpy as np

from tplab.schedules.placement import counts, linear
from tplab.schedules.rules.row import backwards, chain, forwards, riffle
from tplab.schedules.schedule import Schedule


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
