"""Lanes: what the ranks of a program do, each in program order, and when it happens.

While a program runs, its ranks note in a `Log` what they do, without times, so the order in which ranks take turns does
not matter. `Lanes` computes the times afterwards.
"""

from __future__ import annotations

from array import array
from collections import defaultdict, deque
from collections.abc import Callable
from functools import cache
from math import nan
from typing import Any, NamedTuple

import numpy as np

from tplab.cost.clock import Clock, Links, Request

COMPUTE, WAIT, SEND, ISSUE, ROUND, MARK, AFTER = range(7)
"""The entries of a lane, each with two numbers (a, b):

COMPUTE   for `a` seconds
SEND      a message of form `a`
ISSUE     its part of collective `a`, with form `b`, without waiting for it
WAIT      until entry `a` has arrived: a SEND, or its own ISSUE. `b` is for the caller; -1: the wait is not reported
ROUND     like WAIT, but only on the clock that counts hops
MARK      a point in time, `a` seconds from here
AFTER     wait for MARK `a` of another lane
"""

_BLOCK = 1 << 18
_CHUNK = 1 << 12


class Log:
    """What the lanes of a program have done, as numbered entries.

    A lane is a rank, or a thread of one. The lanes of a rank compute one at a time.
    """

    def __init__(self) -> None:
        self.ranks: list[int] = []  # of each lane
        self.messages: list[tuple[int, int, int, tuple[Any, ...]]] = []  # by form: source, target, bytes, said
        self.collectives: list[tuple[str, tuple[int, ...], int, tuple[Any, ...]]] = []  # op, group, bytes, said
        self.num_collectives = 0
        self._entries: list[float] = []  # flat: lane, what it does, a, b
        self._blocks: list[np.ndarray] = []
        self._num_packed = 0

    def lane(self, rank: int) -> int:
        """A new lane of this rank."""
        self.ranks.append(rank)
        return len(self.ranks) - 1

    def message_form(self, source: int, target: int, num_bytes: int, *said: Any) -> int:
        """The form of messages between these two ranks. `said` is what the program says about them, in any form."""
        self.messages.append((source, target, num_bytes, said))
        return len(self.messages) - 1

    def collective_form(self, op: str, group: tuple[int, ...], num_bytes: int, *said: Any) -> int:
        """The form of collectives over this group, as one rank issues them with an input of `num_bytes`."""
        self.collectives.append((op, group, num_bytes, said))
        return len(self.collectives) - 1

    def next_collective(self) -> int:
        """A number for the parts of one collective."""
        self.num_collectives += 1
        return self.num_collectives - 1

    def add(self, lane: int, does: int, a: float, b: int = -1) -> int:
        """Note what a lane does next. Returns the number of the entry."""
        entries = self._entries
        number = self._num_packed + (len(entries) >> 2)
        entries += (lane, does, a, b)
        if len(entries) >= _BLOCK:
            self._pack()
        return number

    def since(self, number: int) -> np.ndarray:
        """The entries from this number on: [entries, (lane, what it does, a, b)]."""
        if self._entries:
            self._pack()
        if len(self._blocks) > 1:
            self._blocks = [np.concatenate(self._blocks)]
        return self._blocks[0][number:] if self._blocks else np.zeros((0, 4))

    def _pack(self) -> None:
        self._blocks.append(np.array(self._entries, np.float64).reshape(-1, 4))
        self._num_packed += len(self._entries) >> 2
        self._entries.clear()


class Times(NamedTuple):
    """When each entry of a log began and ended: a SEND on its link, an ISSUE as the collective ran, a MARK at once.

    after   the entry whose end each entry had to wait for before it could begin (a WAIT: before it could end): the
            previous one on its rank, the one that arrived, or the one its links carried, on any rank. -1: none
    """

    start: np.ndarray
    end: np.ndarray
    after: np.ndarray


