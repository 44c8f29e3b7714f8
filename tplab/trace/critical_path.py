"""The critical path: the chain of events that decides how long a program takes.

Only times and message numbers matter, so traces of every origin are treated alike. Going backwards from the event that
ends last, each event is traced to what held it up:

    compute       what ended last on its own rank: its own work, or a message or collective that arrived
    send          the same or, if its link was still busy, the message before it on the link
    receive       its send, which lasts as long and takes its place
    collective    what held up the member of the group that arrived last

In a modelled trace, each event of the chain then starts when the one before it ends. There is one exception: a link may
carry the next message while the last one is still on its way, so that the two overlap by the latency. A measured trace
also has gaps, where a rank did something that was not recorded, and receives that began before their send.
"""

from __future__ import annotations

import numpy as np

from tplab.trace.event import KINDS, Event
from tplab.trace.trace import Trace

_COMPUTE, _SEND, _RECEIVE, _COLLECTIVE, _WAIT = range(len(KINDS))

# What may hold an event up; if several end together, the likeliest comes first. A late receive is one of zero length
# that was recorded after the event it released. A wait explains nothing: it only shows that something else was late.
_CAUSES = ("compute", "collective", "receive", "send", "link", "late receive", "wait")


def critical_path(trace: Trace) -> list[Event]:
    """The events that set the makespan, first to last. n events take O(n log n)."""
    if not len(trace):
        return []
    causes = _Causes(trace)
    chain, seen = [causes.last()], set()
    while chain[-1] >= 0:
        seen.add(chain[-1])
        chain.append(causes.before(chain[-1], seen))
    return trace.events_at(np.array(chain[-2::-1]))


