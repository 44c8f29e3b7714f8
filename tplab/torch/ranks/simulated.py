"""Simulated ranks: how one of them does its collectives, and how its clock and its trace record them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Thread, current_thread
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from tplab.cost.lanes import AFTER, COMPUTE, ISSUE, MARK, ROUND, SEND, WAIT
from tplab.errors import CollectiveMismatchError, OutsideRunError
from tplab.torch.private import graph_task, no_dispatch, num_modes, phase
from tplab.torch.ranks.burst import Burst
from tplab.torch.ranks.meeting import Group, Meeting, Site, bytes_sent, unfit
from tplab.torch.ranks.memory import begun, count
from tplab.torch.ranks.meter import Cost, Meter
from tplab.torch.ranks.names import NAMES_UP_TO, name_in_program
from tplab.torch.ranks.outcomes import kept, own, results, settled
from tplab.torch.ranks.program import is_program
from tplab.torch.ranks.provenance import Provenance
from tplab.torch.ranks.rank import Call, Pending, Rank, current_rank_or_none
from tplab.torch.ranks.texts import mismatch
from tplab.torch.ranks.turns import Released, Seat
from tplab.torch.ranks.values import dtype_name, values_of
from tplab.torch.ranks.watches import OF_RANKS, at
from tplab.torch.ranks.world import World
from tplab.trace.journal import Doing
from tplab.trace.label import UNKNOWN, Label


class SimulatedRank(Rank):
    """A rank that is a thread of this process and takes turns, with the seat `seat`.

    It notes in the log, on its `lane`, what it computes, sends and waits for, in the order of its program. When all of
    that happens on the modelled clock is worked out later (`chronicle`): the program does not depend on it.

    A thread that its program starts has another object for the same rank (`beside`), with a lane of its own. `home` is
    the object of the first thread. The threads of a rank compute one at a time, also on the clock, and each waits for
    itself.
    """

    def __init__(self, rank: int, world: World, seat: Seat, home: SimulatedRank | None = None):
        super().__init__(rank, world.mesh)
        self.world, self.seat, self.seed, self.lines = world, seat, world.seed, world.lines
        self.home = home or self
        seat.member = self
        self.waits_in: tuple[Site, Meeting] | str | None = None
        self.log = world.chronicle.log
        self.lane = self.log.lane(rank)
        world.members.append(self)
        self.raised: list[str] = []  # what ended other threads, at `home`
        self.waits_as_always = False  # even if other threads of the rank could have the turn
        self.began_at = ""  # for another thread: the line that has started it
        self._called_from: FrameType | None = None
        self._asks_time = False
        self._is_timed = world.is_timed
        self._seen_at = 0.0
        self._doing: Burst | None = None
        self._sites: dict[tuple[Any, ...], Site] = {}
        is_modelled = world.cluster is not None and not world.is_timed
        self._meter = Meter(rank, self._computed if is_modelled else None)
        self._provenance = Provenance(
            rank, self.labels, self._meter, self._number_of, world.num_left_to_keep, world.is_timed
        )

    # --- the program's own work ----------------------------------------------------------------------------------

    def start_watching(self) -> None:
        """Called in the rank's thread before its program."""
        if self._meter.on_cost is not None:
            self._meter.open()
        self._seen_at = self._now()

    def stop_watching(self) -> None:
        """Called in the rank's thread after its program."""
        if self._is_timed:
            self._catch_up()
        if self._meter.is_open:
            self._meter.close()

    def _computed(self, done: Cost) -> None:
        """Advance the modelled clock by one tensor operation."""
        cluster = self.world.cluster
        assert cluster is not None
        dtype = dtype_name(done.output.dtype)
        seconds = cluster.compute_seconds(done.flops, done.num_bytes, dtype, done.matmul)
        entry = self.log.add(self.lane, COMPUTE, seconds)
        if self._doing is not None:
            self._doing.add(entry, done.flops, done.num_bytes)
            return
        self.world.chronicle.recorder.add(
            self.rank,
            "compute",
            done.op,
            entry,
            entry,
            bytes=done.num_bytes,
            flops=done.flops,
            shape=tuple(done.output.shape),
            dtype=dtype,
            phase=phase(),
            **self._contents(done.output, self.labels.get(done.output)),
        )

    def added_to(self, op: str, x: Tensor, label: Label) -> None:
        """Where computing takes no time, an addition to what was received is an event of no length."""
        if self._meter.on_cost is None and self._doing is None:
            now = self.moment()
            self.world.chronicle.recorder.add(
                self.rank,
                "compute",
                op,
                now,
                now,
                shape=tuple(x.shape),
                dtype=dtype_name(x.dtype),
                phase=phase(),
                **self._contents(x, label),
            )

    def moment(self) -> int:
        return self.log.add(self.lane, MARK, self._now() - self._seen_at if self._is_timed else 0.0)

    def seconds_at(self, moment: int) -> float:
        """The modelled time of a moment. Ranks that are behind catch up first: they may still hold up this one."""
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
        """Whether it may note something without another rank, where it does not wait for one."""
        seat, waits = self.seat, self.waits_in is not None and not self._asks_time
        return seat.turns.is_running(seat) and not waits and not seat.is_at_end

    def _contents(self, x: Tensor, label: Label | None) -> dict[str, Any]:
        """What an event says about a computed tensor, if it holds received data."""
        if label is None or label.chunk < 0:
            return {}
        return {"chunk": label.chunk, "contributors": label.contributors, "values": self._provenance.values(x)}

    def _number_of(self, x: Tensor, piece: int) -> int:
        """The number of a new chunk of this rank. The program may have a name for it."""
        name = name_in_program(x) if piece < NAMES_UP_TO else ""
        return self.world.chronicle.recorder.chunk(self.rank, piece, name)

    def _now(self) -> float:
        """The seconds of this machine. A GPU runs behind the program: work that is queued there counts as done now."""
        if self._is_timed and self.world.device is not None and self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)
        return time.perf_counter()

    def _catch_up(self) -> None:
        """Advance the measured clock by what this rank has done since the last time."""
        entry = self.log.add(self.lane, COMPUTE, self._now() - self._seen_at)
        if self._doing is not None:
            self._doing.add(entry)
        else:
            self.world.chronicle.recorder.add(self.rank, "compute", "compute", entry, entry)

    @contextmanager
    def doing(self, about: Doing) -> Iterator[None]:
        if self._is_timed:
            self._catch_up()
            self._seen_at = self._now()
        self._doing = Burst(self.rank, about, self.log.add(self.lane, MARK, 0.0))
        try:
            yield
            if self._is_timed:
                self._catch_up()
                self._seen_at = self._now()
            elif self.world.cluster is None:
                self._doing.end = self.log.add(self.lane, COMPUTE, about.takes)
            self._doing.held = self.held
            self.world.chronicle.bursts.append(self._doing)
        finally:
            self._doing = None

    def label(self, origin_rank: int, piece: int, contributors: tuple[int, ...]) -> Label:
        return Label(self.world.chronicle.recorder.chunk(origin_rank, piece), contributors)

    def starts_with(self, x: Tensor) -> None:
        self._provenance.starts_with(x)

    # --- collectives ---------------------------------------------------------------------------------------------

    def begin(self, call: Call, x: Tensor) -> Pending:
        if num_modes():
            since = begun()
            with no_dispatch():  # what follows is no operation of the program
                return self._begun(call, x, since)
        return self._begun(call, x)

    def do(self, call: Call, x: Tensor, is_lent: bool = False) -> Tensor:
        """Run it to its end. With `is_lent` the result is read-only."""
        if num_modes():
            with no_dispatch():
                result = self._done(call, x, is_lent)
            count(result, call.op)
            return result
        return self._done(call, x, is_lent)

    def finish(self, site: Site, meeting: Meeting, x: Tensor, since: int, is_lent: bool) -> Tensor:
        """Wait for the result of what this rank has begun, and take it. With `is_lent` it is read-only."""
        if self._is_timed:
            self._catch_up()
        with no_dispatch():
            if site.call.peers is None:
                result = self._outcome(site, meeting, is_lent)
            else:
                result = self._received(site, meeting, x)
        if num_modes():
            count(result, site.call.op, since)
        if self._is_timed:
            self._seen_at = self._now()
        return result

    def _begun(self, call: Call, x: Tensor, since: int = -1) -> Pending:
        if self._is_timed:
            self._catch_up()
        site = self._site(call, x)
        meeting = self._arrive(site)
        if call.peers is None:
            self.world.chronicle.overlaps = True
            label = None if site.group.is_all else self._provenance.put_in(x)
            self._put_in(site, kept(x), label, meeting)
        elif site.target is not None:
            self._send(site, x, meeting)
        if self._is_timed:
            self._seen_at = self._now()
        return _Pending(self, site, meeting, x, since)

    def _done(self, call: Call, x: Tensor, is_lent: bool) -> Tensor:
        """Begin it and wait for it. The input of a meeting needs no copy: this thread cannot write to it meanwhile."""
        if self._is_timed:
            self._catch_up()
        site = self._site(call, x)
        meeting = self._arrive(site)
        if call.peers is None:
            label = None if site.group.is_all else self._provenance.put_in(x)
            self._put_in(site, x if x.is_contiguous() else x.contiguous(), label, meeting)
            result = self._outcome(site, meeting, is_lent)
        else:
            sent = self._send(site, x, meeting) if site.target is not None else None
            result = self._received(site, meeting, x)
            if sent is not None and site.source is None and call.op == "ppermute":
                self.log.add(self.lane, ROUND, sent, site.wait_form)
        if self._is_timed:
            self._seen_at = self._now()
        return result

    def _site(self, call: Call, x: Tensor) -> Site:
        world = self.world
        frame = self._called_from or world.lines.frame(above=3)
        code = frame.f_code
        key = (call, x.shape, x.dtype, id(code), frame.f_lasti, graph_task() == -1)
        site = self._sites.get(key)
        if site is None:
            ranks = call.place.group
            group = world.groups.setdefault(ranks, Group(ranks, world.mesh.size))
            where = self._line(frame)
            site = self._sites[key] = Site(call, x, self.rank, group, where, phase(), code, world.chronicle)
        return site

    def _arrive(self, site: Site) -> Meeting:
        """The meeting of the group that this call belongs to, with this rank's arrival noted."""
        if self.seat.turns.failure is not None:
            raise Released
        if (watches := self.seat.turns.watches).naps:
            watches.goes_on()
        group, index = site.group, site.index
        number = group.num_calls[index]
        group.num_calls[index] = number + 1
        meeting = group.open.get(number)
        if meeting is None:
            meeting = group.open[number] = Meeting(number, site.signature)
        elif meeting.signature is not site.signature:
            raise self._mismatch(meeting, site)
        meeting.sites[index] = site
        if len(meeting.sites) == group.size:
            del group.open[number]
            if site.call.op == "receive" and meeting.waiting:  # for it to be taken
                self.seat.turns.ready.extend(meeting.waiting)
                meeting.waiting.clear()
        return meeting

    def _send(self, site: Site, x: Tensor, meeting: Meeting) -> int | None:
        """Put this rank's message where its receiver finds it. Returns its entry in the log, if it goes anywhere."""
        world, rank, payload, num_bytes = self.world, self.rank, own(x), site.num_bytes
        target: int = site.target  # type: ignore
        if target == rank:
            meeting.messages[target] = payload, None, self.labels.get(x) or UNKNOWN, -1, site
            return None
        entry = self.log.add(self.lane, SEND, site.log_form)
        label, values = self._provenance.of(x), None
        if site.is_small and world.num_left_to_keep > 0:
            world.num_left_to_keep -= 1
            values = values_of(payload)
        number = world.chronicle.recorder.note_message(
            site.form, entry, entry, num_bytes, 0, label.chunk, label.contributors, values
        )
        meeting.messages[target] = payload, entry, label, number, site
        if meeting.waiting:
            for seat in [seat for seat in meeting.waiting if seat.number == target]:
                meeting.waiting.remove(seat)
                self.seat.turns.ready.append(seat)
        if self.seat.turns.watches.by_seat:
            self.look()
        return entry

    def _put_in(self, site: Site, x: Tensor, label: Label | None, meeting: Meeting) -> None:
        """Give this rank's tensor, with its label, to the meeting; the last to arrive works out every rank's result."""
        meeting.inputs[site.index] = x.detach() if x.requires_grad else x
        if label is not None:
            meeting.labels[site.index] = label
        ranks, world, call = site.group.ranks, self.world, site.call
        if len(ranks) > 1:
            if not meeting.entries:
                meeting.log_number = self.log.next_collective()
            meeting.entries[site.index] = self.log.add(self.lane, ISSUE, meeting.log_number, site.log_form)
        if len(meeting.inputs) < len(ranks):
            return
        if call.takes is not None and (text := unfit(meeting)) is not None:
            error = CollectiveMismatchError(text)
            self.seat.turns.fail(error)  # the run ends with it, even if the program goes on
            raise error
        inputs = [meeting.inputs[index] for index in range(len(ranks))]
        splits = [meeting.sites[index].call.splits or () for index in range(len(ranks))] if call.splits else ()
        meeting.outputs = dict(enumerate(results(call, inputs, splits)))
        if len(ranks) == 1:
            return
        number = world.chronicle.recorder.next_message()
        labels = meeting.labels = site.group.labels_after(call, meeting.labels)
        for index in range(len(ranks)):
            other = meeting.sites[index]
            num_sent = other.num_sent
            if num_sent is None:
                x = inputs[index]
                num_sent = bytes_sent(other.call, x.shape, x.element_size(), [y.numel() for y in inputs], index)
                if call.op != "all_gather":  # the others' inputs may have another size each time
                    other.num_sent = num_sent
            values = world.values(meeting.outputs[index])
            entry, label = meeting.entries[index], labels[index]
            world.chronicle.recorder.note(
                other.form, entry, entry, num_sent, number, 0, -1, label.contributors, values, label.part
            )
        self.seat.turns.ready.extend(meeting.waiting)
        meeting.waiting.clear()

    def _outcome(self, site: Site, meeting: Meeting, is_lent: bool) -> Tensor:
        """This rank's result from a meeting of all, once it is ready."""
        if meeting.outputs is None:
            self._wait(site, meeting)
        self._wait_on_clock(site, meeting.entries.get(site.index))
        result: Tensor = meeting.outputs.pop(site.index)  # type: ignore
        if not site.group.is_all and site.group.size > 1:
            self._provenance.received(result, meeting.labels[site.index])
        return result if is_lent else settled(result)

    def _received(self, site: Site, meeting: Meeting, x: Tensor) -> Tensor:
        """The message to this rank, once it has arrived; zeros like `x` if no rank sends one."""
        if site.source is None:
            return _zeros_like(x)
        message = meeting.messages.pop(self.rank, None)
        if message is None:
            self._wait(site, meeting)
            message = meeting.messages.pop(self.rank)
        result, entry, label, number, sent = message
        if site.where != sent.where or site.phase != sent.phase:
            self.world.chronicle.recorder.taken(number, site.where, site.phase)
        if label is not UNKNOWN or not self._provenance.has_lost_track:
            self._provenance.received(result, label)
        self._wait_on_clock(site, entry)
        return result

    def _wait_on_clock(self, site: Site, entry: int | None) -> None:
        """Go on when this entry of the log has arrived."""
        if entry is not None:
            self.log.add(self.lane, WAIT, entry, site.wait_form if self.home is self else -1)  # another thread's waits

    def _wait(self, site: Site, meeting: Meeting) -> None:
        meeting.waiting.append(self.seat)
        self.waits_in = site, meeting
        self.seat.turns.pass_on(self.seat)
        self.waits_in = None

    # --- what torch.distributed asks besides collectives -----------------------------------------------------------

    def await_receiver(self, sent: _Pending) -> None:
        """Wait until the receiving rank is ready to take this, as large messages in real networks do."""
        site, meeting = sent.site, sent.meeting
        if site.target == self.rank:
            return
        if self._is_timed:
            self._catch_up()
        if len(meeting.sites) < site.group.size:
            self._wait(site, meeting)
        if self._is_timed:
            self._seen_at = self._now()

    def fetch(self, pending: _Pending) -> Tensor:
        """This rank's result from a meeting of all. Its clock goes on: it waits when the program does."""
        meeting = pending.meeting
        if self._is_timed:
            self._catch_up()
        if meeting.outputs is None:
            with no_dispatch():
                self._wait(pending.site, meeting)
        if self._is_timed:
            self._seen_at = self._now()
        return meeting.outputs[pending.site.index]  # type: ignore

    def has_come(self, pending: _Pending) -> bool:
        """Whether a wait would end at once. If not, the others have a turn."""
        site, meeting = pending.site, pending.meeting
        if site.call.peers is None:
            here = meeting.outputs is not None
        else:
            here = len(meeting.sites) == site.group.size and (site.source is None or self.rank in meeting.messages)
        if not here and self.seat.turns.ready:
            self.seat.turns.ready.append(self.seat)
            self.seat.turns.pass_on(self.seat)
        return here

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

    def wait_until(
        self,
        is_there: Callable[[], bool],
        what: str,
        seconds: float | None = None,
        patience: float = OF_RANKS,
        gives_up: bool = False,
    ) -> bool:
        """Let the others go on until `is_there`, or for this many seconds. Returns whether it is. If another thread of
        this rank caused it, it happens at that thread's time.

        what       says in an error what this rank waits in
        patience   which threads can cause it, and `gives_up`, as in `watches`
        """
        if is_there():
            return True
        turns = self.seat.turns
        if self._is_timed:
            self._catch_up()
        self.waits_in = f"{what} at {self._line(self.world.lines.frame())}" if what else None
        turns.watches.add(self.seat, is_there, seconds, patience, None if seconds is None else at(), gives_up)
        turns.pass_on(self.seat)
        self.waits_in = None
        by = turns.watches.causes.pop(self.seat, None)
        if by is not None and by is not self.seat and by.home is self.seat.home:
            self._follow(by.member.log.add(by.member.lane, MARK, 0.0))
        if self._is_timed:
            self._seen_at = self._now()
        return seconds is None or is_there()

    def sleep(self, seconds: float, what: str) -> None:
        """Let the others go on for these seconds. On the measured clock, they are the rank's own time."""
        self.wait_until(lambda: False, what, seconds)
        if self._is_timed:
            self._seen_at -= seconds

    def _follow(self, moment: int) -> None:
        """Go on after a moment of another thread."""
        self.log.add(self.lane, AFTER, moment)

    def look(self) -> None:
        """Let ranks go on that wait for something that this rank has done."""
        turns = self.seat.turns
        turns.ready.extend(turns.watches.met(self.seat))

    @contextmanager
    def at_line(self) -> Iterator[None]:
        """What this rank calls meanwhile counts as called from the program's present line, wherever that is."""
        before = self._called_from
        self._called_from = before or self.world.lines.frame()
        try:
            yield
        finally:
            self._called_from = before

    # --- threads that its program starts ---------------------------------------------------------------------------

    def here(self) -> SimulatedRank:
        """This rank, as the running thread has it. Raises OutsideRunError in a thread that does not belong to it."""
        current = current_rank_or_none()
        if current is self:
            return self
        if isinstance(current, SimulatedRank) and current.home is self.home:
            return current
        whose = "no rank" if current is None else f"rank {current.rank}"
        raise OutsideRunError(
            f"the thread {current_thread().name!r} belongs to {whose} and uses a process group of rank {self.rank}; a "
            "rank's program can use its groups in threads that it starts itself, by threading.Thread or in a "
            "ThreadPoolExecutor that it makes itself"
        )

    def beside(self, thread: Thread) -> SimulatedRank:
        """This rank for `thread`, which its program is about to start."""
        home = self.home
        other = SimulatedRank(self.rank, self.world, self.seat.turns.beside(home.seat, thread), home)
        other.labels = self.labels
        other._follow(self.moment())
        other.began_at = self._line(self.world.lines.frame())
        other._provenance.stop()
        return other

    def await_threads(self) -> None:
        """At the end of its program: wait for the threads that it has started and that keep a process alive."""
        turns, seat = self.seat.turns, self.seat
        seat.is_at_end = True
        self.wait_until(lambda: turns.is_over or all(other.is_daemon for other in turns.others_of(seat)), "")
        seat.is_at_end = False

    def _line(self, frame: FrameType) -> str:
        """The program's line; for a thread that runs an installed package, the line that has started it."""
        if self.began_at and not is_program(frame.f_code.co_filename):
            return self.began_at
        return self.world.lines.text(frame)

    def _mismatch(self, meeting: Meeting, site: Site) -> CollectiveMismatchError:
        """The error for a call that is not the collective that the others of its group are in. The run ends with it,
        even if the program goes on."""
        sides = [(rank, str(side)) for rank, side in (meeting.first, (self.rank, site))]
        error = mismatch(meeting.number, site.call.place.label, site.group.ranks, sides)
        self.seat.turns.fail(error)
        return error


class _Pending(Pending):
    __slots__ = ("meeting", "rank", "result", "since", "site", "x")

    def __init__(self, rank: SimulatedRank, site: Site, meeting: Meeting, x: Tensor, since: int):
        self.rank, self.site, self.meeting, self.since = rank, site, meeting, since
        self.x: Tensor | None = x  # gives the shape of zeros if no rank sends
        self.result: Tensor | None = None

    def wait(self) -> Tensor:
        return settled(self.read())

    def read(self) -> Tensor:
        if self.result is None:
            assert self.x is not None
            self.result = self.rank.here().finish(self.site, self.meeting, self.x, self.since, is_lent=True)
            self.x = None
        return self.result

    @property
    def sizes(self) -> tuple[int, ...] | None:
        call, inputs = self.site.call, self.meeting.inputs
        if call.op != "all_gather" or self.result is None:
            return None
        return tuple(inputs[index].shape[call.params[0]] for index in range(len(inputs)))

    @property
    def sent_with(self) -> tuple[Any, ...]:
        return self.meeting.sites[0].call.params


def _zeros_like(x: Tensor) -> Tensor:
    return torch.zeros_like(x, memory_format=torch.contiguous_format, requires_grad=False)
