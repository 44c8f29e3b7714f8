"""Watches: what threads that take turns wait for besides collectives, and how long it is worth waiting."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from threading import Thread
from time import sleep  # a program's own may give its turn away
from typing import Any, Generic, NamedTuple, Protocol, TypeVar
from weakref import WeakSet

OF_RANKS, OF_THREADS, OF_OTHERS = 0.0, 0.5, math.inf
"""Who can bring about what a thread waits for, as seconds for which that may still happen where no thread that takes
turns can go on: ranks cannot; a thread from outside of the run might; files and other processes take their time."""


class Watch(NamedTuple):
    """is_there   whether what is waited for has arrived
    until      when the thread goes on without it
    patience   OF_RANKS, OF_THREADS or OF_OTHERS"""

    is_there: Callable[[], bool]
    until: float
    patience: float


class Waiting(Protocol):
    """What watches need to know about a seat."""

    @property
    def home(self) -> Any: ...

    @property
    def is_daemon(self) -> bool: ...


Seat = TypeVar("Seat", bound=Waiting)


class Watches(Generic[Seat]):
    """What each seat waits for. A seat that finds it is removed; `causes` says during which seat's turn it arrived.

    by_seat     what they wait for
    outsiders   threads that ranks have started and that take no turns: they may help while they live
    """

    def __init__(self) -> None:
        self.causes: dict[Seat, Seat | None] = {}
        self.outsiders: WeakSet[Thread] = WeakSet()
        self.by_seat: dict[Seat, Watch] = {}
        self._stuck_since = math.inf
        self._num_late = 0  # waits that ended without what they waited for, since something else has happened

    def add(self, seat: Seat, is_there: Callable[[], bool], seconds: float | None, patience: float) -> None:
        until = math.inf if seconds is None else time.perf_counter() + seconds
        self.by_seat[seat] = Watch(is_there, until, patience)

    def met(self, by: Seat | None) -> list[Seat]:
        """The seats that can go on; `by` has had the turn until now."""
        found, now = [], time.perf_counter()
        for seat, watch in list(self.by_seat.items()):
            is_there = watch.is_there()
            if is_there or now >= watch.until:
                del self.by_seat[seat]
                self.causes[seat] = by
                found.append(seat)
                if is_there:
                    self.goes_on()
                else:
                    self._num_late += 1
        return found

    def let_go(self, home: Seat) -> list[Seat]:
        """The seats of the threads of a rank, which need not wait any longer."""
        found = [seat for seat in self.by_seat if seat.home is home]
        for seat in found:
            del self.by_seat[seat]
        return found

    def goes_on(self) -> None:
        """Something has happened that may help others."""
        self._stuck_since, self._num_late = math.inf, 0

    def may_be_met(self, is_at_end: bool) -> bool:
        """Whether one of them may still be met, though all that take turns are waiting. A moment passes. At the end of
        the programs, only time and helpers other than threads count, and what a daemon waits for does not."""
        now = time.perf_counter()
        self._stuck_since = min(self._stuck_since, now)
        watches = [watch for seat, watch in self.by_seat.items() if not (is_at_end and seat.is_daemon)]
        patience = max((watch.patience for watch in watches), default=OF_RANKS)
        if patience == OF_THREADS:
            are_others = any(thread.is_alive() for thread in self.outsiders)
            patience = OF_RANKS if is_at_end else _OUTSIDE if are_others else OF_THREADS
        if any(watch.until < math.inf for watch in watches):
            patience = max(patience, _SLEEPING if self._num_late >= _MOST_LATE else OF_OTHERS)
        if now - self._stuck_since >= patience:
            return False
        sleep(_MOMENT)
        return True


_MOMENT = 5e-4  # s
_OUTSIDE = 300.0
"""Seconds in which a library's thread may help. Some of these threads never end, such as a progress bar's."""
_MOST_LATE, _SLEEPING = 3, 30.0
"""A thread that sleeps and looks again, for ever, does not hide a deadlock: so many times, and for so many seconds."""
