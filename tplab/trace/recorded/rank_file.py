"""The file of one rank of a real run. It is written line by line while the program runs, so it survives a crash.

The first line is about the rank. Each line after it is a list whose first word says what follows:

    group  id, description, ranks
    begin  number, op, id of the group, time, bytes, shape, dtype, line of the program, phase, reduction, peer, tag
    start  number, time                     the GPU has reached it
    end    number, time                     it is done
    drop   number                           it was refused; ignore any later notes about it
    from   number, rank                     a message that could come from any rank came from this one
    wait   number, time, time, line         the rank waited until it was done
    stop   time                             the program has ended

Times are in seconds of the machine's monotonic clock. Only messages have a `peer` and a `tag`; `peer` is -1 for any
rank, and None for a collective.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any, NamedTuple

from tplab.errors import TraceError

FORMAT = "tplab rank 1"
WRITE_EVERY = 0.25
"""Seconds. If a rank's process is killed, at most the notes of this long are lost."""

FOLDER = "tplab_trace"
"""The folder of the files of a real run, if no other is named."""


ANY = -1
"""The source of a message that may come from any rank."""


class About(NamedTuple):
    """Which rank, of which run, the file belongs to.

    run       the same on all ranks of one run
    machine   ranks with the same machine read the same clock
    host      the machine's name
    start     when the rank joined the others
    """

    rank: int
    world: int
    run: str
    machine: str
    host: str
    title: str
    start: float


class Later:
    """A time that is not known yet."""

    def seconds(self) -> float | None:
        """The time, once it is known."""
        raise NotImplementedError


class Writer:
    """Writes a rank's file. Noting is cheap, because a separate thread does the writing."""

    def __init__(self, path: Path, about: About):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", encoding="utf8")
        self._file.write(json.dumps({"format": FORMAT, **about._asdict()}) + "\n")
        self._file.flush()
        self._notes: deque[tuple[Any, ...]] = deque()
        self._later: list[tuple[Any, ...]] = []
        self._process = os.getpid()
        self._is_over, self._writing = Event(), Lock()
        self._thread = Thread(target=self._write_on, name="tplab-record", daemon=True)
        self._thread.start()

    def note(self, *fields: Any) -> None:
        self._notes.append(fields)

    def close(self, now: float, patience: float = 0.0) -> None:
        """End the file: the program has ended. Waits at most `patience` seconds for times that are not known yet."""
        if os.getpid() != self._process or self._is_over.is_set():
            return  # a copy of the process (after a fork) leaves the file alone
        deadline = time.monotonic() + patience
        self.note("stop", now)
        self._is_over.set()
        self._thread.join()
        self._write()
        while self._later and time.monotonic() < deadline:
            time.sleep(0.01)
            self._write()
        self._file.close()

    def _write_on(self) -> None:
        while not self._is_over.wait(WRITE_EVERY):
            self._write()

    def _write(self) -> None:
        with self._writing:
            notes, self._later = self._later, []
            while self._notes:
                notes.append(self._notes.popleft())
            lines = []
            for note in notes:
                try:
                    known = tuple(_known(field) for field in note)
                except Exception:  # the GPU has failed, so the time will never be known
                    continue
                if any(isinstance(field, Later) for field in known):
                    self._later.append(known)
                else:
                    lines.append(json.dumps(known) + "\n")
            self._file.write("".join(lines))
            self._file.flush()


def _known(field: Any) -> Any:
    """The field itself or, if it is a `Later`, its time."""
    seconds = field.seconds() if isinstance(field, Later) else None
    return field if seconds is None else seconds


@dataclass(slots=True, eq=False)
class Operation:
    """One rank's part in a collective or a message. Without an `end`, it was not done when the file ends."""

    op: str
    group: str
    begin: float
    num_bytes: int
    shape: tuple[int, ...]
    dtype: str
    where: str
    phase: str
    reduction: str
    peer: int | None
    tag: int
    end: float | None = None
    taken: float | None = None
    """When the rank had finished waiting for it."""


class Wait(NamedTuple):
    """A span in which the rank waited."""

    operation: Operation
    start: float
    end: float
    where: str


@dataclass(slots=True, eq=False)
class RankFile:
    """The contents of one rank's file.

    groups       id -> description, ranks
    operations   in the order in which they began
    stop         when the program ended; or the last time in the file, if it was killed
    has_ended    whether the program came to its end, even with an error
    """

    about: About
    groups: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    operations: list[Operation] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    stop: float = 0.0
    has_ended: bool = False


# --- reading: a file may come from anywhere, so every field is checked ------------------------------------------------


