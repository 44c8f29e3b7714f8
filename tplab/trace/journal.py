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
    """The record of one rank, in seconds of its own clock, which is `behind` that of the trace.

    A label's chunk is (origin rank) + (piece) * (number of ranks), so that every process can number its own.
    """

    def __init__(self, rank: int):
        self.rank = rank
        self.start = self.end = self.behind = 0.0
        self.computed: list[Computed] = []
        self.added: list[Added] = []
        self.sent: list[Sent] = []
        self.received: dict[tuple[int, Group, int], Taken] = {}
        self.met: list[Met] = []
        self.waited: list[tuple[str, float, float, str, str]] = []


def trace_of(journals: Sequence[Journal], mesh: Mesh, title: str, warnings: Sequence[str] = ()) -> Trace:
    """One measured trace of all ranks, which starts when the first of them does.

    A message lasts from its send until its receiver has it. On each rank, a collective lasts from the moment all of its
    group have arrived until that rank has its result.
    """
    recorder = Recorder(mesh, title, "torch")
    origin = min(journal.start + journal.behind for journal in journals)

    def at(journal: Journal, time: float) -> float:
        return time + journal.behind - origin

    def chunk_of(label: Label) -> int:
        piece, origin_rank = divmod(label.chunk, mesh.size)
        return -1 if label.chunk < 0 else recorder.chunk(origin_rank, piece)

    for journal in journals:
        for start, end, doing, held in journal.computed:
            op, where, label, _ = doing or _ANYTHING
            about = {"chunk": chunk_of(label), "contributors": label.contributors, "where": where, "held": held}
            recorder.add(journal.rank, "compute", op, at(journal, start), at(journal, end), **about)
        for op, start, end, axis, where in journal.waited:
            recorder.add(journal.rank, "wait", op, at(journal, start), at(journal, end), axis=axis, where=where)
    sends = ((at(journal, sent.start), journal.rank, sent) for journal in journals for sent in journal.sent)
    for start, source, sent in sorted(sends, key=lambda entry: entry[:2]):
        receiver, said = journals[sent.target], sent.said
        taken = receiver.received.get((source, said.group, said.number))
        arrival = at(receiver, receiver.end if taken is None else taken.time)
        about = said.event() | {"peer": sent.target, "chunk": chunk_of(said.label), "part": ()}
        message = recorder.add(source, "message", start=start, end=max(start, arrival), **about)
        if taken is not None and (taken.where, taken.phase) != (said.where, said.phase):
            recorder.taken(message, taken.where, taken.phase)
    for journal in journals:
        for op, time, shape, dtype, label, values in journal.added:  # after the messages, which number the chunks
            about = {"shape": shape, "dtype": dtype, "chunk": chunk_of(label), "contributors": label.contributors}
            recorder.add(journal.rank, "compute", op, at(journal, time), at(journal, time), values=values, **about)
    meetings: dict[tuple[Group, int], list[tuple[Journal, Met]]] = {}
    for journal in journals:
        for met in journal.met:
            meetings.setdefault((met.said.group, met.said.number), []).append((journal, met))
    begins = ((max(at(journal, met.begun) for journal, met in meeting), meeting) for meeting in meetings.values())
    for start, meeting in sorted(begins, key=lambda entry: entry[0]):
        message = recorder.next_message()
        for journal, met in meeting:
            end = max(start, at(journal, met.end))
            recorder.add(journal.rank, "collective", start=start, end=end, message=message, **met.said.event())
    return recorder.trace(clock="measured", unit="s", warnings=warnings)


_ANYTHING = Doing("compute", "", UNKNOWN)
