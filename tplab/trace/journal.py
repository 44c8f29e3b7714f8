"""The journal: what one rank's process notes while it runs, and the trace made from the journals of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tplab.mesh import Mesh
from tplab.trace.label import UNKNOWN, Label
from tplab.trace.recorder import Recorder
from tplab.trace.trace import Trace

Group = tuple[int, ...]


class Doing(NamedTuple):
    """One thing that a rank does, such as an action of a schedule: its name, where it belongs, and whose data it uses.

    takes   its duration on a clock that counts steps, where computing otherwise takes no time
    """

    op: str
    where: str
    label: Label
    takes: float = 0.0


class Said(NamedTuple):
    """A message or a collective over `group`, as one of its ranks notes it; `number` counts those of the group."""

    group: Group
    number: int
    op: str
    axis: str
    bytes: int
    shape: tuple[int, ...]
    dtype: str
    step: int
    where: str
    phase: str
    reduction: str = ""
    label: Label = UNKNOWN
    values: np.ndarray | None = None

    def event(self) -> dict[str, Any]:
        """The same as fields of an `Event`."""
        fields = self._asdict()
        del fields["number"], fields["label"]
        return fields | {"contributors": self.label.contributors, "part": self.label.part}


class Sent(NamedTuple):
    """A message to another rank, noted by its sender."""

    target: int
    start: float
    said: Said


class Taken(NamedTuple):
    """A message from another rank, noted by its receiver: when it arrived, and the line that asked for it."""

    time: float
    where: str
    phase: str


class Met(NamedTuple):
    """A collective of the whole group, noted by each of its ranks: when the rank arrived and when it had its result."""

    begun: float
    end: float
    said: Said


class Computed(NamedTuple):
    """A computation; the action it belongs to, if the program says; and what the rank then held for backward passes."""

    start: float
    end: float
    doing: Doing | None
    held: int


class Added(NamedTuple):
    """The rank added data of its own to what it had received."""

    op: str
    time: float
    shape: tuple[int, ...]
    dtype: str
    label: Label
    values: np.ndarray | None


class Journal:
    """The record of one rank, in seconds of its own clock.

    A label's chunk is (origin rank) + (piece) * (number of ranks), so that every process can number its own.
    """

    def __init__(self, rank: int):
        self.rank = rank
        self.start = self.end = 0.0
        self.computed: list[Computed] = []
        self.added: list[Added] = []
        self.sent: list[Sent] = []
        self.received: dict[tuple[int, Group, int], Taken] = {}
        self.met: list[Met] = []
        self.waited: list[tuple[str, float, float, str, str]] = []

    def shift(self, seconds: float) -> Journal:
        """The same journal on a clock that is this many seconds ahead."""
        other = Journal(self.rank)
        other.start, other.end = self.start + seconds, self.end + seconds
        other.computed = [one._replace(start=one.start + seconds, end=one.end + seconds) for one in self.computed]
        other.added = [added._replace(time=added.time + seconds) for added in self.added]
        other.sent = [sent._replace(start=sent.start + seconds) for sent in self.sent]
        other.received = {key: taken._replace(time=taken.time + seconds) for key, taken in self.received.items()}
        other.met = [met._replace(begun=met.begun + seconds, end=met.end + seconds) for met in self.met]
        other.waited = [
            (op, start + seconds, end + seconds, axis, where) for op, start, end, axis, where in self.waited
        ]
        return other


def trace_of(journals: Sequence[Journal], mesh: Mesh, title: str, warnings: Sequence[str] = ()) -> Trace:
    """One measured trace of all ranks, which starts when the first of them does.

    A message lasts from its send until its receiver has it. On each rank, a collective lasts from the moment all of its
    group have arrived until that rank has its result.
    """
    recorder = Recorder(mesh, title, "torch")
    origin = min(journal.start for journal in journals)

    def chunk_of(label: Label) -> int:
        piece, origin_rank = divmod(label.chunk, mesh.size)
        return -1 if label.chunk < 0 else recorder.chunk(origin_rank, piece)

    for journal in journals:
        for start, end, doing, held in journal.computed:
            op, where, label, _ = doing or _ANYTHING
            about = {"chunk": chunk_of(label), "contributors": label.contributors, "where": where, "held": held}
            recorder.add(journal.rank, "compute", op, start - origin, end - origin, **about)
        for op, start, end, axis, where in journal.waited:
            recorder.add(journal.rank, "wait", op, start - origin, end - origin, axis=axis, where=where)
    for sent, source in sorted(
        ((sent, j.rank) for j in journals for sent in j.sent), key=lambda entry: (entry[0].start, entry[1])
    ):
        receiver, said = journals[sent.target], sent.said
        taken = receiver.received.get((source, said.group, said.number))
        arrival = receiver.end if taken is None else taken.time
        times = {"start": sent.start - origin, "end": max(sent.start, arrival) - origin}
        about = said.event() | {"peer": sent.target, "chunk": chunk_of(said.label), "part": ()}
        message = recorder.add(source, "message", **times, **about)
        if taken is not None and (taken.where, taken.phase) != (said.where, said.phase):
            recorder.taken(message, taken.where, taken.phase)
    for journal in journals:
        for op, time, shape, dtype, label, values in journal.added:  # after the messages, which number the chunks
            about = {"shape": shape, "dtype": dtype, "chunk": chunk_of(label), "contributors": label.contributors}
            recorder.add(journal.rank, "compute", op, time - origin, time - origin, values=values, **about)
    meetings: dict[tuple[Group, int], list[tuple[int, Met]]] = {}
    for journal in journals:
        for met in journal.met:
            meetings.setdefault((met.said.group, met.said.number), []).append((journal.rank, met))
    for meeting in sorted(meetings.values(), key=lambda meeting: max(met.begun for _, met in meeting)):
        start, message = max(met.begun for _, met in meeting), recorder.next_message()
        for rank, met in meeting:
            times = start - origin, max(start, met.end) - origin
            recorder.add(rank, "collective", start=times[0], end=times[1], message=message, **met.said.event())
    return recorder.trace(clock="measured", unit="s", warnings=warnings)


_ANYTHING = Doing("compute", "", UNKNOWN)
