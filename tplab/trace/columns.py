"""The columns of a trace: one array per field of `Event`; values that are not numbers are stored once, in a table."""

from __future__ import annotations

import base64
import json
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any

import numpy as np

from tplab.errors import MeshError, TraceError
from tplab.mesh import Mesh
from tplab.trace.event import COLUMNS, KINDS, Event

NUMBERS: dict[str, type[np.generic]] = {
    "rank": np.int32,
    "start": np.float64,
    "end": np.float64,
    "peer": np.int32,
    "bytes": np.int64,
    "flops": np.int64,
    "message": np.int64,
    "step": np.int32,
    "chunk": np.int32,
    "held": np.int64,
    "after": np.int32,
}
"""Fields that are numbers, and how they are stored. A missing peer is -1."""

STORED = tuple(name for name in COLUMNS if name != "values")
"""Fields with a column; values are kept by row, because few events have them."""

DEFAULTS: dict[str, Any] = {
    field.name: field.default for field in fields(Event) if field.default is not MISSING and field.name != "values"
} | {"peer": -1}

ABOUT = ("title", "framework", "clock", "unit", "cluster", "figures", "warnings", "chunks", "chunk_names")
"""Everything in a trace except its mesh and its events."""

_TUPLES = [name for name, default in DEFAULTS.items() if default == ()]


class Codes(dict[Any, int]):
    """Value -> its index in a table that grows with each new value."""

    def __missing__(self, value: Any) -> int:
        self[value] = code = len(self)
        return code

    def of(self, name: str, values: Sequence[Any]) -> np.ndarray:
        """The indices of `values`, which belong to the field `name`."""
        try:
            return np.fromiter(map(self.__getitem__, values), np.int32, len(values))
        except TypeError:
            raise TraceError(f"column {name!r} holds a value that cannot be a key, as a list; give tuples") from None


@dataclass(frozen=True, slots=True, eq=False)
class Words:
    """A column of few distinct values: a table of them, and for each row an index into the table."""

    table: list[Any]
    codes: np.ndarray

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, rows: np.ndarray) -> Words:
        codes = self.codes[rows]
        return Words(self.table, _zeros(len(codes)) if len(self.table) == 1 else codes)

    def where(self, wanted: Any) -> np.ndarray:
        """Which rows hold `wanted`."""
        matches = np.array([value == wanted for value in self.table], bool)
        return matches[self.codes] if len(self.table) else np.zeros(0, bool)

    def expand(self) -> np.ndarray:
        """The value of every row: an array of objects."""
        table = np.empty(len(self.table), object)
        for place, value in enumerate(self.table):  # one by one: NumPy would make a matrix of tuples of equal length
            table[place] = value
        return table[self.codes]

    def tolist(self) -> list[Any]:
        return [self.table[code] for code in self.codes.tolist()]


Column = np.ndarray | Words


def column(name: str, given: Any, num_events: int) -> Column:
    """The column of the field `name` from a sequence, one value for all rows, or a pair (table, array of indices).

    Raises TraceError if its length is not `num_events`, or if it holds a value that the field cannot have.
    """
    made = number_column(name, given, num_events) if name in NUMBERS else _words(name, given, num_events)
    if len(made) != num_events:
        raise TraceError(f"column {name!r} has {len(made)} rows, and 'rank' has {num_events}; they must be as many")
    return made


def number_column(name: str, given: Any, num_events: int) -> np.ndarray:
    """The column of a field in NUMBERS; a single value is repeated for `num_events` rows. Raises TraceError."""
    if name == "peer" and not isinstance(given, np.ndarray):
        given = -1 if given is None else given
        given = [-1 if peer is None else peer for peer in given] if isinstance(given, Iterable) else given
    try:
        array = np.asarray(given)
        with np.errstate(invalid="ignore"):  # NaN where a whole number should be: refused below
            made = array.astype(NUMBERS[name])
    except (TypeError, ValueError, OverflowError) as error:
        raise TraceError(f"column {name!r} must hold numbers: {error}") from None
    if array.ndim > 1 or array.dtype.kind not in "biufO":
        raise TraceError(f"column {name!r} must hold one number per event, not {given!r:.80}")
    if array.dtype.kind == "f" and made.dtype.kind == "i" and bool(np.any(made != array)):
        raise TraceError(
            f"column {name!r} holds {array[made != array].flat[0]}; it must hold {made.itemsize * 8}-bit whole numbers"
        )
    return made if made.ndim else np.full(num_events, made)


