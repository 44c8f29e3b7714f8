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
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any, NamedTuple

FORMAT = "tplab rank 1"
WRITE_EVERY = 0.25
"""Seconds. If a rank's process is killed, at most the notes of this long are lost."""

FOLDER = "tplab_trace"
"""Where the ranks of a real run write their files, if no other folder is named."""


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
