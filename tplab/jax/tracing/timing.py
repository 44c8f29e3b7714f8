"""When each task of a traced program runs: a list scheduler on the modelled clock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Any, NamedTuple

from tplab.cost.clock import Clock, Request
from tplab.cost.cluster import Cluster
from tplab.cost.links import Links, Route
from tplab.jax.tracing.tasks import Task


class Span(NamedTuple):
    """The time from when something begins until it has ended, or arrived."""

    start: float
    end: float


class Wait(NamedTuple):
    """A rank waited until a message or a collective, the task of that number, reached it."""

    rank: int
    start: float
    end: float
    task: int


_ENDED, _READY, _SEND, _NEXT = range(4)  # the order at one instant, so that all that is ready goes first


class Timing:
    """Runs tasks on the clock of `cluster`; without one, a hop takes 1 and computing 0.

    A message leaves as soon as it is computed and its link is free; a collective starts when that is so for all its
    ranks. Neither keeps a rank from computing. Each rank computes one task after another: of those whose operands are
    ready, always the first in the program's order. An action of a pipeline's schedule takes the seconds that it says,
    and the messages between actions go in lock-step.

    spans    for each task: rank -> when it computes, or when its message (for the sender) or collective is on the way
    """

    def __init__(self, tasks: Sequence[Task], alive: set[int], num_ranks: int, cluster: Cluster | None):
        self._tasks, self._cluster, self._num_ranks = tasks, cluster, num_ranks
        self.spans: list[dict[int, Span]] = [{} for _ in tasks]
        self._links = Links(cluster)
        self._clock = Clock(self._happens, self._booked, self._links.share)
        self._routes: dict[Any, Route] = {}
        self._in_step: dict[tuple[int, tuple[int, ...]], tuple[int, float]] = {}  # messages left, and until when
        self._arrivals: list[list[tuple[float, int]]] = [[] for _ in range(num_ranks)]
        self._queues: list[list[int]] = [[] for _ in range(num_ranks)]
        self._busy = [False] * num_ranks
        self._needed_by: dict[int, list[int]] = defaultdict(list)
        self._missing: dict[tuple[int, int], int] = {}
        self._ready_at: dict[tuple[int, tuple[int, ...]], list[float]] = defaultdict(list)
        for number in sorted(alive):
            self._enter(number)
        self._clock.run()

    def _enter(self, number: int) -> None:
        task = self._tasks[number]
        for need in task.needs:
            self._needed_by[need].append(number)
        for rank in task.ranks:
            # a rank that took another branch, and never did what is needed here, does not wait for it
            missing = sum(rank in self._tasks[need].ranks for need in task.needs)
            self._missing[number, rank] = missing
            if not missing:
                self._clock.at(0.0, _READY, number, rank)

    def _happens(self, now: float, what: int, number: int, rank: int) -> None:
        if what == _NEXT:
            self._compute_next(now, rank)
        elif what == _READY:
            self._begin(now, number, rank)
        elif what == _SEND:
            self._send(now, number, rank)
        else:
            if self._tasks[number].kind == "compute":
                begun = self.spans[number][rank].start
                done = self._clock.computed(rank, begun, self._seconds(number))
                if done > self._clock.until:  # collectives that have begun meanwhile slow it
                    self._clock.at(done, _ENDED, number, rank)
                    return
                self.spans[number][rank] = Span(begun, done)
                now = done
                self._busy[rank] = False
                self._clock.at(now, _NEXT, -1, rank)
            self._release(now, number, rank)

    def _release(self, now: float, number: int, rank: int) -> None:
        """The task has ended on this rank: tasks that needed nothing else can begin."""
        for following in self._needed_by[number]:
            key = (following, rank)
            if key in self._missing:
                self._missing[key] -= 1
                if not self._missing[key]:
                    self._clock.at(now, _READY, following, rank)

    def _begin(self, now: float, number: int, rank: int) -> None:
        if self._tasks[number].kind == "compute":
            heappush(self._queues[rank], number)
            self._clock.at(now, _NEXT, -1, rank)
        else:
            self._clock.at(now, _SEND, number, rank)

    def _compute_next(self, now: float, rank: int) -> None:
        if self._busy[rank] or not self._queues[rank]:
            return
        number = heappop(self._queues[rank])
        self._busy[rank] = True
        self.spans[number][rank] = Span(now, now)
        self._clock.at(self._clock.computed(rank, now, self._seconds(number)), _ENDED, number, rank)

    def _seconds(self, number: int) -> float:
        """How long a task computes, if nothing slows it."""
        task = self._tasks[number]
        if self._cluster is None:
            return task.seconds or 0.0
        return self._cluster.compute_seconds(task.flops, task.num_bytes, task.rate or task.dtype, task.matmul)

    def _send(self, now: float, number: int, rank: int) -> None:
        task = self._tasks[number]
        if task.kind == "collective" or task.together:
            self._join(now, number, rank)
            return
        gets_zeros = rank not in {target for _, target in task.pairs}
        # When hops are counted, a round ends with its messages: otherwise a tree's root would send to all at once.
        only_sends = gets_zeros and self._cluster is None and rank in {source for source, _ in task.pairs}
        if gets_zeros and not only_sends:
            self._clock.at(now, _ENDED, number, rank)  # it need not wait for zeros
        for source, target in task.pairs:
            if source != rank:
                continue
            if source == target:
                self._clock.at(now, _ENDED, number, rank)
                continue
            self._ask(now, number, (source, target), (source,) if only_sends else ())

    def _join(self, now: float, number: int, rank: int) -> None:
        task = self._tasks[number]
        group = next(group for group in task.groups if rank in group)
        arrived = self._ready_at[number, group]
        arrived.append(now)
        if len(arrived) < len(group):
            return
        ready = max(arrived)
        if not task.together:
            self._ask(ready, number, group, group)
            return
        # Lock-step: the messages leave when all ranks are here, and no rank goes on before the last has arrived.
        pairs = [(source, target) for source, target in task.pairs if source in group and source != target]
        self._in_step[number, group] = len(pairs), ready
        for pair in pairs:
            self._ask(ready, number, pair, group)
        if not pairs:
            self._arrive_all(ready, number, group)

    def _ask(self, ready: float, number: int, ranks: tuple[int, ...], members: tuple[int, ...]) -> None:
        """Ask for the links of a collective over these ranks, or of a message from the first to the second of them.
        `members` are the ranks that wait for it; for a message also its receiver."""
        task = self._tasks[number]
        is_message = task.kind == "message"
        key = ranks, task.num_bytes, "" if is_message else task.costs
        route = self._routes.get(key)
        if route is None:
            links, size = self._links, task.num_bytes
            if is_message:
                route = links.message(ranks[0], ranks[1], size)
            else:
                route = links.collective(task.costs, size, ranks)
            self._routes[key] = route
        said = task.where, task.op, task.num_bytes, task.axis
        self._clock.ask(Request(route, ready, said, dict.fromkeys(ranks, number), (number, ranks, members)))

    def _booked(self, request: Request) -> None:
        number, ranks, members = request.what
        task, span = self._tasks[number], Span(request.start, request.end)
        if task.kind == "collective":
            for rank in ranks:
                self.spans[number][rank] = span
            self._arrive_all(span.end, number, ranks)
            return
        source, target = ranks
        self.spans[number][source] = span
        if task.together:
            left, end = self._in_step[number, members]
            left, end = left - 1, max(end, span.end)
            self._in_step[number, members] = left, end
            if not left:
                self._arrive_all(end, number, members)
            return
        self._arrive(span.end, number, target)
        for rank in members:
            self._clock.at(span.end, _ENDED, number, rank)

    def _arrive_all(self, end: float, number: int, members: tuple[int, ...]) -> None:
        for rank in members:
            self._arrive(end, number, rank)

    def _arrive(self, end: float, number: int, rank: int) -> None:
        self._arrivals[rank].append((end, number))
        self._clock.at(end, _ENDED, number, rank)

    def waits(self) -> list[Wait]:
        """The times when a rank neither computed nor was done: from arrival to arrival."""
        computing: list[list[Span]] = [[] for _ in range(self._num_ranks)]
        for task, spans in zip(self._tasks, self.spans, strict=True):
            if task.kind == "compute":
                for rank, span in spans.items():
                    computing[rank].append(span)
        waits = []
        for rank, spans in enumerate(computing):
            arrivals = sorted(self._arrivals[rank])
            until = Span(arrivals[-1][0], arrivals[-1][0]) if arrivals else Span(0.0, 0.0)
            now, place = 0.0, 0
            for span in [*sorted(spans), until]:
                while place < len(arrivals) and arrivals[place][0] <= span.start:
                    end, number = arrivals[place]
                    if end > now:
                        waits.append(Wait(rank, now, end, number))
                        now = end
                    place += 1
                now = max(now, span.end)
        return waits
