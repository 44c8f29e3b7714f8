"""A burst: what a simulated rank computes, without a break, as part of one action."""

from __future__ import annotations

from tplab.trace.journal import Doing
from tplab.trace.recorder import Recorder, When


class Burst:
    """What rank `rank` computes for `about`: one event from its `begin` on, or several if it waited in between.

    begin   the entry in the log with which it begins
    end     the one with which it ends, where it is one event, whatever it waited for
    held    the bytes that the rank keeps for backward passes at its end
    """

    def __init__(self, rank: int, about: Doing, begin: int):
        self.rank, self.about, self.begin, self.held = rank, about, begin, -1
        self.end: int | None = None
        self._parts: list[tuple[int, int, int, int]] = []  # first and last entry, FLOPs, bytes

    def add(self, entry: int, flops: int = 0, num_bytes: int = 0) -> None:
        """Something was computed: an entry of the log."""
        if self._parts and self._parts[-1][1] == entry - 1:
            first, _, flops_before, bytes_before = self._parts.pop()
            self._parts.append((first, entry, flops_before + flops, bytes_before + num_bytes))
        else:
            self._parts.append((entry, entry, flops, num_bytes))

    def note(self, recorder: Recorder, when: When) -> None:
        """Record its events, now that the times are known, and which of them each of its entries is a part of."""
        begin = self.begin
        last = begin if self.end is None else self.end
        flops = num_bytes = 0
        for first, following, more_flops, more_bytes in self._parts:
            if when.start[first] > when.end[last]:
                if when.end[last] > when.start[begin]:
                    self._note(recorder, begin, last, flops, num_bytes, -1)
                begin, flops, num_bytes = first, 0, 0
            last, flops, num_bytes = following, flops + more_flops, num_bytes + more_bytes
            when.part_of[first : following + 1] = begin
        self._note(recorder, begin, last, flops, num_bytes, self.held)
        when.part_of[last] = begin

    def _note(self, recorder: Recorder, begin: int, last: int, flops: int, num_bytes: int, held: int) -> None:
        op, where, label, _ = self.about
        recorder.add(
            self.rank,
            "compute",
            op,
            begin,
            last,
            bytes=num_bytes,
            flops=flops,
            chunk=label.chunk,
            contributors=label.contributors,
            where=where,
            held=held,
        )
