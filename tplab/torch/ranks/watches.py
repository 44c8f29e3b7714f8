"""Watches: what threads that take turns wait for besides collectives, and how long a wait may last."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from time import sleep  # a program's own may give its turn away
from types import FrameType
from typing import Any, Generic, NamedTuple, Protocol, TypeVar
from weakref import WeakSet

from tplab.torch.ranks.program import is_program, outwards

OF_RANKS, OF_THREADS, OF_FILES, OF_OTHERS = 0.0, 0.5, 60.0, math.inf
"""What can end a wait, as the seconds for which it may still end when no thread that takes turns can go on: ranks
cannot; a thread outside the run might; another program may hold a file lock; pipes and processes take their time."""


class Watch(NamedTuple):
    """is_there   whether the thread's wait is over
    until      when the thread goes on in any case
    patience   OF_RANKS, OF_THREADS, OF_FILES or OF_OTHERS
    gives_up   whether it goes on at `until` only if no rank can, or as soon as nothing can end its wait"""

    is_there: Callable[[], bool]
    until: float
    patience: float
    gives_up: bool


class Nap(NamedTuple):
    """A thread that waits for some time, goes on without what it waits for, and waits again.

    at        the position of its program, and its values: if they repeat, the program does nothing but look
    num       how many such waits came before this one since the run made progress
    num_same  how many of those had the same `at`, the first of them at `since`"""

    at: Any
    num: int
    num_same: int
    since: float


class Waiting(Protocol):
    """What watches need of a seat."""

    rank: int
    home: Any

    @property
    def is_daemon(self) -> bool: ...


Seat = TypeVar("Seat", bound=Waiting)


class Watches(Generic[Seat]):
    """What each seat waits for. A seat whose wait ends is removed; `causes` has the seat whose turn it was then.

    by_seat     what they wait for
    naps        timed waits since the run last made progress
    outsiders   threads and processes started by ranks that take no turns: while they live, they may end a wait
    """

    def __init__(self) -> None:
        self.causes: dict[Seat, Seat | None] = {}
        self.outsiders: WeakSet[Any] = WeakSet()
        self.by_seat: dict[Seat, Watch] = {}
        self.naps: dict[Seat, Nap] = {}
        self._stuck_since = math.inf
        self._given_up: set[Seat] = set()

    def add(
        self,
        seat: Seat,
        is_there: Callable[[], bool],
        seconds: float | None,
        patience: float,
        at: Any = None,
        gives_up: bool = False,
    ) -> None:
        """Watch for `seat`, for at most these seconds. `at` is the position of its program, as in `Nap`."""
        now, until = time.perf_counter(), math.inf
        if seconds is not None and gives_up:
            until = now + seconds
        elif seconds is not None:
            until, nap = now + seconds, self.naps.get(seat)
            if nap is None:
                self.naps[seat] = Nap(at, 0, 0, now)
            elif nap.at == at:
                self.naps[seat] = Nap(at, nap.num + 1, nap.num_same + 1, nap.since)
            else:
                self.naps[seat] = Nap(at, nap.num + 1, 0, now)
        self.by_seat[seat] = Watch(is_there, until, patience, gives_up)

    def met(self, by: Seat | None) -> list[Seat]:
        """Remove and return the seats that can go on; `by` has had the turn until now."""
        found, now = [], time.perf_counter()
        for seat, watch in list(self.by_seat.items()):
            is_there = watch.is_there()
            if is_there or seat in self._given_up or (now >= watch.until and not watch.gives_up):
                del self.by_seat[seat]
                self._given_up.discard(seat)
                self.causes[seat] = by
                found.append(seat)
                if is_there:
                    self.goes_on()
        return found

    def let_go(self, home: Seat) -> list[Seat]:
        """Remove and return the seats of a rank's threads, which need not wait any longer."""
        found = [seat for seat in self.by_seat if seat.home is home]
        for seat in found:
            del self.by_seat[seat]
        return found

    def goes_on(self) -> None:
        """Note progress that may help others."""
        self._stuck_since = math.inf
        self.naps.clear()

    def may_be_met(self, is_at_end: bool) -> bool:
        """Whether a wait may still end although all threads that take turns are waiting; sleeps for a moment. At the
        end of the programs, only time and helpers other than threads count, and waits of daemons do not."""
        for outsider in [*self.outsiders]:
            if not _is_alive(outsider):
                self.outsiders.discard(outsider)
                self.goes_on()
        now = time.perf_counter()
        self._stuck_since = min(self._stuck_since, now)
        watches = {seat: watch for seat, watch in self.by_seat.items() if not (is_at_end and seat.is_daemon)}
        if any(watch.gives_up and now >= watch.until for watch in watches.values()):
            return self.give_up()
        naps = [self.naps.get(seat) for seat, watch in watches.items() if watch.until < math.inf and not watch.gives_up]
        patience = max((watch.patience for watch in watches.values()), default=OF_RANKS)
        if naps or patience == OF_THREADS:
            are_others = bool(self.outsiders)
            if patience == OF_THREADS:
                patience = OF_RANKS if is_at_end else _OUTSIDE if are_others else OF_THREADS
            if any(nap is None or nap.num < _MOST_LATE for nap in naps):
                patience = OF_OTHERS
            elif any(nap is not None and nap.num_same < _MOST_LATE for nap in naps):
                patience = max(patience, _COUNTING, _OUTSIDE * are_others)
            elif naps:
                latest = max(nap.since for nap in naps if nap is not None) - self._stuck_since
                patience = max(patience, latest + _LOOKING, _OUTSIDE * are_others)
        if now - self._stuck_since >= patience:
            return False
        sleep(_MOMENT)
        return True

    def give_up(self) -> bool:
        """Let the first seat that `gives_up` go on. Returns whether there is one."""
        found = [seat for seat, watch in self.by_seat.items() if watch.gives_up]
        if found:
            self._given_up.add(min(found, key=lambda seat: seat.rank))
            self.goes_on()
        return bool(found)