def read(path: Path) -> RankFile:
    """Read a rank's file. The last line may be cut off. Raises TraceError if it is not such a file, or is damaged."""
    lines = path.read_text(encoding="utf8", errors="replace").split("\n")
    try:
        first = json.loads(lines[0])
        if first.pop("format") != FORMAT:
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise TraceError(f"{path} is not the file of a rank: its first line does not say {FORMAT!r}") from None
    number = 1
    try:
        reading = _Reading(About(**first))
        for line in lines[1:-1]:  # what follows the last newline was not completely written
            number += 1
            reading.take(json.loads(line))
    except RecursionError:
        raise TraceError(f"{path}, line {number} is damaged: brackets are nested too deeply") from None
    except (ValueError, TypeError, IndexError) as error:
        raise TraceError(f"{path}, line {number} is damaged: {type(error).__name__}: {_cut(str(error), 300)}") from None
    reading.found.operations = list(reading.begun.values())
    return reading.found


class _Reading:
    """The part of a file read so far. Raises ValueError, TypeError or IndexError if a line is damaged."""

    def __init__(self, about: About):
        _rank(about.rank, _whole(about.world))
        _time(about.start)
        for text in (about.run, about.machine, about.host, about.title):
            _text(text)
        self.found = RankFile(about, stop=about.start)
        self.begun: dict[int, Operation] = {}
        self.dropped: set[int] = set()

    def take(self, note: Sequence[Any]) -> None:
        """Enter one line."""
        kind, *rest = note
        if kind == "group":
            self._group(*rest)
        elif kind == "begin":
            self._begin(*rest)
        elif kind == "stop":
            self.found.has_ended = True
            self._until(rest[0])
        elif kind not in ("drop", "from", "start", "end", "wait"):
            raise ValueError(f"there is no note {kind!r}")
        elif rest[0] not in self.dropped:
            if rest[0] not in self.begun:
                raise ValueError(f"there is no operation {rest[0]!r}")
            self._more(kind, *rest)

    def _group(self, group: str, description: str, ranks: Sequence[int]) -> None:
        if _text(group) in self.found.groups:
            raise ValueError(f"group {group!r} is there twice")
        members = tuple(_rank(rank, self.found.about.world) for rank in ranks)
        if not members or len(set(members)) < len(members):
            raise ValueError(f"group {group!r} has {'a rank twice' if members else 'no ranks'}")
        self.found.groups[group] = _text(description), members

    def _begin(self, number: int, *fields: Any) -> None:
        if len(fields) != len(_OF_OPERATION):
            raise ValueError(f"it has {len(fields)} fields after the number, and not {len(_OF_OPERATION)}")
        begun = Operation(*(check(value) for check, value in zip(_OF_OPERATION, fields)))
        if begun.group not in self.found.groups:
            raise ValueError(f"there is no group {begun.group!r}")
        if begun.peer is not None and begun.peer != ANY:
            _rank(begun.peer, self.found.about.world)
        self.begun[_whole(number)] = begun
        self._until(begun.begin)

    def _more(self, kind: str, number: int, *rest: Any) -> None:
        """A note about an operation that had begun."""
        operation = self.begun[number]
        if kind == "drop":
            del self.begun[number]
            self.dropped.add(number)
        elif kind == "from":
            operation.peer = _rank(rest[0], self.found.about.world)
        elif kind == "start":
            operation.begin = _time(rest[0])
        elif kind == "end":
            operation.end = _time(rest[0]) if operation.end is None else min(operation.end, _time(rest[0]))
            self._until(rest[0])
        else:
            start, end, where = rest
            self.found.waits.append(Wait(operation, _time(start), _time(end), _text(where)))
            if operation.taken is None:
                operation.taken = end
            self._until(end)

    def _until(self, time: float) -> None:
        self.found.stop = max(self.found.stop, _time(time))


_LARGEST = 1 << 62


def _shown(value: object) -> str:
    return _cut(repr(value), 100)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}..."


def _time(value: Any) -> float:
    if not isinstance(value, int | float) or not -_LARGEST < value < _LARGEST:  # also NaN is not
        raise ValueError(f"{_shown(value)} is not a time")
    return value


def _whole(value: Any) -> int:
    if type(value) is not int or not -_LARGEST < value < _LARGEST:
        raise ValueError(f"{_shown(value)} is not a whole number")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{_shown(value)} is not a text")
    return value


def _rank(value: Any, world: int) -> int:
    if not 0 <= _whole(value) < world:
        raise ValueError(f"{value} is not one of the {world} ranks")
    return value


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(map(_whole, value))


def _peer(value: Any) -> int | None:
    return None if value is None else _whole(value)


_OF_OPERATION: Sequence[Callable[[Any], Any]] = (_text, _text, _time, _whole, _shape, *[_text] * 4, _peer, _whole)
"""The check of each field of a line `begin`, after the number."""
