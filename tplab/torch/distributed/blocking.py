"""How a thread waits for another one: while it waits, it gives up its turn.

Only one thread of a run has the turn, and a thread that waits for a lock would keep the turn forever. So during a run,
these replace Python's own ways to wait. They behave as Python's do, and everything else is built on them: events,
conditions, queues, executors and their futures, asyncio. A rank with one thread waits as usual, and so do threads of no
rank. But a rank that sleeps, waits with a timeout, waits to lock a file, or polls for a file, may wait for another
rank, and always gives up its turn.
"""

from __future__ import annotations

import _queue
import inspect
import multiprocessing.process
import os
import queue
import selectors
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from tplab.torch.distributed.replaced import Value, on_ranks, taking_turns
from tplab.torch.ranks.program import is_program, outwards
from tplab.torch.ranks.simulated import SimulatedRank
from tplab.torch.ranks.texts import AGAIN
from tplab.torch.ranks.watches import OF_FILES, OF_OTHERS, OF_THREADS

try:
    import fcntl
except ImportError:  # Windows
    fcntl: Any = None

_allocate_lock = threading.Lock


def of_several(is_timed: bool = False) -> SimulatedRank | None:
    """The same, if several threads of the rank take turns or `is_timed`: the rank waits with a timeout."""
    rank = taking_turns()
    if rank is None or rank.waits_as_always:
        return None
    return rank if is_timed or rank.home is not rank or rank.turns.others_of(rank) else None


class Lock:
    """`threading.Lock`. A `threading.RLock` is Python's own, built on this one."""

    def __init__(self) -> None:
        self._lock: Any = _allocate_lock()
        self.release = self.release_lock = self._lock.release
        self.locked = self.locked_lock = self._lock.locked

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        lock = self._lock
        if not blocking or (timeout < 0 and timeout != -1):
            return lock.acquire(blocking, timeout)
        if lock.acquire(False):
            return True
        if of_several(timeout >= 0) is None:
            return lock.acquire(True, timeout)
        return _waits(lambda: lock.acquire(False), lambda: not lock.locked(), None if timeout < 0 else timeout)

    acquire_lock = acquire

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: Any) -> None:
        self.release()

    def _at_fork_reinit(self) -> None:
        self._lock._at_fork_reinit()  # in place: conditions keep its methods


class SimpleQueue:
    """`queue.SimpleQueue`."""

    __class_getitem__ = classmethod(types.GenericAlias)

    def __init__(self) -> None:
        self._queue: Any = _queue.SimpleQueue()

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        self._queue.put(item)

    def put_nowait(self, item: Any) -> None:
        self._queue.put(item)

    def get_nowait(self) -> Any:
        return self._queue.get_nowait()

    def empty(self) -> bool:
        return self._queue.empty()

    def qsize(self) -> int:
        return self._queue.qsize()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if not block or of_several(timeout is not None) is None or (timeout is not None and timeout < 0):
            return self._queue.get(block, timeout)
        found: list[Any] = []

        def has_taken() -> bool:
            with suppress(queue.Empty):
                found.append(self._queue.get_nowait())
            return bool(found)

        if not _waits(has_taken, lambda: not self._queue.empty(), timeout):
            raise queue.Empty
        return found[0]


def _waits(has_taken: Callable[[], bool], is_there: Callable[[], bool], seconds: float | None) -> bool:
    """Let others go on until `has_taken()` what may be there, or for this many seconds. Returns whether it has."""
    rank, until = taking_turns(), time.perf_counter() + (seconds or 0)
    assert rank is not None
    while not has_taken():
        left = None if seconds is None else until - time.perf_counter()
        if left is not None and left <= 0:
            return False
        rank.wait_until(is_there, _asked(left), left, OF_THREADS)
    return True


@on_ranks(time, "sleep")
def _sleep(rank: SimulatedRank, own: Any, seconds: float) -> None:
    """A rank with one thread also gives up its turn: it may wait for a file that another rank writes."""
    if rank.waits_as_always or seconds < 0:
        own(seconds)
    else:
        rank.sleep(seconds, _asked(seconds))