def _words(name: str, given: Any, num_events: int) -> Words:
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], np.ndarray):
        table, codes = list(given[0]), given[1].astype(np.int32)
        if len(codes) and not 0 <= codes.min() <= codes.max() < len(table):
            raise TraceError(f"column {name!r} has places up to {codes.max()} in a table of {len(table)}")
    elif given is None or isinstance(given, str) or (name in _TUPLES and _is_row(given)):
        table, codes = [given], _zeros(num_events)
    else:
        places = Codes()
        codes = places.of(name, given.tolist() if isinstance(given, np.ndarray) else given)
        table = list(places)
    return Words([_plain(name, value) for value in table], codes)


def _zeros(count: int) -> np.ndarray:
    """`count` zeros that take no memory."""
    return np.broadcast_to(np.zeros((), np.int32), (count,))


def _is_row(given: Any) -> bool:
    """Whether a tuple is one row's value, and not a whole column."""
    return isinstance(given, tuple) and all(isinstance(item, int | np.integer) for item in given)


def _plain(name: str, value: Any) -> Any:
    """A value in a form that suits JSON and `repr`: no torch.Size, no NumPy scalars."""
    try:
        if name in _TUPLES:
            return tuple(operator.index(item) for item in value)
        if name == "axis" and value is not None and not isinstance(value, str):
            return ",".join(value)
    except TypeError:
        raise TraceError(f"column {name!r} cannot hold {value!r:.80}; see the fields of `Event`") from None
    if (value is None and name != "axis") or isinstance(value, int | float | list | tuple | dict):
        raise TraceError(f"column {name!r} holds text, not {value!r:.80}")
    return value if value is None else str(value)


def chunks_of(mesh: Mesh, given: Any) -> list[tuple[int, int]]:
    """The chunks of a trace as plain numbers. Raises TraceError unless each is (origin rank, piece)."""
    try:
        chunks = [(operator.index(origin), operator.index(piece)) for origin, piece in given]
    except (TypeError, ValueError):
        raise TraceError("chunks are pairs of whole numbers, (origin rank, piece), one for each chunk") from None
    if wrong := [chunk for chunk in chunks if not 0 <= chunk[0] < mesh.size or chunk[1] < 0]:
        raise TraceError(f"a chunk is (origin rank, piece), and {wrong[0]} is none: {_ranks_of(mesh)}")
    return chunks


def names_of(given: Any, num_chunks: int) -> list[str]:
    """The names of a trace's chunks: one for each, or none at all if none is known. Otherwise raises TraceError."""
    names = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]
    if not all(isinstance(name, str) for name in names) or len(names) not in (0, num_chunks):
        raise TraceError(f"chunk_names has one text for each of the {num_chunks} chunks, not {given!r:.80}")
    return names if any(names) else []


def check(mesh: Mesh, columns: Mapping[str, Any], num_chunks: int, valued: Iterable[int]) -> None:
    """Raise TraceError if an event has an impossible kind, rank, chunk or time.

    valued   the events whose values are kept
    """
    rank, start, end = columns["rank"], columns["start"], columns["end"]

    def refuse(wrong: np.ndarray, say: Callable[[int], str]) -> None:
        if wrong.any():
            row = int(np.argmax(wrong))
            raise TraceError(f"event {row} {say(row)}")

    if unknown := [kind for kind in columns["kind"].table if kind not in KINDS]:
        raise TraceError(f"an event's kind is one of {', '.join(KINDS)}, not {unknown[0]!r}")
    ranks = _ranks_of(mesh)
    for name in ("group", "contributors"):
        if strangers := [one for members in columns[name].table for one in members if not 0 <= one < mesh.size]:
            raise TraceError(f"column {name!r} names rank {strangers[0]}; {ranks}")
    if strangers := [row for row in valued if not 0 <= row < len(rank)]:
        raise TraceError(f"values are kept for event {strangers[0]}, but there are {len(rank)} events")
    refuse((rank < 0) | (rank >= mesh.size), lambda row: f"is of rank {rank[row]}; {ranks}")
    peer, chunk = columns["peer"], columns["chunk"]
    refuse((peer < -1) | (peer >= mesh.size), lambda row: f"names rank {peer[row]} as its peer; {ranks}")
    endless = ~np.isfinite(start) | ~np.isfinite(end)
    refuse(endless, lambda row: f"lasts from {start[row]} to {end[row]}; give finite times")
    refuse(end < start, lambda row: f"ends at {end[row]}, before it starts at {start[row]}")
    after = columns["after"]
    refuse(after >= len(after), lambda row: f"comes after event {after[row]}, but there are {len(after)} events")
    refuse(
        chunk >= num_chunks,
        lambda row: f"carries chunk {chunk[row]} of {num_chunks}; give chunks=[(origin rank, piece), ...]",
    )
    for name, least in (("bytes", 0), ("flops", 0), ("message", -1), ("step", -1), ("chunk", -1), ("after", -1)):
        refuse(columns[name] < least, lambda row, name=name: f"has {name} {columns[name][row]}, which is too small")