class _Causes:
    """For each event, by its index in the trace, what held it up.

    Times are whole numbers here: times that differ only by rounding are one instant.
    """

    def __init__(self, trace: Trace):
        table, codes = trace.codes("kind")
        self.kind = np.array([KINDS.index(kind) for kind in table], np.int64)[codes]
        self.rank, self.peer = trace.column("rank").astype(np.int64), trace.column("peer").astype(np.int64)
        self.message = trace.column("message")
        self.start, self.end, self.num_instants = _instants(trace.column("start"), trace.column("end"))
        self.events = np.arange(len(trace))
        self.stand_in = self._stand_ins()
        self.found = np.stack([self._on_own_rank(cause) for cause in _CAUSES])
        self.scores = self._scores()
        self.best = self._likeliest()
        self._look_at_groups()
        self._look_at_senders()

    def last(self) -> int:
        """The event that ends last."""
        prefer = np.zeros(len(KINDS), np.int64)
        prefer[[_COMPUTE, _COLLECTIVE, _SEND, _RECEIVE]] = 4, 3, 2, 1
        return int(self.stand_in[np.lexsort((prefer[self.kind], self.end))[-1]])

    def before(self, event: int, seen: set[int]) -> int:
        """What held up `event`, or -1. Never one of `seen`: events of zero length may seem to wait for each other."""
        if int(self.best[event]) not in seen:
            return int(self.best[event])
        for row in np.argsort(-self.scores[:, event], kind="stable"):
            found = int(self.found[row, event])
            if found >= 0 and int(self.stand_in[found]) not in seen:
                return int(self.stand_in[found])
        return -1

    def _stand_ins(self) -> np.ndarray:
        """The event itself; for a receive or wait that ends with the send or collective of its message, that one."""
        stand_in = self.events.copy()
        for waiting, origin in ((_WAIT, _COLLECTIVE), (_WAIT, _SEND), (_RECEIVE, _SEND)):
            events = np.flatnonzero(self.kind == waiting)
            source = self._with_message_of(events, origin)
            fits = (source >= 0) & (self.end[source] == self.end[events])
            stand_in[events[fits]] = source[fits]
        return stand_in

    def _with_message_of(self, events: np.ndarray, kind: int) -> np.ndarray:
        """The event of this kind that has the message of each of `events`, or -1."""
        known = np.flatnonzero((self.kind == kind) & (self.message >= 0))
        known = known[np.argsort(self.message[known], kind="stable")]
        if not len(known):
            return np.full(len(events), -1)
        found = known[np.searchsorted(self.message[known], self.message[events]).clip(max=len(known) - 1)]
        return np.where(self.message[found] == self.message[events], found, -1)

    def _on_own_rank(self, cause: str) -> np.ndarray:
        """For each event, the last one on its rank that may be such a cause, or -1."""
        in_order, at_once = self.events + 1, np.zeros_like(self.events)
        if cause == "link":  # the send that began before this one, and was still on its way
            sends = np.flatnonzero(self.kind == _SEND)
            to_peer = self._latest(
                sends, self.start, self.rank * (self.rank.max() + 2) + self.peer + 1, at_once, at_once
            )
            to_any = self._latest(sends, self.start, self.rank, at_once, at_once)
            found = np.where(self._is_under_way(to_peer), to_peer, np.where(self._is_under_way(to_any), to_any, -1))
            return np.where((self.kind == _SEND) | (self.kind == _COLLECTIVE), found, -1)
        if cause == "late receive":
            found = self._latest(np.flatnonzero(self.kind == _RECEIVE), self.end, self.rank, at_once, in_order)
            return np.where(found == self.events, -1, found)
        # A cause may end just when the event starts, but only if recorded before it: so no two explain each other.
        return self._latest(np.flatnonzero(self.kind == KINDS.index(cause)), self.end, self.rank, in_order, in_order)

    def _is_under_way(self, sends: np.ndarray) -> np.ndarray:
        return (sends >= 0) & (self.end[sends] >= self.start)

    def _latest(
        self, among: np.ndarray, times: np.ndarray, lane: np.ndarray, order: np.ndarray, asked: np.ndarray
    ) -> np.ndarray:
        """For each event, the last one `among` those of its lane whose (time, order) is before its (start, asked)."""
        if not len(among):
            return np.full_like(self.events, -1)
        num_orders = len(self.events) + 1
        keys = (lane * self.num_instants + times) * num_orders + order
        wanted = (lane * self.num_instants + self.start) * num_orders + asked
        among = among[np.argsort(keys[among], kind="stable")]
        places = np.searchsorted(keys[among], wanted) - 1
        found = among[places.clip(min=0)]
        return np.where((places >= 0) & (lane[found] == lane), found, -1)

    def _scores(self) -> np.ndarray:
        """How late each cause ended and, among those that ended together, how likely it is; -1 if there is none."""
        likely = np.arange(len(_CAUSES), 0, -1)[:, None]
        ends = self.end[self.found]
        ends[_CAUSES.index("link")] = self.start  # the link was free then, whenever the message arrives
        return np.where(self.found < 0, -1, ends * (len(_CAUSES) + 1) + likely)

    def _likeliest(self) -> np.ndarray:
        found = self.found[np.argmax(self.scores, axis=0), self.events]
        return np.where(found < 0, -1, self.stand_in[found])

    def _look_at_groups(self) -> None:
        """A collective was held up, on every rank of the group, by what held up the member that arrived last."""
        events = np.flatnonzero((self.kind == _COLLECTIVE) & (self.message >= 0))
        if not len(events):
            return
        # If messages held up two members, the one that arrives last was on its link for longer.
        arrives = np.where(self.best[events] < 0, -1, self.end[self.best[events]])
        order = np.lexsort((arrives, self.scores.max(axis=0)[events], self.start[events], self.message[events]))
        events = events[order]
        is_last = np.append(self.message[events][1:] != self.message[events][:-1], True)
        last = events[is_last][np.searchsorted(np.flatnonzero(is_last), np.arange(len(events)))]
        came_in_time = self.start[last] <= self.end[events]
        self.best[events] = np.where(came_in_time, self.best[last], self.best[events])

    def _look_at_senders(self) -> None:
        """A receive that took longer than its send was held up by the send, or by what its own rank did before."""
        events = np.flatnonzero((self.kind == _RECEIVE) & (self.stand_in == self.events))
        sends = self._with_message_of(events, _SEND)
        events, sends = events[sends >= 0], sends[sends >= 0]
        before = self.best[events]
        by_send = (self.end[sends] < self.end[events]) & ((before < 0) | (self.end[sends] >= self.end[before]))
        self.best[events] = np.where(by_send, sends, before)


def _instants(start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """Times as whole numbers in their order, and how many there are. Times that differ by rounding are one instant."""
    times = np.concatenate([start, end])
    order = np.argsort(times, kind="stable")
    rounding = 64 * np.spacing(np.abs(times).max())
    number = np.empty(len(times), np.int64)
    number[order] = np.cumsum(np.diff(times[order], prepend=times[order[0]]) > rounding)
    return number[: len(start)], number[len(start) :], int(number.max()) + 1