@on_ranks(threading.Thread, "join")
def _join(rank: SimulatedRank, own: Any, thread: threading.Thread, timeout: float | None = None) -> None:
    seat = getattr(thread, "_seat", None)
    if of_several() is not None and seat is not None and thread is not threading.current_thread():
        turns, what = seat.turns, f"{_asked()} of {thread.name!r}"
        if not rank.wait_until(lambda: not turns.is_running(seat), what, timeout, OF_THREADS):
            return
        timeout = None
    own(thread, timeout)


def _select(rank: SimulatedRank, own: Any, selector: Any, timeout: float | None = None) -> Any:
    """For files, pipes and processes."""
    if of_several(timeout is not None) is None or (timeout is not None and timeout <= 0):
        return own(selector, timeout)
    found: list[Any] = []

    def is_there() -> bool:
        found[:] = own(selector, 0)
        return bool(found)

    rank.wait_until(is_there, _asked(timeout), timeout, OF_OTHERS)
    return found


def _flock(rank: SimulatedRank, own: Any, file: Any, command: int) -> None:
    """For a lock that another rank or process may hold."""
    if command & (fcntl.LOCK_NB | fcntl.LOCK_UN):
        own(file, command)
        return

    def is_there() -> bool:
        with suppress(BlockingIOError):
            own(file, command | fcntl.LOCK_NB)
            return True
        return False

    rank.wait_until(is_there, "fcntl.flock", None, OF_FILES)


def _looked(rank: SimulatedRank, own: Any, path: Any, *args: Any, **kwargs: Any) -> bool:
    """A rank may look for a file in a loop that never sleeps."""
    found = own(path, *args, **kwargs)
    if not found:
        home = "Path" if own.__module__.startswith("pathlib") else "os.path"
        rank.looked_in_vain(str(path), f"{home}.{own.__name__}")
    return found


@on_ranks(subprocess.Popen, "__init__")
def _begun(rank: SimulatedRank, own: Any, process: Any, *args: Any, **kwargs: Any) -> None:
    """The child inherits the rank's environment, which C does not know. While it runs, a rank that sleeps and looks
    again may be waiting for it."""
    if len(args) <= _ENV and kwargs.get("env") is None:
        kwargs["env"] = dict(os.environ)
    own(process, *args, **kwargs)
    rank.turns.watches.outsiders.add(process)


_ENV = [*inspect.signature(subprocess.Popen).parameters].index("env")


@on_ranks(os, "system")
def _system(rank: SimulatedRank, own: Any, command: Any) -> int:
    """Likewise."""
    if os.name == "nt":
        return own(command)
    code = subprocess.call(command, shell=True)
    return code << 8 if code >= 0 else -code


@on_ranks(multiprocessing.process.BaseProcess, "start")
def _process_started(rank: SimulatedRank, own: Any, process: Any) -> None:
    own(process)
    rank.turns.watches.outsiders.add(process)


@on_ranks(torch.futures.Future, "wait")
def _future_wait(rank: SimulatedRank, own: Any, future: Any) -> Any:
    if of_several() is not None:
        rank.wait_until(future.done, _asked(), None, OF_THREADS)
    return own(future)


_SELECTORS = (selectors.DefaultSelector, getattr(selectors, "PollSelector", selectors.SelectSelector))
_LOOKS = (os.path, ("exists", "isfile", "isdir")), (Path, ("exists", "is_file", "is_dir"))

BLOCKING: list[Value] = [
    (threading, "Lock", Lock),
    (threading, "_allocate_lock", Lock),
    (threading, "RLock", threading._PyRLock),  # type: ignore[attr-defined]
    (queue, "SimpleQueue", SimpleQueue),
    *(_sleep, _join, _begun, _system, _process_started, _future_wait),
    *(
        on_ranks(kind, "select")(_select)
        for kind in {next(home for home in kind.__mro__ if "select" in vars(home)) for kind in _SELECTORS}
    ),
    *(on_ranks(home, name)(_looked) for home, names in _LOOKS for name in names),
]
if fcntl is not None:
    BLOCKING.append(on_ranks(fcntl, "flock")(_flock))


def _asked(seconds: float | None = None) -> str:
    """The program's call that waits here, for at most these seconds, such as "Future.result"."""
    asked = "threading"
    for frame in outwards(sys._getframe(1)):
        if is_program(frame.f_code.co_filename):
            break
        asked = frame.f_code.co_qualname
    return asked if seconds is None else asked + AGAIN
