"""Overlap: how much of a program's communication is hidden behind its computing, counted in a trace of any origin.

The formula for what the overlapped linear layers should hide is in `tplab.cost.overlap`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tplab.trace.trace import Trace


class Overlap(NamedTuple):
    """Three times for each rank, in the trace's unit. Within each, things that run at the same time count once.

    communication   while a message was on its way to the rank, or one of its collectives ran
    computing       while the rank computed
    hidden          while both happened at once
    """

    communication: np.ndarray
    computing: np.ndarray
    hidden: np.ndarray

    @property
    def exposed(self) -> np.ndarray:
        """Communication during which the rank did not compute."""
        return self.communication - self.hidden

    @property
    def possible(self) -> np.ndarray:
        """The most that any order of the same work could hide: a rank can hide no more than it computes.

        This is an upper bound. A ring whose hops take longer than the matrix products beside them stays below it, at
        (R-1)/R of its computing: of its R products, the first (for a reduce_scatter) or the last (for an all_gather)
        has no hop beside it.
        """
        return np.minimum(self.communication, self.computing)

    @property
    def share(self) -> float:
        """Hidden / communication, over all ranks: 0 to 1. It is 1 if nothing is communicated."""
        return _ratio(self.hidden, self.communication)

    @property
    def share_of_possible(self) -> float:
        """Hidden / possible, over all ranks: 0 to 1."""
        return _ratio(self.hidden, self.possible)

    def __str__(self) -> str:
        return (
            f"{self.share:.1%} of the communication is hidden behind computing; "
            f"{self.share_of_possible:.1%} of what can be hidden"
        )


def overlap(trace: Trace) -> Overlap:
    """How much of the communication in a trace, of any origin, ran while the rank computed. n events: O(n log n)."""
    communication, computing = trace.busy("receive", "collective"), trace.busy()
    both = trace.busy("receive", "collective", "compute")
    hidden = np.clip(communication + computing - both, 0.0, np.minimum(communication, computing))  # as rounding may err
    return Overlap(communication, computing, hidden)


def _ratio(part: np.ndarray, whole: np.ndarray) -> float:
    return float(part.sum() / whole.sum()) if whole.sum() > 0 else 1.0
