"""How a simulated rank waits for other ranks, and the threads that its program starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Thread, current_thread
from types import FrameType
from typing import Self

from tplab.cost.lanes import AFTER, MARK
from tplab.errors import OutsideRunError
from tplab.torch.private import phase
from tplab.torch.ranks.clocked import ClockedRank
from tplab.torch.ranks.program import is_program
from tplab.torch.ranks.rank import Call, current_rank_or_none
from tplab.torch.ranks.texts import AGAIN
from tplab.torch.ranks.watches import OF_RANKS, at

_MOST_LOOKS, _LOOK = 100, 1e-3


class WaitingRank(ClockedRank):
    """A rank that passes its turn on until something has happened."""

    def wait_until(
        self,
        is_there: Callable[[], bool],
        what: str,
        seconds: float | None = None,
        patience: float = OF_RANKS,
        gives_up: bool = False,
    ) -> bool:
        """Let the others go on until `is_there()`, or for this many seconds. Returns whether it is there. If another
        thread of this rank caused it, this thread goes on at that thread's time.

        what       names this wait in an error
        patience   which threads can cause it; `gives_up`: both as in `watches`
        """
        if is_there():
            return True
        turns = self.seat.turns
        self._stops()
        self.waits_in = f"{what} at {self._line(self.world.lines.frame())}" if what else None
        turns.watches.add(self.seat, is_there, seconds, patience, None if seconds is None else at(), gives_up)
        turns.pass_on(self.seat)
        self.waits_in = None
        by = turns.watches.causes.pop(self.seat, None)
        if by is not None and by is not self.seat and by.home is self.seat.home:
            self._follow(by.member.log.add(by.member.lane, MARK, 0.0))
        self._goes_on()
        return seconds is None or is_there()

    def give_way(self) -> None:
        """Let the seats that are ready go first."""
        turns = self.seat.turns
        if turns.ready:
            self._stops()
            turns.ready.append(self.seat)
            turns.pass_on(self.seat)
            self._goes_on()

    def sleep(self, seconds: float, what: str) -> None:
        """Let the others go on for this many seconds. On the measured clock they count as the rank's own time."""
        self.wait_until(lambda: False, what, seconds)
        if self._is_timed:
            self._seen_at -= seconds

    def looked_in_vain(self, for_what: str, what: str) -> None:
        """Note that the program has looked for something that is not there. If it repeats this many times without
        sleeping, the others go on. (Not at once: programs often look once, and then make what is missing.)"""
        before, num = self._looked
        self._looked = for_what, (num + 1 if before == for_what else 1)
        if self._looked[1] > _MOST_LOOKS and not self.waits_as_always:
            self.sleep(_LOOK, what + AGAIN)

    def _follow(self, moment: int) -> None:
        """Go on after a moment of another thread."""
        self.log.add(self.lane, AFTER, moment)

    def look(self) -> None:
        """Wake the ranks that wait for something that this rank has done."""
        turns = self.seat.turns
        turns.ready.extend(turns.watches.met(self.seat))

    @contextmanager
    def at_line(self) -> Iterator[None]:
        """Attribute what this rank calls inside to the program's current line."""
        before = self._called_from
        self._called_from = before or self.world.lines.frame()
        try:
            yield
        finally:
            self._called_from = before

    def first_to_send(self, calls: Sequence[Call]) -> int:
        """Of several receives, the source of one whose message has arrived; waits until there is one."""

        def here() -> Iterator[int]:
            for call in calls:
                group = self.world.groups.get(call.place.group)
                meeting = group.open.get(group.num_calls[1]) if group else None
                if meeting is not None and self.rank in meeting.messages:
                    yield call.place.group[0]

        self.wait_until(lambda: any(True for _ in here()), "receive(x, any source)")
        return next(here())

    def seconds_at(self, moment: int) -> float:
        """The modelled time of a moment. Ranks that are behind catch up first: they may still delay it."""
        world = self.world

        def is_going(lane: int) -> bool:
            other = world.members[lane]
            return other is not self and other.is_going

        self._asks_time = True
        self.wait_until(lambda: world.chronicle.is_known(moment, is_going), "elapsed_time")
        self._asks_time = False
        return world.chronicle.time(moment)

    @property
    def is_going(self) -> bool:
        """Whether it can record anything without another rank: it runs, and waits for none."""
        seat, waits = self.seat, self.waits_in is not None and not self._asks_time
        return seat.turns.is_running(seat) and not waits and not seat.is_at_end

    # --- threads that its program starts ---------------------------------------------------------------------------

    def here(self) -> Self:
        """This rank's object for the running thread. Raises OutsideRunError in a thread that does not belong to it."""
        current = current_rank_or_none()
        if current is self:
            return self
        if isinstance(current, type(self)) and current.home is self.home:
            return current
        whose = "no rank" if current is None else f"rank {current.rank}"
        raise OutsideRunError(
            f"the thread {current_thread().name!r} belongs to {whose} and uses a process group of rank {self.rank}; a "
            "rank's program can use its groups in threads that it starts itself, by threading.Thread or in a "
            "ThreadPoolExecutor that it makes itself"
        )

    def beside(self, thread: Thread) -> Self:
        """This rank's object for `thread`, which its program is about to start."""
        home = self.home
        other = type(self)(self.rank, self.world, self.seat.turns.beside(home.seat, thread), home)
        other.labels = self.labels
        other._follow(self.moment())
        other.began_at = self._line(self.world.lines.frame())
        other._provenance.stop()
        return other

    def await_threads(self) -> None:
        """At the end of the program: wait for the threads that it has started, except daemons."""
        turns, seat = self.seat.turns, self.seat
        seat.is_at_end = True
        self.wait_until(lambda: turns.is_over or all(other.is_daemon for other in turns.others_of(seat)), "")
        seat.is_at_end = False

    def _line(self, frame: FrameType) -> str:
        """The program's line. If none is on the stack: the line that has started this thread, or "a step of ..."."""
        if not is_program(frame.f_code.co_filename) and (self.began_at or phase() == "backward"):
            return self.began_at or "a step of the backward pass"
        return self.world.lines.text(frame)
