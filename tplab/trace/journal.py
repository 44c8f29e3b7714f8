"""The journal: what one rank's process notes while it runs, and the trace made from the journals of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

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


class Note(NamedTuple):
    """One thing that a rank's process notes, on its own clock.

    kind     what it is: "compute", "wait", "added" (data of its own to what it had received), "message" (by its
             sender), "taken" (a message, by its receiver), "collective" (from this rank's arrival until its result)
    label    whose data it is about
    key      of a message or a collective: its group, and its number among those of the group
    about    the further fields of its `Event`; of a message that was taken, `peer` is the sender
    """

    kind: str
    start: float
    end: float
    label: Label
    key: tuple[Group, int]
    about: dict[str, Any]


class Journal:
    """The record of one rank, in seconds of its own clock, which is `behind` that of the trace.

    A label's chunk is (origin rank) + (piece) * (number of ranks), so that every process can number its own.
    """

    def __init__(self, rank: int):
        self.rank = rank
        self.start = self.end = self.behind = 0.0
        self.notes: list[Note] = []

    def note(
        self,
        kind: str,
        start: float,
        end: float,
        label: Label = UNKNOWN,
        key: tuple[Group, int] = ((), 0),
        **about: Any,
    ) -> None:
        self.notes.append(Note(kind, start, end, label, key, about))


def trace_of(journals: Sequence[Journal], mesh: Mesh, title: str, warnings: Sequence[str] = ()) -> Trace:
    """One measured trace of all ranks, which starts when the first of them does.

    A message lasts from its send until its receiver has it. On each rank, a collective lasts from the moment all of its
    group have arrived until that rank has its result.
    """
    recorder = Recorder(mesh, title, "torch")
    origin = min(journal.start + journal.behind for journal in journals)

    def noted(kind: str, journals: Sequence[Journal] = journals) -> list[tuple[int, Note]]:
        """The notes of this kind, each with its rank, in seconds of the trace."""
        return [
            (journal.rank, note._replace(start=note.start + ahead, end=note.end + ahead))
            for journal in journals
            for ahead in [journal.behind - origin]
            for note in journal.notes
            if note.kind == kind
        ]

    def add(rank: int, note: Note, kind: str = "compute", **about: Any) -> int:
        if note.label.chunk >= 0 and kind != "collective":
            piece, origin_rank = divmod(note.label.chunk, mesh.size)
            about["chunk"] = recorder.chunk(origin_rank, piece)
        about = {"start": note.start, "end": note.end, "contributors": note.label.contributors} | note.about | about
        return recorder.add(rank, kind, **about)

    for journal in journals:
        for kind in ("compute", "wait"):
            for rank, note in noted(kind, [journal]):
                add(rank, note, kind)
    taken = {(note.about["peer"], rank, note.key): note for rank, note in noted("taken")}
    for source, note in sorted(noted("message"), key=lambda pair: (pair[1].start, pair[0])):
        target = note.about["peer"]
        took = taken.get((source, target, note.key))
        arrival = journals[target].end + journals[target].behind - origin if took is None else took.end
        message = add(source, note, "message", end=max(note.start, arrival), group=note.key[0])
        places = [(one.about["where"], one.about["phase"]) for one in (note, took) if one is not None]
        if len({*places}) > 1:
            recorder.taken(message, *places[1])
    for rank, note in noted("added"):  # after the messages, which number the chunks
        add(rank, note)
    meetings: dict[tuple[Group, int], list[tuple[int, Note]]] = {}
    for rank, note in noted("collective"):
        meetings.setdefault(note.key, []).append((rank, note))
    begins = ((max(note.start for _, note in meeting), meeting) for meeting in meetings.values())
    for start, meeting in sorted(begins, key=lambda entry: entry[0]):
        about = {"start": start, "message": recorder.next_message(), "group": meeting[0][1].key[0]}
        for rank, note in meeting:
            add(rank, note, "collective", end=max(start, note.end), part=note.label.part, **about)
    return recorder.trace(clock="measured", unit="s", warnings=warnings)