def _ranks_of(mesh: Mesh) -> str:
    return f"{mesh} has ranks 0 to {mesh.size - 1}"


# --- as JSON text, and back: every column, every value, to the last bit -----------------------------------------------


_FORMAT = "tplab trace 1"


def as_json(
    mesh: Mesh, columns: Mapping[str, Column], values: Mapping[int, np.ndarray], about: Mapping[str, Any]
) -> str:
    """The trace as text. A column of numbers is one list; one of words is their table, and an index for each event."""
    listed = {
        name: {"table": given.table, "codes": given.codes.tolist()} if isinstance(given, Words) else given.tolist()
        for name, given in columns.items()
    }
    # Values as bytes: JSON has no NaN, no infinity and no complex numbers.
    kept = {
        row: {"dtype": array.dtype.str, "shape": array.shape, "base64": base64.b64encode(array.tobytes()).decode()}
        for row, array in values.items()
    }
    return json.dumps({"format": _FORMAT, "mesh": dict(mesh.shape), **about, "columns": listed, "values": kept})


def from_json(text: str) -> dict[str, Any]:
    """The arguments of `Trace.from_columns`, from what `as_json` wrote. Raises TraceError if it is something else."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _not_a_trace(str(error)) from None
    if not isinstance(data, dict) or data.pop("format", None) != _FORMAT:
        raise _not_a_trace(f"it does not say {_FORMAT!r}")
    if missing := [name for name in ("mesh", "columns", "values") if not isinstance(data.get(name), dict)]:
        raise _not_a_trace(f"{missing[0]!r} is missing, or is no object")
    shape, columns, values = data.pop("mesh"), data.pop("columns"), data.pop("values")
    if unknown := [name for name in data if name not in ABOUT] + [name for name in columns if name not in STORED]:
        raise _not_a_trace(f"it has a field {unknown[0]!r}")
    try:
        mesh = Mesh(**shape)
    except MeshError as error:
        raise _not_a_trace(str(error)) from None
    made = {name: _column(name, given) for name, given in columns.items()}
    return {"mesh": mesh, "values": {_row(row): _array(given) for row, given in values.items()}, **made, **data}


def _column(name: str, given: Any) -> Any:
    if isinstance(given, list):
        return given
    if not isinstance(given, dict) or not all(isinstance(given.get(part), list) for part in ("table", "codes")):
        raise _not_a_trace(f"column {name!r} is no list, and no table with codes")
    if not all(type(code) is int and 0 <= code < len(given["table"]) for code in given["codes"]):
        raise _not_a_trace(f"column {name!r} has codes that are no places in its table of {len(given['table'])}")
    table = [tuple(value) if isinstance(value, list) else value for value in given["table"]]
    return table, np.array(given["codes"], np.int32)


def _row(text: str) -> int:
    if not re.fullmatch("[0-9]{1,18}", text):
        raise _not_a_trace(f"values are kept by the number of their event, and {text!r} is none")
    return int(text)


def _array(given: Any) -> np.ndarray:
    """A value that was kept. Only dtypes of numbers are accepted: nothing that NumPy would have to evaluate."""
    try:
        if not re.fullmatch("[<>|=]?[biufc][0-9]{1,2}", given["dtype"]):
            raise ValueError(f"dtype {given['dtype']!r} is not one of numbers")
        return np.frombuffer(base64.b64decode(given["base64"]), given["dtype"]).reshape(given["shape"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise _not_a_trace(f"a value is damaged: {error}") from None


def _not_a_trace(why: str) -> TraceError:
    return TraceError(f"this is not a trace that to_json wrote: {why}")