class Lanes:
    """Computes when everything in `log` happens on these links; entries may be added between calls.

    computes   whether a COMPUTE takes time
    rounds     whether a ROUND waits
    """

    def __init__(self, log: Log, links: Links, *, computes: bool = True, rounds: bool = False):
        self._log, self._computes, self._rounds = log, computes, rounds
        self._message, self._collective = cache(links.message), cache(links.collective)
        self._share = links.share if computes else 0.0
        self._clock = Clock(self._go_on, self._booked, self._share)
        self._lanes: list[_Lane] = []
        self._lanes_of: dict[int, list[_Lane]] = defaultdict(list)
        self._start, self._end, self._after = array("d"), array("d"), array("q")
        self._meetings: dict[int, _Meeting] = {}
        self._waiting: dict[int, list[_Lane]] = {}  # entry -> lanes that wait for it
        self._computing: dict[int, deque[_Lane]] = {}  # rank -> the queue of its lanes to compute

    def times(self) -> Times:
        """The times of all entries, if nothing follows them."""
        self._read()
        self._clock.run()
        return Times(np.array(self._start), np.array(self._end), np.array(self._after))

    def is_known(self, entry: int, is_going: Callable[[int], bool]) -> bool:
        """Whether the time of an entry is final, whatever the lanes that are still `is_going` note next."""
        self._read()
        going = [lane for lane in self._lanes if is_going(lane.number)]
        self._clock.run(lambda time: all(lane.time > time for lane in going if lane.is_done))
        return self._end[entry] == self._end[entry]

    def end(self, entry: int) -> float:
        """When an entry ends, once that is known."""
        return self._end[entry]

    # --- reading the log -----------------------------------------------------------------------------------------

    def _read(self) -> None:
        known = len(self._start)
        entries = self._log.since(known)
        self._start.extend([nan] * len(entries))
        self._end.extend([nan] * len(entries))
        self._after.extend([-1] * len(entries))
        for number in range(len(self._lanes), len(self._log.ranks)):
            beside = self._lanes_of[self._log.ranks[number]]
            lane = _Lane(number, self._log.ranks[number], len(beside))
            beside.append(lane)
            self._lanes.append(lane)
        order = np.argsort(entries[:, 0], kind="stable")
        bounds = np.searchsorted(entries[order, 0], np.arange(len(self._lanes) + 1))
        for lane, first, last in zip(self._lanes, bounds[:-1], bounds[1:], strict=True):
            if first < last:
                lane.parts.extend(
                    (entries[part], part + known)
                    for part in (order[begin : min(begin + _CHUNK, last)] for begin in range(first, last, _CHUNK))
                )
                if lane.is_done:
                    lane.is_done = False
                    self._clock.at(lane.time, lane.number)

    # --- what happens --------------------------------------------------------------------------------------------

    def _go_on(self, _: float, number: int) -> None:
        """Advance the lane until it has to wait, or until the clock must advance first."""
        lane, start, end, after, until = self._lanes[number], self._start, self._end, self._after, self._clock.until
        is_alone = len(self._lanes_of[lane.rank]) == 1 and not self._share  # nothing can hold up its computing
        time = lane.time
        while lane.at < lane.size or lane.read():
            entry = lane.entries[lane.at]
            does, a, b = lane.does[lane.at]
            if does == COMPUTE:
                if is_alone or not self._computes:
                    start[entry] = time
                    if self._computes:
                        time += a
                    end[entry] = time
                    after[entry], lane.after = lane.after, entry
                elif not self._compute(lane, time, entry, a):
                    return
                else:
                    time = end[entry]
            elif does in (WAIT, AFTER) or (does == ROUND and self._rounds):
                awaited = int(a)
                arrives = end[awaited]
                if arrives != arrives:  # NaN: not known yet
                    lane.time = time
                    self._waiting.setdefault(awaited, []).append(lane)
                    return
                start[entry], after[entry] = time, awaited
                if arrives > time:
                    time, lane.after = arrives, after[awaited] if does == AFTER else awaited
                end[entry] = time
            elif does == SEND:
                if time > until:
                    self._later(lane, time)
                    return
                self._send(lane, time, entry, int(a))
            elif does == ISSUE:
                if time > until:
                    self._later(lane, time)
                    return
                self._issue(lane, time, entry, int(a), int(b))
            else:
                start[entry] = end[entry] = time + a if does == MARK else time
                after[entry] = lane.after
                if entry in self._waiting:
                    self._wake(entry)
            lane.at += 1
        lane.time, lane.is_done = time, True

    def _compute(self, lane: _Lane, time: float, entry: int, seconds: float) -> bool:
        """Compute on a rank where something may delay it. Returns whether it is done; if not, the lane resumes."""
        lane.time = time
        if time > self._clock.until:
            self._clock.at(time, lane.number)
            return False
        queue = self._computing.setdefault(lane.rank, deque())
        if lane not in queue:
            queue.append(lane)
        if queue[0] is not lane:
            return False
        if self._start[entry] != self._start[entry]:
            self._start[entry], self._after[entry] = time, lane.after
        done = self._clock.computed(lane.rank, self._start[entry], seconds)
        if done > self._clock.until:
            self._later(lane, done)
            return False
        self._end[entry], lane.time, lane.after = done, done, entry
        queue.popleft()
        if queue:
            queue[0].after = entry
            self._later(queue[0], done)
        return True

    def _later(self, lane: _Lane, time: float) -> None:
        """Resume the lane at that time."""
        lane.time = time
        self._clock.at(time, lane.number)

    def _wake(self, entry: int) -> None:
        for lane in self._waiting.pop(entry, ()):
            self._go_on(0.0, lane.number)

    def _send(self, lane: _Lane, time: float, entry: int, form: int) -> None:
        source, target, num_bytes, said = self._log.messages[form]
        route = self._message(source, target, num_bytes)
        self._clock.ask(Request(route, time, said, {lane.rank: (lane.place, entry)}, (entry,), lane.after))

    def _issue(self, lane: _Lane, time: float, entry: int, number: int, form: int) -> None:
        """Issue the lane's part of a collective, which is ready when all ranks of the group have issued theirs."""
        op, group, num_bytes, said = self._log.collectives[form]
        meeting = self._meetings.get(number)
        if meeting is None:
            meeting = self._meetings[number] = _Meeting(time, num_bytes, said, lane.after)
        if time > meeting.ready:
            meeting.ready, meeting.after = time, lane.after
        meeting.num_bytes, meeting.said = max(meeting.num_bytes, num_bytes), min(meeting.said, said)
        meeting.places[lane.rank] = lane.place, entry
        if len(meeting.places) < len(group):
            return
        del self._meetings[number]
        route = self._collective(op, meeting.num_bytes, group)
        entries = tuple(entry for _, entry in meeting.places.values())
        self._clock.ask(Request(route, meeting.ready, meeting.said, meeting.places, entries, meeting.after))

    def _booked(self, request: Request, before: Request | None) -> None:
        after = request.after if before is None else before.places[before.seen_from(request)][1]
        for entry in request.what:
            self._start[entry], self._end[entry], self._after[entry] = request.start, request.end, after
            if entry in self._waiting:
                self._wake(entry)


