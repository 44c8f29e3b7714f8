"""Taking turns: which of several threads runs, until all have returned, one has failed, or none can go on."""

from __future__ import annotations

import contextvars
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from threading import Lock, Thread
from typing import Any

from tplab.errors import MeshError
from tplab.torch.ranks.floor import Ticket
from tplab.torch.ranks.gate import Gate, unheard
from tplab.torch.ranks.one_core import OneCore
from tplab.torch.ranks.process_state import Own, ProcessState
from tplab.torch.ranks.watches import LONG, Watches, whereabouts
from tplab.units import ranks_text


class Released(BaseException):
    """Raised in a waiting rank to end it after another one has failed. Programs should not catch it."""


class Seat:
    """One thread among those that take turns.

    rank       the number of the rank whose program it runs
    home       the rank's first thread; others are threads that its program has started
    turn       a lock that is held until it is this thread's turn
    own        at `home`: the rank's own part of the process state when its turn comes
    gate       where Ctrl-C may end it
    begins     called when this thread's turn begins, if there is something to do
    is_at_end  whether its program has returned and it only waits for threads that the program has started
    """

    rank: int

    def __init__(self, turns: Turns, home: Any = None, thread: Thread | None = None):
        self.turns, self.home, self.thread = turns, home or self, thread
        self.turn = Lock()
        self.turn.acquire()
        self.gate = Gate()
        self.begins: Callable[[], None] | None = None
        self.is_at_end = False
        self.own: Own | None = None
        self.result: Any = None
        turns.join(self)

    @property
    def is_daemon(self) -> bool:
        """Whether its thread does not keep a process alive."""
        return self.thread is not None and self.thread.daemon


