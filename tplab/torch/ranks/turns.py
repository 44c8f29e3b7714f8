"""Taking turns: which simulated rank runs, until all have returned, one has failed, or none can go on."""

from __future__ import annotations

import contextvars
import ctypes
import time
from collections import deque
from collections.abc import Callable, Sequence
from threading import Lock, Thread
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tplab.cost.cluster import Cluster
from tplab.cost.links import Links
from tplab.errors import CollectiveMismatchError, DeadlockError, RankError, TplabError
from tplab.mesh import Mesh
from tplab.torch.ranks import rank as rank_context
from tplab.torch.ranks.generators import generators
from tplab.torch.ranks.inherited import inherited_state
from tplab.torch.ranks.meeting import Group, Meeting, Site
from tplab.torch.ranks.one_core import OneCore
from tplab.torch.ranks.rank import Lines
from tplab.torch.ranks.simulated import SimulatedRank
from tplab.torch.ranks.values import VALUES_UP_TO, values_of
from tplab.trace.recorder import Recorder

_OF_A_RUN = (RankError, DeadlockError, CollectiveMismatchError)


class _Released(BaseException):
    """Raised in a rank that waits, so that it ends: another one has failed. Programs should let it pass."""


class Turns:
    """The simulated ranks of one run, and whose turn it is.

    `ready` holds the ranks that can go on, in the order in which they came to: first all of them, then each one when
    what it waits for has arrived. The rank that has to wait, or returns, gives its turn to the first of them. If there
    is none, nobody can ever move again: a deadlock.
    """

    def __init__(self, mesh: Mesh, *, title: str, cluster: Cluster | None, clock: str, seed: int, record: int,
                 device: torch.device | None):  # fmt: skip
        self.mesh, self.cluster, self.clock = mesh, cluster, clock
        self.num_left_to_keep = record
        self.recorder = Recorder(mesh, title, "torch")
        self.lines = Lines()
        self.links = Links(cluster)
        self.hop_links = Links(None)
        self.groups: dict[tuple[int, ...], Group] = {}
        self.device = device
        self._generators = generators(device)
        self.ranks = [SimulatedRank(rank, self) for rank in mesh.ranks]
        for rank in self.ranks:
            rank.seed = seed
            rank.random_state = [generator.state(seed, rank.rank) for generator in self._generators]
        self.ready: deque[int] = deque(mesh.ranks)
        self.failure: BaseException | None = None
        self.core = OneCore([])
        self._ending = Lock()
        self._done = Lock()  # held until every rank has ended

    # --- running -------------------------------------------------------------------------------------------------

    def run(self, programs: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run one program a rank, to the end of all. Returns what each returned; raises what went wrong first."""
        state = inherited_state(self.device)
        kernels_own = [generator.get() for generator in self._generators]
        around = rank_context.current_rank_or_none()
        if isinstance(around, SimulatedRank):
            around.turns.core.leave()  # our threads inherit where it may run
        self._done.acquire()
        try:
            for rank, program in zip(self.ranks, programs, strict=True):
                context = contextvars.copy_context()
                rank.thread = Thread(
                    target=context.run, args=(self._life, rank, program, state), name=f"rank {rank.rank}", daemon=True
                )
                rank.thread.start()
            self.core = OneCore([rank.thread.native_id for rank in self.ranks if rank.thread and rank.thread.native_id])
            self._give_turn(self.ready.popleft())
            while not self._is_over():
                self._done.acquire(timeout=_POLL)
                self.core.look()
            for rank in self.ranks:
                assert rank.thread is not None
                rank.thread.join()
        except BaseException as error:  # Ctrl-C; or that of the run around this one; or no more threads
            interrupt = _pressed(error)
            self._stop(interrupt)
            if interrupt is not error:
                raise interrupt from None
            raise
        finally:
            self.core.leave()
            for generator, kept in zip(self._generators, kernels_own, strict=True):
                generator.set(kept)
        if self.failure is not None:
            raise self.failure
        results = [rank.result for rank in self.ranks]
        self.ranks = []  # they hold us: what they held should not wait for the garbage collector
        return results

    def _is_over(self) -> bool:
        return all(rank.finished for rank in self.ranks)

    def _life(self, rank: SimulatedRank, program: Callable[[], Any], state: Callable[[], Any]) -> None:
        """What a rank's thread does, from its first turn to its last."""
        try:
            rank.turn.acquire()
            self.core.turn_begins()
            if self.failure is None:
                rank_context.enter(rank)
                with state():
                    rank.start_watching()
                    try:
                        rank.is_in_program = True
                        rank.result = program()
                    finally:
                        rank.is_in_program = False
                        rank.stop_watching()
        except _Released:
            pass
        except BaseException as error:
            self.fail(self._named(rank, error))
        while not rank.finished:  # `_stop` may release this thread at any line, also at these
            try:
                self._end_turn(rank)
            except _Released:
                continue

    def pass_on(self, rank: SimulatedRank) -> None:
        """Give the turn away until this rank, which waits, is ready again."""
        if not self.ready:
            self.fail(self._deadlock())
            raise _Released
        self.core.turn_ends()
        rank.random_state = [generator.get() for generator in self._generators]
        self._give_turn(self.ready.popleft())
        rank.turn.acquire()
        self.core.turn_begins()
        if self.failure is not None:
            raise _Released

    def _give_turn(self, number: int) -> None:
        rank = self.ranks[number]
        for generator, kept in zip(self._generators, rank.random_state, strict=True):
            generator.set(kept)
        rank.turn.release()

    def _end_turn(self, rank: SimulatedRank) -> None:
        """The running rank has returned or failed: whoever is next goes on, or all is done."""
        with self._ending:
            remaining = [other for other in self.ranks if other is not rank and not other.finished]
            if self.failure is None and remaining:
                self.core.turn_ends()
                if self.ready:
                    self._give_turn(self.ready.popleft())
                else:
                    self.fail(self._deadlock())
            elif self.failure is None:
                self._check_that_all_met()
            if self.failure is not None:  # one after another, each waiting rank is let go and ends
                asleep = [other for other in remaining if other.turn.locked()]
                if asleep:
                    asleep[0].turn.release()
            rank.finished = True
            if not remaining and self._done.locked():
                self._done.release()

    def fail(self, error: BaseException) -> None:
        """The run has failed with `error`; only the first one counts, as others follow from it."""
        if self.failure is None:
            self.failure = error

    def release(self) -> None:
        """End the program of the calling rank, because the run has failed."""
        raise _Released

    def _stop(self, interrupt: BaseException) -> None:
        """End all ranks, at the next line of Python that each comes to. Those that are inside a call which cannot be
        interrupted are left behind, and end after that."""
        self.fail(interrupt)
        deadline = time.monotonic() + _PATIENCE
        while not self._is_over() and time.monotonic() < deadline:
            try:
                for rank in self.ranks:
                    rank.finished |= rank.thread is None or rank.thread.ident is None  # has not begun, and will not
                    if rank.turn.locked():
                        rank.turn.release()  # if it waits for its turn, it ends now
                    if rank.is_in_program:
                        _raise_in(rank.thread, _Released)
                self._done.acquire(timeout=_POLL)
            except BaseException:  # pressed again, or released again
                continue
        behind = [str(rank.rank) for rank in self.ranks if not rank.finished]
        if behind:
            whose = f"rank{'s' * (len(behind) > 1)} {', '.join(behind)}"
            interrupt.add_note(f"left behind: {whose}, inside a call that cannot be interrupted and ends by itself")

    # --- taking down ---------------------------------------------------------------------------------------------

    def values(self, x: Tensor) -> np.ndarray | None:
        """The values of `x`, if it is small and not too many were kept already."""
        if x.numel() > VALUES_UP_TO or self.num_left_to_keep <= 0:
            return None
        self.num_left_to_keep -= 1
        return values_of(x)

    # --- what went wrong -----------------------------------------------------------------------------------------

    def _named(self, rank: SimulatedRank, error: BaseException) -> BaseException:
        """What a rank raised, saying which rank it was. tplab's own errors stay what they are; but not those of another
        run, which the rank has made inside its program."""
        if isinstance(error, CollectiveMismatchError) and error is self.failure:
            return error
        line = self.lines.of(error)
        if isinstance(error, TplabError) and not isinstance(error, _OF_A_RUN):
            error.add_note(f"on rank {rank.rank} {self.mesh.coordinates(rank.rank)}" + (f" at {line}" if line else ""))
            return error
        at = f" at {line}" if line else ""
        named = RankError(f"rank {rank.rank} raised {type(error).__name__}{at}: {error}", rank.rank)
        named.__cause__ = error
        return named

    def mismatch(self, meeting: Meeting, rank: int, site: Site) -> CollectiveMismatchError:
        """The error for a rank whose call is not the collective the others of its group are in. The run ends with it,
        also where the program goes on."""
        sides = sorted([meeting.first, (rank, site)], key=lambda side: side[0])
        lines = [f"  rank {rank}: {side}" for rank, side in sides]
        error = CollectiveMismatchError(
            f"collective number {meeting.number + 1} over axis {site.call.place.label!r} is not the same on all of "
            f"ranks {', '.join(map(str, site.group.ranks))}:\n" + "\n".join(lines) + f"\n{_THE_SAME}, "
            "with the same shapes and dtypes"
        )
        self.fail(error)
        return error

    def _check_that_all_met(self) -> None:
        """All have returned: is there a collective to which some of its group have not come?"""
        for group in self.groups.values():
            for meeting in group.open.values():
                rank, site = meeting.first
                what = f"collective number {meeting.number + 1} over axis {site.call.place.label!r}, {site.call}"
                self.fail(
                    CollectiveMismatchError(
                        f"{what}, which rank {rank} called at {site.where}:\n"
                        f"  {meeting.absent} returned without calling it\n{_THE_SAME}"
                    )
                )

    def _deadlock(self) -> DeadlockError:
        lines = []
        for rank in self.ranks:
            if rank.waits_in is None:
                lines.append(f"  rank {rank.rank} has returned")
                continue
            site, meeting = rank.waits_in
            missing = meeting.absent if site.source is None else f"a message from rank {site.source}"
            lines.append(f"  rank {rank.rank} waits in {site.call} at {site.where} for {missing}")
        return DeadlockError("no rank can go on:\n" + "\n".join(lines) + f"\n{_THE_SAME}, and none may return before")


_THE_SAME = "every rank of a group must call the same collectives in the same order"
_POLL = 0.1  # s; an exception that another thread has set reaches a thread only between two waits
_PATIENCE = 2.0  # s; how long Ctrl-C waits for a rank


def _pressed(error: BaseException) -> BaseException:
    """The Ctrl-C that an error stands for: pressed while `threading` holds a lock of its own, it can come out as the
    error of giving back a lock that was not taken again yet."""
    pressed = error.__context__
    is_of_lock = isinstance(error, RuntimeError) and "lock" in str(error)
    return pressed if is_of_lock and isinstance(pressed, KeyboardInterrupt) else error


def _raise_in(thread: Thread | None, kind: type[BaseException]) -> None:
    """Raise an exception in another thread, at the next line of Python that it comes to."""
    if thread is not None and thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(kind))
