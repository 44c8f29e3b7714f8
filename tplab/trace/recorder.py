"""A recorder: notes what happens while a program runs."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tplab.mesh import Mesh
from tplab.trace.columns import DEFAULTS, NUMBERS, STORED, Codes, number_column
from tplab.trace.trace import Trace

_BLOCK = 1 << 16
"""How many notes are kept before they are turned into arrays, which take a quarter of the memory."""

_NOTED = ("form", "start", "end", "bytes", "message", "step", "chunk", "contributors")
_WIDTH = len(_NOTED)
_FULL = _BLOCK * _WIDTH
Form = namedtuple("Form", [name for name in STORED if name not in (*_NOTED, "part", "types", "after")])
"""The fields that events of one form share: rank, kind, op, axis, group, peer, flops, shape, dtype, where, held, phase,
reduction."""


class When(NamedTuple):
    """The times of a log's entries, for notes whose start and end are numbers of entries.

    start, end   of each entry
    hops         how many hops come before each entry
    after        the entry that held up each entry, or -1
    part_of      the first entry of the event that each entry is part of; for most entries, the entry itself
    waits        (form, entry) of each wait, including waits that took no time
    """

    start: np.ndarray
    end: np.ndarray
    hops: np.ndarray
    after: np.ndarray
    part_of: np.ndarray
    waits: np.ndarray


class Recorder:
    """Records events while a program runs, and makes a `Trace` of them at the end.

    A program repeats the same operations. The fields that their events share are given once, as a form, and each event
    adds a note with the rest. So recording costs little while the program runs. Notes are flat lists of numbers, which
    the garbage collector does not have to follow.
    """

    def __init__(self, mesh: Mesh, title: str = "", framework: str = ""):
        self.mesh, self.title, self.framework = mesh, title, framework
        self._forms: dict[tuple[Any, ...], int] = {}  # a message's form has a negative number: ~number of its send
        self._rows: list[Form] = []  # one per form; a send's row is followed by its receive's
        self._notes: list[Any] = []  # one after the other, flat
        self._blocks: list[dict[str, np.ndarray]] = []
        self._contributors = Codes()
        self._values: dict[int, np.ndarray] = {}  # by note
        self._parts: dict[int, tuple[int, ...]] = {}  # by note
        self._takings: dict[int, tuple[str, str]] = {}  # message -> where and in which phase it was received
        self._lost: set[int] = set()  # messages that were never received
        self._chunks: dict[int, int] = {}
        self._chunk_names: dict[int, str] = {}
        self._num_packed = 0
        self._num_messages = 0

    def chunk(self, origin_rank: int, piece: int, name: str = "") -> int:
        """The number of the chunk that is piece `piece` of what `origin_rank` held; `name` is its name in the
        program."""
        number = self._chunks.setdefault(origin_rank + piece * self.mesh.size, len(self._chunks))
        if name:
            self._chunk_names[number] = name
        return number

    def rename(self, mesh: Mesh, axes: Mapping[str, str]) -> None:
        """Put the trace on `mesh`, which has the same ranks; `axes` maps the groups' old names to their new ones."""
        self.mesh = mesh
        self._rows = [row._replace(axis=axes.get(row.axis, row.axis)) for row in self._rows]

    def next_message(self) -> int:
        """A number for the events of one message, or one collective."""
        self._num_messages += 1
        return self._num_messages - 1

    # --- events --------------------------------------------------------------------------------------------------

    def form(
        self,
        rank: int,
        kind: str,
        op: str,
        axis: str | None = None,
        group: tuple[int, ...] = (),
        peer: int | None = None,
        flops: int = 0,
        shape: tuple[int, ...] = (),
        dtype: str = "",
        where: str = "",
        held: int = -1,
        phase: str = "",
        reduction: str = "",
    ) -> int:
        """The form of events that share these fields, for `note`.

        A form of the kind "message" is two events: the send on `rank` and the receive on `peer`.
        """
        peer = -1 if peer is None else peer
        key = rank, kind, op, axis, group, peer, flops, shape, dtype, where, held, phase, reduction
        number = self._forms.get(key)
        if number is None:
            row, number = Form(*key), len(self._rows)
            if kind == "message":
                number = ~number
                self._rows += [row._replace(kind="send"), row._replace(rank=peer, kind="receive", peer=rank)]
            else:
                self._rows.append(row)
            self._forms[key] = number
        return number

    def note(
        self,
        form: int,
        start: float,
        end: float,
        bytes: int = 0,
        message: int = -1,
        step: int = -1,
        chunk: int = -1,
        contributors: tuple[int, ...] = (),
        values: np.ndarray | None = None,
        part: tuple[int, ...] = (),
    ) -> None:
        """Record an event, or a message, of this form. `trace` reports what is wrong with it."""
        notes = self._notes
        if values is not None:
            self._values[self._num_packed + len(notes) // _WIDTH] = values
        if part:
            self._parts[self._num_packed + len(notes) // _WIDTH] = part
        notes += (form, start, end, bytes, message, step, chunk, contributors)
        if len(notes) >= _FULL:
            self._pack()

    def add(
        self,
        rank: int,
        kind: str,
        op: str,
        start: float,
        end: float,
        *,
        axis: str | None = None,
        group: tuple[int, ...] = (),
        peer: int | None = None,
        bytes: int = 0,
        flops: int = 0,
        shape: tuple[int, ...] = (),
        dtype: str = "",
        message: int = -1,
        step: int = -1,
        chunk: int = -1,
        contributors: tuple[int, ...] = (),
        values: np.ndarray | None = None,
        where: str = "",
        held: int = -1,
        phase: str = "",
        reduction: str = "",
        part: tuple[int, ...] = (),
    ) -> int:
        """Record one event; the arguments are the fields of `Event`. Returns the number of its message.

        The kind "message" records the send on `rank` and the receive on `peer`, with a number of their own.
        """
        form = self.form(rank, kind, op, axis, group, peer, flops, shape, dtype, where, held, phase, reduction)
        message = self.next_message() if form < 0 else message
        self.note(form, start, end, bytes, message, step, chunk, contributors, values, part)
        return message

    def taken(self, message: int, where: str, phase: str) -> None:
        """Record the line and the phase in which a message was received, if they are not the sender's."""
        self._takings[message] = where, phase

    def lost(self, message: int) -> None:
        """Record that a message was never received."""
        self._lost.add(message)

    # --- the trace -----------------------------------------------------------------------------------------------

    def trace(
        self,
        clock: str = "modelled",
        unit: str = "s",
        cluster: str | None = None,
        times: When | None = None,
        figures: str = "",
        warnings: Sequence[str] = (),
        after: Sequence[int] | np.ndarray = (),
    ) -> Trace:
        """The trace of what was recorded so far. With `times`, each start and end is the number of an entry in them.

        after   for each note, in order, the note that held it up, or -1; without `after` and `times` this is unknown
        """
        blocks = [*self._blocks, self._packed()]
        if times is not None:
            blocks.append(self._waits(times))
        noted = {name: np.concatenate([block[name] for block in blocks]) for name in _NOTED}
        at = None if times is None else noted["start"].astype(np.int64)
        if times is not None and at is not None:
            noted["start"], noted["end"] = times.start[at], times.end[noted["end"].astype(np.int64)]
            noted["step"] = np.where(noted["step"] < 0, -1, times.hops[at]).astype(np.int32)
        form = noted.pop("form")
        is_message = form < 0
        is_pair = is_message & ~np.isin(noted["message"], list(self._lost))  # it was sent and received
        note_of = np.repeat(np.arange(len(form)), is_pair + 1)  # of each event
        is_receive = np.zeros(len(note_of), bool)
        is_receive[1:] = note_of[1:] == note_of[:-1]
        if at is not None:  # each rank's own events in program order, then what it received
            order = np.lexsort((at[note_of], is_receive))
            note_of, is_receive = note_of[order], is_receive[order]
        form = np.where(is_message, ~form, form)[note_of] + is_receive
        columns: dict[str, Any] = {name: given[note_of] for name, given in noted.items()}
        columns["contributors"] = list(self._contributors), columns["contributors"]
        first = np.full(len(is_pair) + 1, -1, np.int64)  # event of each note; the last one is for none
        first[note_of[~is_receive]] = np.flatnonzero(~is_receive)
        if at is not None and times is not None:
            after = _notes_before(at, times)
        if len(after):
            columns["after"] = first[np.where(is_receive, note_of, np.asarray(after)[note_of])]
        parts = Codes({(): 0})
        codes = np.zeros(len(note_of), np.int32)
        codes[first[list(self._parts)]] = parts.of("part", list(self._parts.values()))
        columns["part"] = list(parts), codes
        for name, given in zip(Form._fields, zip(*self._rows) if self._rows else [()] * len(Form._fields)):
            if name in NUMBERS:
                columns[name] = number_column(name, list(given), len(given))[form]
            else:
                table = Codes()
                codes = table.of(name, given)[form]
                if self._takings and name in ("where", "phase"):
                    rows = np.flatnonzero(is_receive & np.isin(columns["message"], list(self._takings)))
                    taken = [self._takings[number][name == "phase"] for number in columns["message"][rows].tolist()]
                    codes[rows] = table.of(name, taken)
                columns[name] = list(table), codes
        rows = np.flatnonzero(np.isin(note_of, list(self._values)))
        values = {row: self._values[note] for row, note in zip(rows.tolist(), note_of[rows].tolist(), strict=True)}
        chunks = [(code % self.mesh.size, code // self.mesh.size) for code in self._chunks]
        names = [self._chunk_names.get(number, "") for number in range(len(chunks))]
        return Trace.from_columns(
            self.mesh,
            **columns,
            values=values,
            title=self.title,
            framework=self.framework,
            clock=clock,
            unit=unit,
            cluster=cluster,
            figures=figures,
            warnings=warnings,
            chunks=chunks,
            chunk_names=names,
        )

    def _waits(self, times: When) -> dict[str, np.ndarray]:
        """The waits that took time, as a block of notes."""
        form, entry = times.waits[times.end[times.waits[:, 1]] > times.start[times.waits[:, 1]]].T
        numbers = {"form": form, "start": entry.astype(float), "end": entry.astype(float)}
        rest = {name: number_column(name, DEFAULTS[name], len(form)) for name in ("bytes", "message", "step", "chunk")}
        return numbers | rest | {"contributors": self._contributors.of("contributors", [()] * len(form))}

    def _pack(self) -> None:
        self._blocks.append(self._packed())
        self._num_packed += len(self._notes) // _WIDTH
        self._notes.clear()

    def _packed(self) -> dict[str, np.ndarray]:
        """The notes as arrays; contributors are indices into the recorder's table."""
        num_notes = len(self._notes) // _WIDTH
        packed = {"form": np.fromiter(self._notes[::_WIDTH], np.int64, num_notes)}
        for place, name in enumerate(_NOTED[1:], 1):
            given = self._notes[place::_WIDTH]
            packed[name] = number_column(name, given, num_notes) if name in NUMBERS else self._codes(name, given)
        return packed

    def _codes(self, name: str, given: Sequence[tuple[int, ...]]) -> np.ndarray:
        """The codes of contributors. Many notes share one tuple, as long as the number of ranks, so each tuple is
        looked up once."""
        known = {id(one): one for one in given}
        codes = dict(zip(known, self._contributors.of(name, [*known.values()]).tolist()))
        return np.fromiter(map(codes.__getitem__, map(id, given)), np.int32, len(given))


def _notes_before(at: np.ndarray, times: When) -> np.ndarray:
    """For each note, the note that held it up, or -1. `at` is the first entry of each note."""
    note_of = np.full(len(times.start) + 1, -1, np.int64)  # the last one is for no entry
    note_of[at] = np.arange(len(at))
    part_of, after = np.append(times.part_of, -1), np.append(times.after, -1)
    entry = part_of[after[at]]
    while len(unseen := np.flatnonzero((entry >= 0) & (note_of[entry] < 0))):  # a moment, or an event without duration
        entry[unseen] = part_of[after[entry[unseen]]]
    return note_of[entry]
