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
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from tplab.torch.distributed.replaced import Value
from tplab.torch.ranks.program import is_program
from tplab.torch.ranks.rank import current_rank_or_none
from tplab.torch.ranks.simulated import SimulatedRank
from tplab.torch.ranks.texts import AGAIN
from tplab.torch.ranks.watches import OF_FILES, OF_OTHERS, OF_THREADS

try:
    import fcntl
except ImportError:  # Windows
    fcntl: Any = None

_allocate_lock, _sleep, _join = threading.Lock, time.sleep, threading.Thread.join


def taking_turns() -> SimulatedRank | None:
    """The rank of the calling thread, if it takes turns."""
    rank = current_rank_or_none()
    return rank if isinstance(rank, SimulatedRank) and rank.seat.turns.process == os.getpid() else None


def of_several(is_timed: bool = False) -> SimulatedRank | None:
    """The same, if several threads of the rank take turns or `is_timed`: the rank waits with a timeout."""
    rank = taking_turns()
    if rank is None or rank.waits_as_always:
        return None
    return rank if is_timed or rank.home is not rank or rank.seat.turns.others_of(rank.seat) else None


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
        rank = of_several(timeout >= 0)
        if rank is None:
            return lock.acquire(True, timeout)
        until = time.perf_counter() + timeout
        while not lock.acquire(False):
            left = None if timeout < 0 else until - time.perf_counter()
            if left is not None and left <= 0:
                return False
            rank.wait_until(lambda: not lock.locked(), _asked(left), left, OF_THREADS)
        return True

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
        rank = of_several(timeout is not None)
        if not block or rank is None or (timeout is not None and timeout < 0):
            return self._queue.get(block, timeout)
        until = time.perf_counter() + (timeout or 0)
        while True:
            try:
                return self._queue.get_nowait()
            except queue.Empty:
                left = None if timeout is None else until - time.perf_counter()
                if left is not None and left <= 0:
                    raise
                rank.wait_until(lambda: not self._queue.empty(), _asked(left), left, OF_THREADS)


def sleep(seconds: float) -> None:
    """`time.sleep`. A rank with one thread also gives up its turn: it may wait for a file that another rank writes."""
    rank = taking_turns()
    if rank is None or rank.waits_as_always or seconds < 0:
        _sleep(seconds)
    else:
        rank.sleep(seconds, _asked(seconds))


def join(thread: threading.Thread, timeout: float | None = None) -> None:
    """`threading.Thread.join`."""
    rank, seat = of_several(), getattr(thread, "_seat", None)
    if rank is not None and seat is not None and thread is not threading.current_thread():
        turns, what = seat.turns, f"{_asked()} of {thread.name!r}"
        if not rank.wait_until(lambda: not turns.is_running(seat), what, timeout, OF_THREADS):
            return
        timeout = None
    _join(thread, timeout)


def _selects(kind: Any) -> tuple[type, str, Callable[..., Any]]:
    """`select` of a class of selectors: for files, pipes and processes."""
    select: Callable[..., Any] = kind.select

    def selected(self: Any, timeout: float | None = None) -> Any:
        rank = of_several(timeout is not None)
        if rank is None or (timeout is not None and timeout <= 0):
            return select(self, timeout)
        found: list[Any] = []

        def is_there() -> bool:
            found[:] = select(self, 0)
            return bool(found)

        rank.wait_until(is_there, _asked(timeout), timeout, OF_OTHERS)
        return found

    return kind, "select", selected


def _flock(file: Any, command: int) -> None:
    """`fcntl.flock`, for a lock that another rank or process may hold."""
    rank = taking_turns()
    if rank is None or command & (fcntl.LOCK_NB | fcntl.LOCK_UN):
        _lock_file(file, command)
        return

    def is_there() -> bool:
        with suppress(BlockingIOError):
            _lock_file(file, command | fcntl.LOCK_NB)
            return True
        return False

    rank.wait_until(is_there, "fcntl.flock", None, OF_FILES)


def _looks(home: Any, name: str) -> tuple[Any, str, Callable[..., Any]]:
    """`os.path.exists` and the like: a rank may look for a file in a loop that never sleeps."""
    own: Callable[..., bool] = getattr(home, name)

    @wraps(own)
    def looked(path: Any, *args: Any, **kwargs: Any) -> bool:
        found = own(path, *args, **kwargs)
        if not found and (rank := taking_turns()) is not None:
            rank.looked_in_vain(str(path), f"{home.__name__.replace('posixpath', 'os.path')}.{name}")
        return found

    return home, name, looked


def _begun(process: Any, *args: Any, **kwargs: Any) -> None:
    """`subprocess.Popen(...)`: the child inherits the rank's environment, which C does not know. While it runs, a rank
    that sleeps and looks again may be waiting for it."""
    rank = taking_turns()
    if rank is not None and len(args) <= _ENV and kwargs.get("env") is None:
        kwargs["env"] = dict(os.environ)
    _popen(process, *args, **kwargs)
    if rank is not None:
        rank.seat.turns.watches.outsiders.add(process)


def _system(command: Any) -> int:
    """`os.system`, likewise."""
    if taking_turns() is None or os.name == "nt":
        return _own_system(command)
    code = subprocess.call(command, shell=True)
    return code << 8 if code >= 0 else -code


def _process_started(process: Any) -> None:
    """`multiprocessing.Process.start`, likewise."""
    _start_process(process)
    if (rank := taking_turns()) is not None:
        rank.seat.turns.watches.outsiders.add(process)


_popen, _own_system, _start_process = subprocess.Popen.__init__, os.system, multiprocessing.process.BaseProcess.start
_ENV = [*inspect.signature(_popen).parameters].index("env") - 1


def _future_wait(future: Any) -> Any:
    """`torch.futures.Future.wait`."""
    if (rank := of_several()) is not None:
        rank.wait_until(future.done, _asked(), None, OF_THREADS)
    return _wait_of_future(future)


_wait_of_future: Any = torch.futures.Future.wait

_SELECTORS = (selectors.DefaultSelector, getattr(selectors, "PollSelector", selectors.SelectSelector))

_LOOKS = (os.path, ("exists", "isfile", "isdir")), (Path, ("exists", "is_file", "is_dir"))

BLOCKING: list[Value] = [
    (threading, "Lock", Lock),
    (threading, "_allocate_lock", Lock),
    (threading, "RLock", threading._PyRLock),  # type: ignore[attr-defined]
    (threading.Thread, "join", join),
    (queue, "SimpleQueue", SimpleQueue),
    (time, "sleep", sleep),
    (subprocess.Popen, "__init__", _begun),
    (os, "system", _system),
    (multiprocessing.process.BaseProcess, "start", _process_started),
    *map(_selects, {next(home for home in kind.__mro__ if "select" in vars(home)) for kind in _SELECTORS}),
    (torch.futures.Future, "wait", _future_wait),
    *(_looks(home, name) for home, names in _LOOKS for name in names),
]
if fcntl is not None:
    _lock_file: Any = fcntl.flock
    BLOCKING.append((fcntl, "flock", _flock))


def _asked(seconds: float | None = None) -> str:
    """The program's call that waits here, for at most these seconds, such as "Future.result"."""
    frame, asked = sys._getframe(1), "threading"
    while frame is not None and not is_program(frame.f_code.co_filename):
        asked = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)
        frame = frame.f_back
    asked = {"sleep": "time.sleep", "join": "Thread.join"}.get(asked, asked)
    return asked if seconds is None else asked + AGAIN