class Turns:
    """Whose turn it is among the ranks of one run.

    `ready` holds the seats that can go on, in the order in which they became ready: first those of all ranks, later
    each one when what it waits for has arrived. A thread that waits or returns passes its turn to the first. If there
    is none, there is a deadlock.

    Threads that a rank's program starts take turns too, and must run `live`. Once all ranks have reached the end of
    their programs, threads that still wait are released.

    Of several runs in several threads, one has the floor, and its ranks take turns; it regularly lets the others have
    it. `around` is the seat of the rank that makes this run inside its program, during its turn.

    state       the part of the process state that is swapped with the turn
    stuck       makes the error for a deadlock
    told        (error, the rank whose program has raised it, or None) -> the error that the run fails with
    """

    def __init__(
        self,
        state: ProcessState,
        stuck: Callable[[], BaseException],
        told: Callable[[BaseException, int | None], BaseException],
        around: Seat | None,
    ):
        self.seats: list[Any] = []  # of the ranks
        self.others: list[Any] = []  # of threads that programs have started
        self.ready: deque[Seat] = deque()
        self.watches = Watches[Any]()
        self.failure: BaseException | None = None
        self._state, self._stuck, self._told, self._around = state, stuck, told, around
        self._kernels: Own | None = None
        self._ticket: Ticket = Ticket() if around is None else around.turns._ticket
        self.core = OneCore([])
        self._now: Seat | None = None  # the seat that has the turn
        self._began, self._silent_for = time.perf_counter(), LONG
        self._running = set[Seat]()
        self.process = os.getpid()  # a forked process has a copy, in which no thread takes turns
        self._is_paused = self.is_over = False
        self._ending = Lock()
        self._called = Lock()  # held until the thread that called `run` has work to do
        self._called.acquire()

    # --- in the thread that calls run ----------------------------------------------------------------------------

    def run(self, programs: Sequence[Callable[[], Any]], owns: Callable[[Own], Sequence[Own]]) -> list[Any]:
        """Run one program per rank until all have ended. Returns what each one returned; raises the first error.

        owns   the kernel's part of the process state -> what each rank begins with
        """
        try:
            try:
                self._enter()
                assert self._kernels is not None
                for seat, own in zip(self.seats, owns(self._kernels), strict=True):
                    seat.own = own
                self._start_threads(programs)
                self._give_turn()
                while self._running:
                    self._called.acquire(timeout=_POLL)
                    self._check_around()
                    self.core.look()
                    self._look()
                    if self._is_paused:
                        self._pause()
                for seat in [*self.seats, *self.others]:
                    assert seat.thread is not None
                    seat.thread.join()
            except BaseException as error:  # Ctrl-C, an error of the enclosing run, or no more threads
                interrupt = _pressed(error)
                self._stop(interrupt)
                if interrupt is not error:
                    raise interrupt from None
                raise
        finally:
            try:
                self._leave()
            except BaseException:  # Ctrl-C during the last lines
                self._leave()
                raise
            self._kernels = None
        if self.failure is not None:
            raise self.failure
        results = [seat.result for seat in self.seats]
        for seat in self.seats:  # frees their contents without waiting for the garbage collector
            seat.result = seat.own = None
        self.others.clear()
        return results

    def _enter(self) -> None:
        if self._around is None:
            self._ticket.enter()
        else:
            self._around.gate.close()
            self._check_around()
            self._around.turns.core.leave()  # our threads inherit its cores
        self._kernels = self._state.take()

    def _leave(self) -> None:
        self.core.leave()
        around = self._around
        has_state = self._ticket.has_floor if around is None else around.turns.failure is None
        if has_state and self._kernels is not None:
            self._state.put(self._kernels)
        if around is None:
            self._ticket.leave()
        else:
            around.gate.open()

    def _start_threads(self, programs: Sequence[Callable[[], Any]]) -> None:
        for seat, program in zip(self.seats, programs, strict=True):
            context = contextvars.copy_context()
            seat.thread = Thread(
                target=context.run, args=(self.live, seat, program), name=f"rank {seat.rank}", daemon=True
            )
            try:
                seat.thread.start()
            except RuntimeError as error:
                if "start new thread" not in str(error):
                    raise
                raise MeshError(
                    f"each of the {len(self.seats)} simulated ranks is a thread, and this machine would not start more "
                    f"than {seat.rank} of them; take a smaller mesh"
                ) from None
        self.core = OneCore([seat.thread.native_id for seat in self.seats if seat.thread and seat.thread.native_id])

    def _check_around(self) -> None:
        """End this run if the enclosing run has failed."""
        if self._around is not None and self._around.turns.failure is not None:
            raise Released

    def _pause(self) -> None:
        """Let the runs in other threads take their turns."""
        assert self._kernels is not None
        self._state.put(self._kernels)
        if self._around is None:
            self._kernels = None
            self._ticket.pause()
        else:
            turns = self._around.turns
            turns.ready.appendleft(self._around)
            turns.pass_on(self._around)
        self._kernels = self._state.take()
        self._is_paused = False
        self._give_turn()

    def _look(self) -> None:
        """Report where a long run is: a rank may be slow, or wait for one that is waiting for its turn."""
        seconds, seat = time.perf_counter() - self._began, self._now
        if seconds < self._silent_for or seat is None or seat.thread is None or self._around is not None:
            return
        self._silent_for = 2 * seconds
        if (frame := sys._current_frames().get(seat.thread.ident or 0)) is not None:
            turn = self.core.seconds() if len(self.seats) > 1 else 0.0
            print(whereabouts(seconds, seat.rank, frame, turn), file=sys.stderr)

    def _stop(self, interrupt: BaseException) -> None:
        """End every rank at the next line of Python that it reaches. Ranks inside a call that cannot be interrupted are
        left behind, and end after it."""
        self.fail(interrupt)
        deadline = time.monotonic() + _PATIENCE
        with unheard(Released):
            while self._running and time.monotonic() < deadline:
                try:
                    for seat in [*self.seats, *self.others]:
                        if seat.thread is None or seat.thread.ident is None:  # it has not begun, and will not
                            self._running.discard(seat)
                        if seat.turn.locked():
                            seat.turn.release()  # if it waits for its turn, it ends now
                        seat.gate.raise_through(Released)
                    self._called.acquire(timeout=_POLL)
                except BaseException:  # Ctrl-C or Released again
                    continue
        behind = sorted({seat.rank for seat in self._running})
        if behind:
            interrupt.add_note(
                f"left behind: {ranks_text(behind)}, inside a call that cannot be interrupted and ends by itself"
            )

    # --- in a rank's thread --------------------------------------------------------------------------------------

    def join(self, seat: Seat) -> None:
        """Let a new thread take turns."""
        self.others = [one for one in self.others if one in self._running or one.thread.is_alive()]
        (self.seats if seat.home is seat else self.others).append(seat)
        self._running.add(seat)
        self.ready.append(seat)

    def is_running(self, seat: Seat) -> bool:
        return seat in self._running

    def others_of(self, home: Seat) -> list[Seat]:
        """The threads that this rank has started and that are still running."""
        return [seat for seat in self.others if seat.home is home and seat in self._running]

    def leave(self, seat: Seat) -> None:
        """Remove the seat of a thread that could not be started."""
        self.others.remove(seat)
        self._running.discard(seat)
        self.ready.remove(seat)

    def live(self, seat: Seat, program: Callable[[], Any]) -> None:
        """Run a rank's thread, from its first turn to its last."""
        try:
            try:
                seat.turn.acquire()
                self.core.turn_begins()
                if not self.is_let_go(seat):
                    seat.gate.open()
                    seat.result = program()
            except BaseException as error:
                if not isinstance(error, Released):
                    self.fail(error, seat.rank)
            _close(seat.gate)
        except Released:  # `_stop` may raise it at any line until the gate is closed, including these
            _close(seat.gate)
        self._end_turn(seat)

    def pass_on(self, seat: Seat) -> None:
        """Pass the turn on until this waiting thread is ready again. This runs at every wait, so rare cases are first
        tested without a call."""
        home = seat.home
        if self.failure is not None or (seat is not home and self.is_let_go(seat)):
            raise Released
        if (self.watches.by_seat or not self.ready) and not self._can_go_on(seat):
            self.fail(self._stuck())
            raise Released
        self.core.turn_ends()
        home.own = self._state.take()
        self._give_turn()
        seat.turn.acquire()
        self.core.turn_begins()
        if self.failure is not None or (seat is not home and self.is_let_go(seat)):
            raise Released
        if seat.begins is not None:
            seat.begins()

    def _can_go_on(self, seat: Seat) -> bool:
        """Whether any seat is ready now that the thread of `seat` waits or ends."""
        if self.watches.by_seat:
            self.ready.extend(self.watches.met(seat))
        while not self.ready and self.failure is None and not self.is_over:
            is_at_end = all(rank.is_at_end or rank not in self._running for rank in self.seats)
            if not self.watches.may_be_met(is_at_end) and not self.watches.give_up():
                self.is_over = is_at_end
                if not is_at_end:
                    return False
            self.ready.extend(self.watches.met(None))
        return bool(self.ready)

    def is_let_go(self, seat: Seat) -> bool:
        """Whether this thread must end where it is: the run has failed, or its rank has ended."""
        is_left = seat is not seat.home and (self.is_over or seat.home not in self._running)
        return is_left or self.failure is not None

    def _give_turn(self) -> None:
        """Give the turn to the first ready seat, or the floor to other runs if they are waiting."""
        if self._ticket.is_wanted:
            self._is_paused = True
            self._called.release()
            return
        seat = self._now = self.ready.popleft()
        assert seat.home.own is not None
        self._state.put(seat.home.own)
        seat.turn.release()

    def _end_turn(self, seat: Seat) -> None:
        """End the turn of a thread that has returned or failed: the next one goes on, or the run is over."""
        with self._ending:
            self._running.discard(seat)
            is_letting_go = False
            self.ready.extend(self.watches.let_go(seat))
            if self.failure is None and self._running:
                self.core.turn_ends()
                if seat is not seat.home:
                    seat.home.own = self._state.take()
                if self._can_go_on(seat):
                    self._give_turn()
                elif self.is_over and self._running.isdisjoint(self.seats):
                    is_letting_go = True
                else:
                    self.fail(self._stuck())
            if self.failure is not None or is_letting_go:  # waiting threads are released one after another
                for other in [*self.seats, *self.others]:
                    if other in self._running and other.turn.locked():
                        other.turn.release()
                        break
            if not self._running and self._called.locked():
                self._called.release()

    def fail(self, error: BaseException, rank: int | None = None) -> None:
        """Let the run fail with `error`, which the program of `rank` has raised, or ours. Only the first error counts,
        because others follow from it."""
        if self.failure is None:
            self.failure = self._told(error, rank)


_POLL = 0.1  # s; an exception set by another thread reaches a thread only between two waits
_PATIENCE = 2.0  # s; how long Ctrl-C waits for a rank


def _close(gate: Gate) -> None:
    """Close a gate, even if an exception raised before arrives meanwhile. At most two do: `_stop` is slow."""
    try:
        gate.close()
    except Released:
        gate.close()


def _pressed(error: BaseException) -> BaseException:
    """The Ctrl-C behind an error: while `threading` holds a lock of its own, Ctrl-C can surface as the error of
    releasing a lock that has not been acquired again yet."""
    pressed = error.__context__
    is_of_lock = isinstance(error, RuntimeError) and "lock" in str(error)
    return pressed if is_of_lock and isinstance(pressed, KeyboardInterrupt) else error
