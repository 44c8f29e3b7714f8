"""The file of one rank of a real run: written line by line while the program runs, so that a crash leaves what was.

The first line is about the rank. Each line after it is a list, of which the first word says what follows:

    group  id, description, ranks
    begin  number, op, id of the group, time, bytes, shape, dtype, line of the program, phase, reduction, peer, tag
    start  number, time                     the GPU has come to it
    end    number, time                     it is done
    drop   number                           it was refused; other notes about it may follow, and say nothing
    from   number, rank                     a message from any rank has come from this one
    wait   number, time, time, line         the rank stood still until it was done
    stop   time                             the program has ended

Times are seconds of the machine's monotonic clock. `peer` and `tag` are of messages; `peer` is -1 for any rank, and
None for a collective.
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
"""Seconds: so much of what a rank noted is lost at most when its process is killed."""


ANY = -1
"""The source of a message that may come from any rank."""


class About(NamedTuple):
    """Whose file it is.

    run       the same on all ranks of one run
    machine   ranks that have the same read the same clock
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
    """Writes a rank's file. Noting is cheap: a thread beside the program writes."""

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
        """The program has ended. Times that are not known yet are waited for, `patience` seconds at most."""
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
                except Exception:  # the GPU has failed, and will never tell
                    continue
                if any(isinstance(field, Later) for field in known):
                    self._later.append(known)
                else:
                    lines.append(json.dumps(known) + "\n")
            self._file.write("".join(lines))
            self._file.flush()


def _known(field: Any) -> Any:
    """The field, or the time that it was waiting for."""
    seconds = field.seconds() if isinstance(field, Later) else None
    return field if seconds is None else seconds


@dataclass(slots=True, eq=False)
class Operation:
    """A collective or a message, as one rank took part in it. No `end`: it was not done when the file ends."""

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
    """When the rank had waited for it."""


class Wait(NamedTuple):
    """The rank stood still."""

    operation: Operation
    start: float
    end: float
    where: str


@dataclass(slots=True, eq=False)
class RankFile:
    """What is in the file of one rank.

    groups       id -> description, ranks
    operations   in the order in which they began
    stop         when the program ended; or the last time in the file, where it was killed
    has_ended    whether the program came to its end, be it by an error
    """

    about: About
    groups: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    operations: list[Operation] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    stop: float = 0.0
    has_ended: bool = False
