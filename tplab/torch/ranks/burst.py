"""A burst: what a simulated rank computes, without a break, as part of one action."""

from __future__ import annotations

from tplab.trace.journal import Doing
from tplab.trace.recorder import Recorder


class Burst:
    """What rank `rank` computes for `about`, as one event from `start` on, or several if it waited in between."""

    def __init__(self, recorder: Recorder, rank: int, about: Doing, start: float):
        self.recorder, self.rank, self.about = recorder, rank, about
        self._begin(start)

    def _begin(self, start: float) -> None:
        self.start = self.end = start
        self.flops = self.num_bytes = 0

    def add(self, start: float, end: float, flops: int = 0, num_bytes: int = 0) -> None:
        """Something was computed from `start` to `end`."""
        if start > self.end:
            if self.end > self.start:
                self.note()
            self._begin(start)
        self.end, self.flops, self.num_bytes = end, self.flops + flops, self.num_bytes + num_bytes

    def note(self, held: int = -1) -> None:
        """Record the event. `held`: the bytes that the rank keeps for backward passes at its end."""
        op, where, label, _ = self.about
        self.recorder.add(
            self.rank,
            "compute",
            op,
            self.start,
            self.end,
            bytes=self.num_bytes,
            flops=self.flops,
            chunk=label.chunk,
            contributors=label.contributors,
            where=where,
            held=held,
        )
