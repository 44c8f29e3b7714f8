"""A trace: everything that happened on every rank, as data. All pictures, counts and exports are read from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any, overload

import numpy as np

from tplab.errors import TraceError
from tplab.mesh import Axis, Mesh
from tplab.trace.columns import (
    ABOUT,
    DEFAULTS,
    STORED,
    Column,
    Words,
    as_json,
    check,
    chunks_of,
    column,
    from_json,
    names_of,
)
from tplab.trace.event import COLUMNS, KINDS, Event


class Trace:
    """What happened on every rank of `mesh`: events in the order of their start, then of their rank.

    mesh        the ranks
    title       the program's name
    framework   "torch", "jax" or "schedule"
    clock       "modelled" (from a cluster's figures) or "measured" (on this machine)
    unit        "s"; or "steps" if no cluster was given: a hop takes 1 and computing takes 0
    cluster     the name of the modelled cluster, or None
    figures     where that cluster's figures come from: "data sheet", "forecast, ±5 %"; "" if that is unknown
    warnings    how a run that failed ended; what may go wrong elsewhere, as collectives that may hang on GPUs
    chunks      what travelled: (the rank it came from, how many that rank had sent before it)
    chunk_names each chunk's name in the program: "Z", or "x[3]" for piece 3 of x; "" if that is unknown

    Internally there is one array per column, so a million events are fine. A trace never changes. Two traces are equal
    if all of the above and every event are equal, bit for bit.
    """

    def __init__(
        self,
        mesh: Mesh,
        columns: Mapping[str, Column],
        *,
        title: str = "",
        framework: str = "",
        clock: str = "modelled",
        unit: str = "s",
        cluster: str | None = None,
        figures: str = "",
        warnings: Sequence[str] = (),
        chunks: Sequence[tuple[int, int]] = (),
        chunk_names: Sequence[str] = (),
        values: Mapping[int, np.ndarray] | None = None,
    ):
        if clock not in ("modelled", "measured"):
            raise TraceError(f"a clock is 'modelled' or 'measured', not {clock!r}")
        if unit not in ("s", "steps"):
            raise TraceError(f"a trace counts its time in 's' or 'steps', not {unit!r}")
        for text in (title, framework, cluster or "", figures):
            if not isinstance(text, str):
                raise TraceError(f"the title, the framework and the cluster of a trace are text, not {text!r:.80}")
        if (
            not isinstance(warnings, Sequence)
            or isinstance(warnings, str)
            or not all(isinstance(text, str) for text in warnings)
        ):
            raise TraceError(f"the warnings of a trace are a list of texts, not {warnings!r:.80}")
        self.mesh, self.title, self.framework = mesh, title, framework
        self.warnings = list(warnings)
        self.clock, self.unit, self.cluster, self.figures = clock, unit, cluster, figures
        self.chunks = [(int(origin), int(piece)) for origin, piece in chunks]
        self.chunk_names = list(chunk_names)
        # The sort is stable: events of one rank that start together keep the order in which they were recorded.
        numbers = {name: given for name, given in columns.items() if not isinstance(given, Words)}
        order = np.lexsort((numbers["rank"], numbers["start"]))
        self._numbers = _taken(numbers, order)
        self._words = {name: given[order] for name, given in columns.items() if isinstance(given, Words)}
        for array in (*self._numbers.values(), *(words.codes for words in self._words.values())):
            array.flags.writeable = False
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
        self._values = {int(places[row]): array for row, array in (values or {}).items()}

    @classmethod
    def from_columns(cls, mesh: Mesh, *, values: Mapping[int, np.ndarray] | None = None, **given: Any) -> Trace:
        """A trace from one sequence per column, named like the fields of `Event`; the others have their defaults.

        `rank`, `kind`, `op`, `start` and `end` are required. A column may also be one value for all rows, or a pair
        (table, array of indices into it). `values` is row -> array. The keywords of `Trace` (title, framework, clock,
        ...) are passed on. Raises TraceError if an event is impossible.
        """
        missing = [name for name in STORED if name not in given and name not in DEFAULTS]
        if missing:
            raise TraceError(f"a trace needs the column {missing[0]!r}; only {', '.join(DEFAULTS)} may be left out")
        if unknown := [name for name in given if name not in STORED and name not in ABOUT]:
            raise TraceError(f"a trace has no column {unknown[0]!r}; its columns are {', '.join(STORED)}")
        if not isinstance(given["rank"], Sequence | np.ndarray):
            raise TraceError(f"column 'rank' is a sequence, with one rank per event, not {given['rank']!r:.80}")
        num_events = len(given["rank"])
        columns = {name: column(name, given.pop(name, DEFAULTS.get(name)), num_events) for name in STORED}
        given["chunks"] = chunks_of(mesh, given.get("chunks", ()))
        given["chunk_names"] = names_of(given.get("chunk_names", ()), len(given["chunks"]))
        check(mesh, columns, len(given["chunks"]), values or ())
        return cls(mesh, columns, values={row: _plain_array(array) for row, array in (values or {}).items()}, **given)

    @property
    def place(self) -> str:
        """The cluster, and for modelled times where they come from: "h100, data sheet"; "" without a cluster."""
        figures = self.figures if self.clock == "modelled" else ""  # of a measured run, only messages are modelled
        return ", ".join(text for text in (self.cluster, figures) if text) if self.cluster else ""

    # --- reading -------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._numbers["rank"])

    @property
    def events(self) -> Sequence[Event]:
        """The events, created when you access them."""
        return _Events(self)

    def events_at(self, rows: np.ndarray) -> list[Event]:
        """The events at these indices, in the order given."""
        lists = {name: stored[rows].tolist() for name, stored in (self._numbers | self._words).items()}
        lists["peer"] = [None if peer < 0 else peer for peer in lists["peer"]]
        lists["values"] = [self._values.get(row) for row in rows.tolist()]
        return list(map(Event, *(lists[name] for name in COLUMNS)))

    @property
    def values(self) -> Mapping[int, np.ndarray]:
        """The values that were kept: index of the event -> array."""
        return MappingProxyType(self._values)

    def column(self, name: str) -> np.ndarray:
        """One field of every event: an array of numbers (no peer is -1), or of objects if it is not a number."""
        if name in self._numbers:
            return self._numbers[name]
        if name not in self._words:
            raise TraceError(f"a trace has no column {name!r}; its columns are {', '.join(STORED)}")
        return self._words[name].expand()

    def codes(self, name: str) -> tuple[list[Any], np.ndarray]:
        """A field that is not a number, as (its distinct values, for each event the index of its value)."""
        if name not in self._words:
            raise TraceError(f"column {name!r} has no table; those with one are {', '.join(self._words)}")
        return list(self._words[name].table), self._words[name].codes

    def select(
        self, *, rank: int | None = None, kind: str | None = None, op: str | None = None, axis: Axis | None = None
    ) -> Trace:
        """The trace of only those events that match."""
        return self._only(np.flatnonzero(self._rows(rank=rank, kind=kind, op=op, axis=axis)))

    def since(self, time: float) -> Trace:
        """The trace of only those events that start at `time` or later: a step without its set-up.

        time   on the clock of the trace, as the `start` of its events
        """
        return self._only(np.flatnonzero(self._numbers["start"] >= time))

    def _only(self, rows: np.ndarray) -> Trace:
        places = {int(row): place for place, row in enumerate(rows)} if self._values else {}
        return Trace(
            self.mesh,
            _taken(self._numbers, rows) | {name: stored[rows] for name, stored in self._words.items()},
            values={places[row]: array for row, array in self._values.items() if row in places},
            **self.about(),
        )

    def _rows(
        self, rank: int | None = None, kind: str | None = None, op: str | None = None, axis: Axis | None = None
    ) -> np.ndarray:
        """Which events match: one bool per row."""
        rows = np.ones(len(self), bool)
        if rank is not None:
            self.mesh.check_rank(rank)
            rows &= self._numbers["rank"] == rank
        if kind is not None:
            if kind not in KINDS:
                raise TraceError(f"an event's kind is one of {', '.join(KINDS)}, not {kind!r}")
            rows &= self._words["kind"].where(kind)
        if op is not None:
            rows &= self._words["op"].where(op)
        if axis is not None:  # also in the form an event has: "dp,tp"
            label = axis
            if not isinstance(axis, str) or axis not in self._words["axis"].table:  # it may not be an axis: "ranks 0,2"
                label = ",".join(self.mesh.names(tuple(axis.split(",")) if isinstance(axis, str) else axis))
            rows &= self._words["axis"].where(label)
        return rows

    def about(self) -> dict[str, Any]:
        """Everything in a trace except its mesh and its events, by name."""
        return {name: getattr(self, name) for name in ABOUT}

    # --- totals --------------------------------------------------------------------------------------------------

    def bytes_sent(self, rank: int | None = None, axis: Axis | None = None, op: str | None = None) -> int:
        """Bytes that `rank` sent (or all ranks together, if it is None), along `axis`, by `op`.

        A collective that runs as one event counts what the ring algorithm makes each rank send.
        """
        kind = self._words["kind"]
        rows = self._rows(rank=rank, axis=axis, op=op) & (kind.where("send") | kind.where("collective"))
        return int(self._numbers["bytes"][rows].sum())

    @property
    def start(self) -> float:
        return float(self._numbers["start"].min()) if len(self) else 0.0

    @property
    def makespan(self) -> float:
        """From the first start to the last end over all ranks."""
        return float(self._numbers["end"].max()) - self.start if len(self) else 0.0

    @property
    def num_steps(self) -> int:
        """How many rounds of communication there were."""
        return int(self._numbers["step"].max()) + 1 if len(self) else 0

    def busy(self, *kinds: str) -> np.ndarray:
        """How long each rank computed, or had events of these kinds: one figure per rank. What overlaps counts once."""
        rows = np.flatnonzero(np.any([self._rows(kind=kind) for kind in kinds or ("compute",)], axis=0))
        rows = rows[np.argsort(self._numbers["rank"][rows], kind="stable")]  # by rank, then by start
        bounds = np.searchsorted(self._numbers["rank"][rows], np.arange(self.mesh.size + 1))
        starts, ends = self._numbers["start"][rows].copy(), self._numbers["end"][rows]
        spent = np.zeros(self.mesh.size)
        for rank, (first, last) in enumerate(pairwise(bounds)):
            begin, end = starts[first:last], ends[first:last]
            begin[1:] = np.maximum(begin[1:], np.maximum.accumulate(end)[:-1])
            spent[rank] = np.maximum(end - begin, 0.0).sum()
        return spent

    def idle_share(self) -> np.ndarray:
        """1 - busy / makespan of each rank: between 0 and 1."""
        if not self.makespan:
            return np.zeros(self.mesh.size)
        return np.clip(1 - self.busy() / self.makespan, 0.0, 1.0)  # rounding may leave -1e-16

    @property
    def peak_bytes(self) -> np.ndarray:
        """The most that each rank held for backward passes, in bytes; 0 for ranks that did not run `train_batch`."""
        most = np.zeros(self.mesh.size, np.int64)
        np.maximum.at(most, self._numbers["rank"], self._numbers["held"])
        return most

    def table(self) -> str:
        """One line per operation: how often it ran, what it sent, how long it took, all ranks together."""
        lines = [("kind", "op", "axis", "events", "bytes", f"time ({self.unit}, {self.clock})")]
        words = [self._words[name] for name in ("kind", "op", "axis")]
        key = np.zeros(len(self), np.int64)
        for word in words:
            key = key * len(word.table) + word.codes
        _, first, operation = np.unique(key, return_index=True, return_inverse=True)
        kinds, ops, axes = (word[first].tolist() for word in words)
        num_events = np.bincount(operation, minlength=len(first))
        spent = np.bincount(operation, self._numbers["end"] - self._numbers["start"], len(first))
        num_bytes = np.zeros(len(first), np.int64)
        np.add.at(num_bytes, operation, self._numbers["bytes"])
        for place in sorted(range(len(first)), key=lambda place: (KINDS.index(kinds[place]), first[place])):
            totals = f"{num_events[place]:,}", f"{num_bytes[place]:,}", f"{spent[place]:.6g}"
            lines.append((kinds[place], ops[place], axes[place] or "", *totals))
        widths = [max(len(line[cell]) for line in lines) for cell in range(6)]
        sides = [str.ljust] * 3 + [str.rjust] * 3
        texts = ("  ".join(pad(cell, width) for pad, cell, width in zip(sides, line, widths)) for line in lines)
        return "\n".join(text.rstrip() for text in texts)

    # --- as text -------------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """The whole trace, as text that `from_json` reads back."""
        return as_json(self.mesh, self._numbers | self._words, self._values, self.about())

    @classmethod
    def from_json(cls, text: str) -> Trace:
        """The trace that `to_json` wrote. Raises TraceError if the text is anything else."""
        return cls.from_columns(**from_json(text))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Trace):
            return NotImplemented
        return (
            self.mesh == other.mesh
            and self.about() == other.about()
            and all(np.array_equal(self.column(name), other.column(name)) for name in STORED)
            and self._values.keys() == other._values.keys()
            and all(_same_bits(array, other._values[row]) for row, array in self._values.items())
        )

    def __hash__(self) -> int:
        return hash((self.mesh, self.title, len(self)))

    def __repr__(self) -> str:
        about = f"{self.clock}" + (f" on {self.place}" if self.cluster else "")
        return f"Trace of {self.title or 'a program'}: {self.mesh.size} ranks, {len(self):,} events, {about}"


class _Events(Sequence[Event]):
    """The rows of a trace as `Event` objects."""

    def __init__(self, trace: Trace):
        self._trace = trace

    def __len__(self) -> int:
        return len(self._trace)

    @overload
    def __getitem__(self, index: int) -> Event: ...
    @overload
    def __getitem__(self, index: slice) -> list[Event]: ...
    def __getitem__(self, index: int | slice) -> Event | list[Event]:
        rows = range(len(self))[index]
        if isinstance(rows, int):
            return self._trace.events_at(np.array([rows]))[0]
        return self._trace.events_at(np.arange(rows.start, rows.stop, rows.step))

    def __iter__(self) -> Iterator[Event]:
        return iter(self._trace.events_at(np.arange(len(self))))

    def __repr__(self) -> str:
        return f"<{len(self):,} events>"


def _taken(numbers: Mapping[str, np.ndarray], rows: np.ndarray) -> dict[str, np.ndarray]:
    """These rows of columns of numbers. `after` says where an event is among them; -1 if it is not."""
    places = np.full(len(numbers["after"]) + 1, -1, np.int32)
    places[rows] = np.arange(len(rows))
    return {name: places[given[rows]] if name == "after" else given[rows] for name, given in numbers.items()}


def _plain_array(array: Any) -> np.ndarray:
    """A copy of `array` that plain NumPy and JSON can hold: bfloat16 and the like become float32."""
    plain = np.array(array)
    plain = plain if plain.dtype.kind in "biufc" else plain.astype(np.float32)
    plain.flags.writeable = False
    return plain


def _same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


# --- types ------------------------------------------------------------------------------------------------------------


def with_types(trace: Trace, casts: Mapping[tuple[str, str, str], str]) -> Trace:
    """The same trace, with `Event.types` for what communicates: "tp: P → I".

    casts   (line, operation, phase) -> text
    """
    keys = zip(*(trace.column(name) for name in ("where", "op", "phase")), strict=True)
    types = column("types", [casts.get(key, "") for key in keys], len(trace))
    return Trace(trace.mesh, trace._numbers | trace._words | {"types": types}, values=trace.values, **trace.about())
