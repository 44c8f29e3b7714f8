"""The floor: of all runs in this process, only the one that has the floor lets its ranks take turns."""

from __future__ import annotations

import os
import time
from collections import deque
from contextlib import suppress
from threading import Lock

_POLL = 0.1  # s; Ctrl-C reaches a thread only between two waits
_SLICE = 5e-3  # s; how long a run keeps the floor while another one waits for it


class Ticket:
    """A run's place in the queue for the floor. The first in the queue has the floor. Nothing else records this, so no
    interrupt can leave it inconsistent.

    A run inside a rank needs no ticket: it takes its turns within that rank's turn.
    """

    _queue: deque[Ticket] = deque()

    def __init__(self) -> None:
        self._called = Lock()
        self._called.acquire()
        self._since = 0.0

    @property
    def has_floor(self) -> bool:
        queue = self._queue
        return bool(queue) and queue[0] is self

    @property
    def is_wanted(self) -> bool:
        """Whether this run has had the floor for some time, and another one is waiting for it."""
        return len(self._queue) > 1 and time.perf_counter() - self._since > _SLICE

    def enter(self) -> None:
        """Wait until this run has the floor."""
        self._queue.append(self)
        self._wait()

    def pause(self) -> None:
        """Let all other waiting runs go first."""
        self._queue.rotate(-1)
        self._call_first()
        self._wait()

    def leave(self) -> None:
        with suppress(ValueError):  # it never got into the queue
            self._queue.remove(self)
        self._call_first()

    def _wait(self) -> None:
        while not self.has_floor:
            self._called.acquire(timeout=_POLL)
        self._since = time.perf_counter()

    def _call_first(self) -> None:
        with suppress(IndexError, RuntimeError):  # the queue is empty, or the first has already been woken
            self._queue[0]._called.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=Ticket._queue.clear)  # a forked process does not have the threads that run them
