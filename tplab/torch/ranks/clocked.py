"""A simulated rank's own work, on its clock and in its trace; how it waits for others, and its program's threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Thread, current_thread
from types import FrameType
from typing import Any, Self

import torch
from torch import Tensor

from tplab.cost.lanes import AFTER, COMPUTE, MARK
from tplab.errors import OutsideRunError
from tplab.torch.private import phase
from tplab.torch.ranks.chronicle import Burst
from tplab.torch.ranks.meeting import Meeting, Site
from tplab.torch.ranks.meter import Cost
from tplab.torch.ranks.program import is_program
from tplab.torch.ranks.provenance import NAMES_UP_TO, Provenance, name_in_program
from tplab.torch.ranks.rank import Call, Rank, current_rank_or_none
from tplab.torch.ranks.texts import AGAIN
from tplab.torch.ranks.turns import Seat, Turns
from tplab.torch.ranks.values import dtype_name
from tplab.torch.ranks.watches import OF_RANKS, at
from tplab.torch.ranks.world import World
from tplab.trace.journal import Doing
from tplab.trace.label import Label

_MOST_LOOKS, _LOOK = 100, 1e-3


class ClockedRank(Rank, Seat):
    """A rank that is a thread of this process and takes turns.

    On its `lane` of the log it records what it computes, sends and waits for, in the order of its program. The times of
    all that on the modelled clock are worked out later (`chronicle`): the program does not depend on them.

    A thread that its program starts has another object for the same rank (`beside`) and its own lane. `home` is the
    object of the first thread. The threads of a rank compute one at a time, also on the clock, and each waits on its
    own.
    """

    home: Self

    def __init__(self, rank: int, world: World, turns: Turns, home: Self | None = None, thread: Thread | None = None):
        Rank.__init__(self, rank, world.mesh)
        Seat.__init__(self, turns, home, thread)
        self.world, self.seed, self.lines = world, world.seed, world.lines
        self.waits_in: tuple[Site, Meeting] | str | None = None
        self.log = world.chronicle.log
        self.lane = self.log.lane(rank)
        world.members.append(self)
        self.raised: list[str] = []  # errors that ended other threads, at `home`
        self.handlers: dict[int, Any] = {}  # of signals, as its program has set them, at `home`
        self.waits_as_always = False  # even if other threads of the rank could have the turn
        self._looked = "", 0  # what the program last looked for in vain, and how many times in a row
        self.began_at = ""  # for another thread: the line that started it
        self._called_from: FrameType | None = None
        self._asks_time = False
        self._is_timed = world.is_timed
        self._seen_at = 0.0
        self._doing: Burst | None = None
        self._prepares = False
        self._sites: dict[tuple[Any, ...], Site] = {}
        is_modelled = world.cluster is not None and not world.is_timed
        self.fuses_attention = world.fuses_attention
        on_cost = self._computed if is_modelled else None
        self.provenance = Provenance(self, self._number_of, world.values.left, on_cost, world.is_timed)
        self._meter = self.provenance.meter

    def start_watching(self) -> None:
        """Called in the rank's thread before its program."""
        if self._meter.on_cost is not None:
            self._meter.open()
        self._seen_at = self._now()

    def stop_watching(self) -> None:
        """Called in the rank's thread after its program."""
        self._stops()
        self._meter.close()

    def _computed(self, done: Cost) -> None:
        """Advance the modelled clock by one tensor operation."""
        if self._prepares:
            return
        cluster = self.world.cluster
        assert cluster is not None
        dtype = dtype_name(done.output.dtype)
        seconds = cluster.compute_seconds(done.flops, done.num_bytes, dtype, done.matmul, done.attention)
        entry = self.log.add(self.lane, COMPUTE, seconds)
        if self._doing is not None:
            self._doing.add(entry, done.flops, done.num_bytes)
            return
        label = self.labels.get(done.output)
        self._note(done.op, entry, done.output, label, bytes=done.num_bytes, flops=done.flops)

    def _note(self, op: str, moment: int, x: Tensor, label: Label | None, **cost: int) -> None:
        """Record what has made x, and what x contains if it holds received data."""
        if label is not None and label.chunk >= 0:
            values = self.provenance.values.of(x)
            contents = {"chunk": label.chunk, "contributors": label.contributors, "values": values}
        else:
            contents = {}
        about: dict[str, Any] = {"shape": tuple(x.shape), "dtype": dtype_name(x.dtype), "phase": phase()}
        self.world.chronicle.recorder.add(self.rank, "compute", op, moment, moment, **about, **cost, **contents)

    def added_to(self, op: str, x: Tensor, label: Label) -> None:
        """Record an addition to what was received as an event of no length, if computing takes no time."""
        if self._meter.on_cost is None and self._doing is None:
            self._note(op, self.moment(), x, label)

    def moment(self) -> int:
        return self.log.add(self.lane, MARK, self._now() - self._seen_at if self._is_timed else 0.0)

    def _number_of(self, x: Tensor, piece: int) -> int:
        """The number of a new chunk of this rank, with the program's name for it if there is one."""
        name = name_in_program(x) if piece < NAMES_UP_TO else ""
        return self.world.chronicle.recorder.chunk(self.rank, piece, name)

    def _now(self) -> float:
        """This machine's time in seconds. A GPU runs behind the program, so its queued work is waited for."""
        if self._is_timed and self.world.device is not None and self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)
        return time.perf_counter()

    def _stops(self) -> None:
        """Advance a measured clock by the time that this rank has been running, since `_goes_on`."""
        if not self._is_timed:
            return
        entry = self.log.add(self.lane, COMPUTE, self._now() - self._seen_at)
        if self._doing is not None:
            self._doing.add(entry)
        else:
            self.world.chronicle.recorder.add(self.rank, "compute", "compute", entry, entry)

    def _goes_on(self) -> None:
        if self._is_timed:
            self._seen_at = self._now()

    @contextmanager
    def doing(self, about: Doing) -> Iterator[None]:
        self._stops()
        self._goes_on()
        self._doing = Burst(self.rank, about, self.log.add(self.lane, MARK, 0.0))
        try:
            yield
            self._stops()
            self._goes_on()
            if self.world.cluster is None and not self._is_timed:
                self._doing.end = self.log.add(self.lane, COMPUTE, about.takes)
            self._doing.held = self.held
            self.world.chronicle.bursts.append(self._doing)
        finally:
            self._doing = None

    @contextmanager
    def preparing(self) -> Iterator[None]:
        before, self._prepares = self._prepares, True
        try:
            yield
        finally:
            self._prepares = before

    def label(self, origin_rank: int, piece: int, contributors: tuple[int, ...]) -> Label:
        return Label(self.world.chronicle.recorder.chunk(origin_rank, piece), contributors)

    # --- waiting for other ranks -----------------------------------------------------------------------------------

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
        turns = self.turns
        self._stops()
        self.waits_in = f"{what} at {self._line(self.world.lines.frame())}" if what else None
        turns.watches.add(self, is_there, seconds, patience, None if seconds is None else at(), gives_up)
        turns.pass_on(self)
        self.waits_in = None
        by = turns.watches.causes.pop(self, None)
        if by is not None and by is not self and by.home is self.home:
            self._follow(by.log.add(by.lane, MARK, 0.0))
        self._goes_on()
        return seconds is None or is_there()

    def give_way(self) -> None:
        """Let the seats that are ready go first."""
        turns = self.turns
        if turns.ready:
            self._stops()
            turns.ready.append(self)
            turns.pass_on(self)
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
        self.turns.ready.extend(self.turns.watches.met(self))

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
        waits = self.waits_in is not None and not self._asks_time
        return self.turns.is_running(self) and not waits and not self.is_at_end

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
        other = type(self)(self.rank, self.world, self.turns, self.home, thread)
        other.labels = self.labels
        other._follow(self.moment())
        other.began_at = self._line(self.world.lines.frame())
        other.provenance.stop()
        return other

    def await_threads(self) -> None:
        """At the end of the program: wait for the threads that it has started, except daemons."""
        turns = self.turns
        self.is_at_end = True
        self.wait_until(lambda: turns.is_over or all(other.is_daemon for other in turns.others_of(self)), "")
        self.is_at_end = False

    def _line(self, frame: FrameType) -> str:
        """The program's line. If none is on the stack: the line that has started this thread, or "a step of ..."."""
        if not is_program(frame.f_code.co_filename) and (self.began_at or phase() == "backward"):
            return self.began_at or "a step of the backward pass"
        return self.world.lines.text(frame)