def at() -> tuple[Any, ...]:
    """The running thread's position and values: a program that only looks whether something is there comes back to the
    same position with the same values, except for the time."""
    found = []
    for frame in outwards(sys._getframe(1)):
        values = frame.f_locals.values() if is_program(frame.f_code.co_filename) else ()
        found.append((frame.f_code, frame.f_lasti, *map(_gist, list(values))))
    return tuple(found)


LONG = 30.0
"""Seconds after which a run reports where it is; it reports again after twice as many, and so on."""


def whereabouts(seconds: float, rank: int, frame: FrameType | None, turn: float) -> str:
    """The report of a run that has taken so many seconds: the place of the rank with the turn, for `turn` seconds."""
    frame = next((one for one in outwards(frame) if is_program(one.f_code.co_filename)), None)
    where = f"at {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}" if frame is not None else "running"
    said = f"tplab: the run has taken {seconds:.0f} s so far; now rank {rank} is {where}"
    if turn < LONG:
        return said
    return (
        f"{said}, and has had the turn for {turn:.0f} s. The others go on when it communicates, sleeps or ends; so if "
        "it waits for one of them there, let it poll in a loop with time.sleep"
    )


def _gist(value: Any) -> Any:
    """As much of a value as is quick to compare."""
    kind = type(value)
    if kind in (int, bool, str, bytes):
        return value
    return len(value) if kind in (list, dict, set, tuple) else kind


def _is_alive(outsider: Any) -> bool:
    return outsider.is_alive() if hasattr(outsider, "is_alive") else outsider.poll() is None


_MOMENT = 5e-4  # s
_OUTSIDE = 300.0
"""Seconds in which a library's thread or a process may help. Some never end, such as the thread of a progress bar."""
_MOST_LATE, _LOOKING, _COUNTING = 3, 10.0, 120.0
"""A thread that sleeps and looks again must not hide a deadlock forever. It may do so this many times, then for this
many seconds if it only looks, or if something in its program changes each time, such as a counter."""
