"""When each task of a traced program runs: a list scheduler on the modelled clock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from heapq import heappop, heappush
from typing import NamedTuple

from tplab.cost.clock import Clock, Links, Request
from tplab.cost.cluster import Cluster
from tplab.jax.tracing.tasks import Task


class Span(NamedTuple):
    """The start of something, and its end or arrival."""

    start: float
    end: float


Part = tuple[int, int]
"""(task, rank): a rank's part in a task. A message belongs to its sender."""

_NOTHING: Part = -1, -1


_ENDED, _READY, _SEND, _NEXT = range(4)  # the order at one instant: everything that is ready comes first


class Timing:
    """Runs tasks on the clock of `cluster`; without one, a hop takes 1 and computing 0.

    A message leaves as soon as its data is computed and its link is free; a collective starts when this holds for all
    its ranks. Neither blocks a rank's computing. Each rank computes one task at a time: of the tasks whose operands are
    ready, the first in program order. An action of a pipeline's schedule takes its given seconds, and the messages
    between actions are in lock-step.

    spans    for each task: rank -> when it computes, or when its message (for the sender) or collective is on the way
    after    part -> the part that held it up: its result was needed, or it occupied the rank or the links
    """

    def __init__(self, tasks: Sequence[Task], alive: set[int], num_ranks: int, cluster: Cluster | None):
        self._tasks, self._cluster, self._num_ranks = tasks, cluster, num_ranks
        self.spans: list[dict[int, Span]] = [{} for _ in tasks]
        self.after: dict[Part, Part] = {}
        links = Links(cluster)
        self._message, self._collective = cache(links.message), cache(links.collective)
        self._clock = Clock(self._happens, self._booked, links.share)
        self._in_step: dict[tuple[int, tuple[int, ...]], tuple[int, tuple[float, Part]]] = {}  # messages left, the last
        self._arrivals: list[list[tuple[float, int, Part]]] = [[] for _ in range(num_ranks)]
        self._queues: list[list[tuple[int, float, Part]]] = [
            [] for _ in range(num_ranks)
        ]  # (task, ready since when, because of what)
        self._busy = [False] * num_ranks
        self._free = [(0.0, _NOTHING)] * num_ranks  # since when, and the rank's last computation
        self._needed_by: dict[int, list[int]] = defaultdict(list)
        self._missing: dict[tuple[int, int], int] = {}
        self._ready_at: dict[tuple[int, tuple[int, ...]], list[tuple[float, Part]]] = defaultdict(list)
        for number in sorted(alive):
            self._enter(number)
        self._clock.run()

    def _enter(self, number: int) -> None:
        task = self._tasks[number]
        for need in task.needs:
            self._needed_by[need].append(number)
        for rank in task.ranks:
            # a rank that took another branch never ran some of these tasks, and does not wait for them
            missing = sum(rank in self._tasks[need].ranks for need in task.needs)
            self._missing[number, rank] = missing
            if not missing:
                self._clock.at(0.0, _READY, number, rank, _NOTHING)

    def _happens(self, now: float, what: int, number: int, rank: int, after: Part) -> None:
        if what == _NEXT:
            self._compute_next(now, rank)
        elif what == _READY:
            if self._tasks[number].kind == "compute":
                heappush(self._queues[rank], (number, now, after))
                self._clock.at(now, _NEXT, -1, rank, _NOTHING)
            else:
                self._clock.at(now, _SEND, number, rank, after)
        elif what == _SEND:
            self._send(now, number, rank, after)
        else:
            if self._tasks[number].kind == "compute":
                begun = self.spans[number][rank].start
                done = self._clock.computed(rank, begun, self._seconds(number))
                if done > self._clock.until:  # collectives that have begun meanwhile slow it
                    self._clock.at(done, _ENDED, number, rank, after)
                    return
                self.spans[number][rank] = Span(begun, done)
                now = done
                self._busy[rank], self._free[rank] = False, (now, after)
                self._clock.at(now, _NEXT, -1, rank, _NOTHING)
            self._release(now, number, rank, after)

    def _release(self, now: float, number: int, rank: int, after: Part) -> None:
        """Begin the tasks that needed nothing but this task, which has ended on this rank with the part `after`."""
        for following in self._needed_by[number]:
            key = (following, rank)
            if key in self._missing:
                self._missing[key] -= 1
                if not self._missing[key]:
                    self._clock.at(now, _READY, following, rank, after)

    def _compute_next(self, now: float, rank: int) -> None:
        if self._busy[rank] or not self._queues[rank]:
            return
        number, ready, after = heappop(self._queues[rank])
        since, before = self._free[rank]
        self._busy[rank] = True
        self.spans[number][rank], self.after[number, rank] = Span(now, now), before if since > ready else after
        self._clock.at(self._clock.computed(rank, now, self._seconds(number)), _ENDED, number, rank, (number, rank))

    def _seconds(self, number: int) -> float:
        """How long a task computes if nothing slows it down."""
        task = self._tasks[number]
        if self._cluster is None:
            return task.seconds or 0.0
        return self._cluster.compute_seconds(task.flops, task.num_bytes, task.rate or task.dtype, task.matmul)

    def _send(self, now: float, number: int, rank: int, after: Part) -> None:
        task = self._tasks[number]
        if task.kind == "collective" or task.together:
            self._join(now, number, rank, after)
            return
        gets_zeros = rank not in {target for _, target in task.pairs}
        # When hops are counted, a round ends with its messages; otherwise a tree's root would send to all at once.
        only_sends = gets_zeros and self._cluster is None and rank in {source for source, _ in task.pairs}
        if gets_zeros and not only_sends:
            self._clock.at(now, _ENDED, number, rank, after)  # it need not wait for zeros
        for source, target in task.pairs:
            if source != rank:
                continue
            if source == target:
                self._clock.at(now, _ENDED, number, rank, after)
                continue
            self._ask(now, number, (source, target), (source,) if only_sends else (), after)

    def _join(self, now: float, number: int, rank: int, after: Part) -> None:
        task = self._tasks[number]
        group = next(group for group in task.groups if rank in group)
        arrived = self._ready_at[number, group]
        arrived.append((now, after))
        if len(arrived) < len(group):
            return
        ready, after = max(arrived)
        if not task.together:
            self._ask(ready, number, group, group, after)
            return
        # Lock-step: the messages leave when all ranks are here, and no rank continues before the last one has arrived.
        pairs = [(source, target) for source, target in task.pairs if source in group and source != target]
        self._in_step[number, group] = len(pairs), (ready, after)
        for pair in pairs:
            self._ask(ready, number, pair, group, after)
        for rank in () if pairs else group:
            self._arrive(ready, number, rank, after)

    def _ask(self, ready: float, number: int, ranks: tuple[int, ...], members: tuple[int, ...], after: Part) -> None:
        """Request the links for a collective over these ranks, or for a message from the first to the second of them.
        `members` are the ranks that wait for it; for a message also its receiver."""
        task = self._tasks[number]
        is_message = task.kind == "message"
        size = task.num_bytes
        route = self._message(*ranks, size) if is_message else self._collective(task.costs, size, ranks)
        said = task.where, task.op, size, task.axis
        places = dict.fromkeys(ranks[:1] if is_message else ranks, number)
        self._clock.ask(Request(route, ready, said, places, (number, ranks, members), after))

    def _booked(self, request: Request, before: Request | None) -> None:
        number, ranks, members = request.what
        task, span = self._tasks[number], Span(request.start, request.end)
        after = request.after if before is None else (before.what[0], before.seen_from(request))
        for rank in request.places:
            self.spans[number][rank], self.after[number, rank] = span, after
        if task.kind == "collective":
            for rank in ranks:
                self._arrive(span.end, number, rank, (number, rank))
            return
        source, target = ranks
        if task.together:
            left, last = self._in_step[number, members]
            left, last = left - 1, max(last, (span.end, (number, source)))
            self._in_step[number, members] = left, last
            if not left:
                for rank in members:
                    self._arrive(last[0], number, rank, last[1])
            return
        self._arrive(span.end, number, target, (number, source))
        for rank in members:
            self._clock.at(span.end, _ENDED, number, rank, (number, source))

    def _arrive(self, end: float, number: int, rank: int, after: Part) -> None:
        self._arrivals[rank].append((end, number, after))
        self._clock.at(end, _ENDED, number, rank, after)

    def waits(self) -> Iterator[tuple[int, float, float, int, Part]]:
        """The times when a rank was neither computing nor done, from arrival to arrival: (rank, start, end, the number
        of the task whose message or collective it waited for, the part with which that ended)."""
        computing: list[list[Span]] = [[] for _ in range(self._num_ranks)]
        for task, spans in zip(self._tasks, self.spans, strict=True):
            if task.kind == "compute":
                for rank, span in spans.items():
                    computing[rank].append(span)
        for rank, spans in enumerate(computing):
            arrivals = sorted(self._arrivals[rank])
            until = Span(arrivals[-1][0], arrivals[-1][0]) if arrivals else Span(0.0, 0.0)
            now, place = 0.0, 0
            for span in [*sorted(spans), until]:
                while place < len(arrivals) and arrivals[place][0] <= span.start:
                    end, number, after = arrivals[place]
                    if end > now:
                        yield rank, now, end, number, after
                        now = end
                    place += 1
                now = max(now, span.end)
