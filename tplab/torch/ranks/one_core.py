"""One core for all ranks while turns are short: the next rank finds what the last one left in the core's cache."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock

SHORT_SECONDS = 1e-3
"""The longest turn that counts as short. A turn that ends on a cold core costs up to 0.3 ms more."""
MEETING_SECONDS = 3e-5
"""How long a meeting may take for each of its ranks: a turn looks longer by so much from outside."""


class OneCore:
    """Keeps the threads of ranks that take turns on one core of this machine, as long as their turns are short.

    Only one rank runs at a time, so other cores are useful only if torch computes on several of them. A turn that moves
    to another core has to wake that core up, and finds nothing in its cache: this takes 50 to 300 us, while a turn that
    stays takes 5 to 20. So when turns have been short for two rounds, all ranks move to the core where the last of them
    was. After the first long turn, or when one has been running for long, they may run everywhere again. So may the
    threads that were started in the meantime and have inherited the one core, such as those that torch computes with.
    (A process that a rank starts at that time also inherits it, and keeps it.)

    It also asks for SCHED_BATCH: a rank that gets its turn should not preempt the rank that has just passed it on and
    is about to wait, only to wait for that rank.

    This works on Linux; elsewhere, or if a process has one core or may not choose, nothing is done.
    """

    def __init__(self, threads: Sequence[int]):
        """`threads` are the native ids of the ranks' threads, which have the cores of the thread that started them."""
        self._threads = threads
        self._cores: set[int] = set()  # to choose from
        self._core: set[int] = set()  # the one that all of them run on, if any
        self._moved: list[int] = []  # the threads that were moved there
        self._older: set[int] = set()  # the threads that existed then
        self._moving = Lock()
        self._num_short = 0
        self._since = 0.0
        if hasattr(os, "sched_setaffinity"):
            with suppress(OSError):
                for thread in threads:
                    if os.sched_getscheduler(thread) == os.SCHED_OTHER:
                        os.sched_setscheduler(thread, os.SCHED_BATCH | os.SCHED_RESET_ON_FORK, os.sched_param(0))
            with suppress(OSError):
                self._cores = os.sched_getaffinity(0)

    def turn_begins(self) -> None:
        """Called by each rank as its turn begins."""
        self._since = time.perf_counter()

    def seconds(self) -> float:
        """How long the turn has lasted, or the time between two turns."""
        return time.perf_counter() - self._since

    def has_met(self, since: float, num_ranks: int) -> None:
        """Count only one rank's share of the time since `since`, which a meeting of this many ranks has taken.
        Otherwise no turn in which many ranks meet would be short."""
        seconds = time.perf_counter() - since
        self._since += seconds - seconds / num_ranks

    def turn_ends(self) -> None:
        if time.perf_counter() - self._since > SHORT_SECONDS:
            self.leave()
        else:
            self._num_short += 1
            if self._num_short == 2 * len(self._threads) and len(self._cores) > 1:
                self._gather()

    def look(self) -> None:
        """Check whether a turn has been running for long. Called from outside now and then."""
        seconds = time.perf_counter() - self._since
        if self._core and seconds > SHORT_SECONDS + MEETING_SECONDS * len(self._threads):
            self.leave()

    def leave(self) -> None:
        """Let the threads run everywhere again."""
        with self._moving, suppress(OSError):
            self._num_short = 0
            core, self._core = self._core, set()
            if core:
                _move([*self._moved, *_threads_of_process() - self._older], core, self._cores)

    def _gather(self) -> None:
        with self._moving, suppress(OSError):
            core = {_core_of_this_thread()}
            self._older = _threads_of_process()
            self._moved = _move(self._threads, self._cores, core)
            self._core = core


def _move(threads: Iterable[int], source: set[int], target: set[int]) -> list[int]:
    """Give the cores `target` to the threads that still have the cores `source`. Returns these threads."""
    moved = []
    for thread in threads:
        with suppress(ProcessLookupError):  # it has ended
            if os.sched_getaffinity(thread) == source:
                os.sched_setaffinity(thread, target)
                moved.append(thread)
    return moved


def _threads_of_process() -> set[int]:
    return set(map(int, os.listdir("/proc/self/task")))


def _core_of_this_thread() -> int:
    fields_after_name = Path("/proc/thread-self/stat").read_text().rpartition(")")[2].split()
    return int(fields_after_name[36])  # proc(5): field 39; the name is the second
