"""The chronicle of a run: what its simulated ranks have done and, on demand, when."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np

from tplab.cost.clock import Links
from tplab.cost.cluster import Cluster
from tplab.cost.lanes import ISSUE, ROUND, WAIT, Lanes, Log
from tplab.mesh import Mesh
from tplab.trace.journal import Doing
from tplab.trace.recorder import Recorder, When
from tplab.trace.trace import Trace
from tplab.units import counted


class Chronicle:
    """What the ranks of one run have done: `log` has the order, and `recorder` the details.

    While the program runs there are no times, only numbers of log entries. Reading the trace works out the times.

    bursts   the actions that were computed
    overlaps whether a rank has started a collective and gone on without its result
    """

    def __init__(self, mesh: Mesh, title: str, cluster: Cluster | None, clock: str):
        self.recorder, self.log = Recorder(mesh, title, "torch"), Log()
        self.bursts: list[Burst] = []
        self.overlaps = False
        self._cluster, self._clock = cluster, clock
        self._failure: list[str] = []

    @cached_property
    def trace(self) -> Trace:
        """The trace of everything so far; nothing may be recorded after it."""
        for burst in self.bursts:
            burst.note(self.recorder, self._when)
        unit, name, figures = "steps", None, ""
        if self._cluster is not None:
            unit, name, figures = "s", self._cluster.name, self._cluster.kind_on(self.recorder.mesh.size)
        return self.recorder.trace(
            clock=self._clock,
            unit=unit,
            cluster=name,
            times=self._when,
            figures=figures,
            warnings=self._failure + self.warnings,
        )

    def failed(self, why: str, lost: Sequence[int]) -> None:
        """Record that the run ended with this error, and the messages that were never received."""
        note = f"\n{counted(len(lost), 'message')} shown as sent {'was' if len(lost) == 1 else 'were'} never received"
        self._failure = [f"the run ended with {why}{note if lost else ''}"]
        for message in lost:
            self.recorder.lost(message)

    @cached_property
    def warnings(self) -> list[str]:
        """What may hang on real GPUs. Blocking programs would already hang here."""
        return crossed(self.log) if self.overlaps else []

    def times(self, moments: Sequence[float] | np.ndarray) -> np.ndarray:
        """The times of moments that ranks have noted; nothing may be recorded after it."""
        return self._when.end[np.asarray(moments, np.int64)]

    def is_known(self, moment: int, is_going: Callable[[int], bool]) -> bool:
        """Whether the time of a moment is final, whatever the lanes that `is_going` still do."""
        return self._lanes.is_known(moment, is_going)

    def time(self, moment: int) -> float:
        """The time of a moment that `is_known`."""
        return self._lanes.end(moment)

    @cached_property
    def _lanes(self) -> Lanes:
        return Lanes(self.log, Links(self._cluster), rounds=self._cluster is None)

    @cached_property
    def _when(self) -> When:
        start, end, after = self._lanes.times()
        hops = start
        if self._cluster is not None:
            hops = Lanes(self.log, Links(None), computes=False, rounds=True).times().start
        entries = self.log.since(0)
        waits = np.flatnonzero(np.isin(entries[:, 1], (WAIT, ROUND)) & (entries[:, 3] >= 0))
        forms = np.stack([entries[waits, 3].astype(np.int64), waits], 1)
        return When(start, end, hops, after, np.arange(len(entries)), forms)


class Burst:
    """What rank `rank` computes for `about`: one event from its `begin` on, or several if it waited in between.

    begin   its first entry in the log
    end     its last entry, if it is one event whatever it waited for
    held    the bytes that the rank keeps for backward passes when it ends
    """

    def __init__(self, rank: int, about: Doing, begin: int):
        self.rank, self.about, self.begin, self.held = rank, about, begin, -1
        self.end: int | None = None
        self._parts: list[tuple[int, int, int, int]] = []  # first and last entry, FLOPs, bytes

    def add(self, entry: int, flops: int = 0, num_bytes: int = 0) -> None:
        """Add an entry of the log that computes something."""
        if self._parts and self._parts[-1][1] == entry - 1:
            first, _, flops_before, bytes_before = self._parts.pop()
            self._parts.append((first, entry, flops_before + flops, bytes_before + num_bytes))
        else:
            self._parts.append((entry, entry, flops, num_bytes))

    def note(self, recorder: Recorder, when: When) -> None:
        """Record its events, now that the times are known, and the event that each of its entries is part of."""
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


# --- crossed orders ---------------------------------------------------------------------------------------------------


def crossed(log: Log) -> list[str]:
    """One sentence for each pair of lines whose collectives, of two groups, overlap and are issued in opposite orders.

    On NCCL, each group is a communicator with a queue of its own. If one rank's GPU has begun the first of two
    collectives, and another rank's the second, each may occupy what the other needs, and neither ends. Whether that
    happens depends on the sizes and on the GPU, so such a program may run a thousand times and hang once.

    Collectives of two threads of a rank are not compared: no line of the program says which comes first, and the
    operating system may order them differently each time. In JAX there is nothing to compare: all ranks run one
    compiled program, in which XLA has ordered the collectives; different branches are left to the deadlock check.
    """
    issued: dict[tuple[int, int], int] = {}  # (collective, rank) -> the entry
    forms: dict[tuple[int, int], int] = {}
    together: dict[tuple[int, int], int] = {}  # two collectives, in the order of this rank
    flying: list[dict[int, int]] = [{} for _ in log.ranks]  # of each lane: entry -> collective
    entries = log.since(0)
    wanted = entries[:, 1]
    for entry in ((wanted == ISSUE) | (wanted == WAIT)).nonzero()[0].tolist():
        lane, does, a, b = (int(value) for value in entries[entry])
        rank = log.ranks[lane]
        if does == WAIT:
            flying[lane].pop(a, None)
            continue
        group = log.collectives[b][1]
        for other in flying[lane].values():
            before = log.collectives[forms[other, rank]][1]
            if before != group and len(set(before).intersection(group)) > 1:
                together.setdefault((other, a), rank)
        issued[a, rank], forms[a, rank] = entry, b
        flying[lane][entry] = a
    found: dict[frozenset[str], str] = {}  # by the pair of lines
    for (first, second), rank in together.items():
        members = (set(log.collectives[forms[one, rank]][1]) for one in (first, second))
        for other in sorted(set.intersection(*members)):
            theirs = [issued.get((one, other)) for one in (first, second)]
            if theirs[0] is not None and theirs[1] is not None and theirs[1] < theirs[0]:
                lines = [_text(log, forms[one, rank]) for one in (first, second)]
                found.setdefault(frozenset(lines), _SENTENCE.format(*lines, rank, other))
                break
    return list(found.values())


_SENTENCE = (
    "{0} and {1} are in flight together, and ranks issue them in opposite orders: rank {2} in this order, rank {3} "
    "in the other. NCCL may hang here; issue them in the same order on every rank, or wait for one of them "
    "before you start the other"
)


def _text(log: Log, form: int) -> str:
    op, _, _, said = log.collectives[form]
    return f"{op} over {said[-1]!r} at {said[0]}"