class _Lane:
    """A lane's progress: its entries, read in chunks.

    time, after   when it resumes, and the entry that it had to wait for; -1: none
    """

    __slots__ = ("after", "at", "does", "entries", "is_done", "number", "parts", "place", "rank", "size", "time")

    def __init__(self, number: int, rank: int, place: int):
        self.number, self.rank, self.place = number, rank, place
        self.time, self.after, self.is_done = 0.0, -1, True
        self.parts: deque[tuple[np.ndarray, np.ndarray]] = deque()
        self.does: list[list[float]] = []  # what, a, b
        self.entries: list[int] = []
        self.at = self.size = 0

    def read(self) -> bool:
        """Read the next chunk. Returns whether there is one."""
        if not self.parts:
            return False
        part, entries = self.parts.popleft()
        self.does, self.entries = part[:, 1:].tolist(), entries.tolist()
        self.at, self.size = 0, len(self.entries)
        return True


class _Meeting:
    """A collective that some of its ranks have issued."""

    __slots__ = ("after", "num_bytes", "places", "ready", "said")

    def __init__(self, ready: float, num_bytes: int, said: tuple[Any, ...], after: int):
        self.ready, self.num_bytes, self.said, self.after = ready, num_bytes, said, after
        self.places: dict[int, tuple[int, int]] = {}
