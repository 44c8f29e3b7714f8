"""When each task of a traced program runs: a list scheduler on the clock of a cluster."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from tplab.cost.cluster import Cluster
from tplab.cost.links import Links, Span
from tplab.jax.tracing.tasks import Task


class Wait(NamedTuple):
    """A rank waited until a message or a collective, the task of that number, reached it."""

    rank: int
    start: float
    end: float
    task: int


_ENDED, _READY, _NEXT, _SEND = range(4)  # the order at one instant, so that all that is ready goes first


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
        self._arrivals: list[list[tuple[float, int]]] = [[] for _ in range(num_ranks)]
        self._agenda: list[tuple[float, int, int, int]] = []
        self._queues: list[list[int]] = [[] for _ in range(num_ranks)]
        self._busy = [False] * num_ranks
        self._needed_by: dict[int, list[int]] = defaultdict(list)
        self._missing: dict[tuple[int, int], int] = {}
        self._ready_at: dict[tuple[int, tuple[int, ...]], list[float]] = defaultdict(list)
        for number in sorted(alive):
            self._enter(number)
        self._run()

    def _enter(self, number: int) -> None:
        task = self._tasks[number]
        for need in task.needs:
            self._needed_by[need].append(number)
        for rank in task.ranks:
            # a rank that took another branch, and never did what is needed here, does not wait for it
            missing = sum(rank in self._tasks[need].ranks for need in task.needs)
            self._missing[number, rank] = missing
            if not missing:
                heappush(self._agenda, (0.0, _READY, number, rank))

    def _run(self) -> None:
        while self._agenda:
            now, what, number, rank = heappop(self._agenda)
            if what == _NEXT:
                self._compute_next(now, rank)
            elif what == _READY:
                self._begin(now, number, rank)
            elif what == _SEND:
                self._send(now, number, rank)
            else:
                if self._tasks[number].kind == "compute":
                    self._busy[rank] = False
                    heappush(self._agenda, (now, _NEXT, -1, rank))
                self._release(now, number, rank)

    def _release(self, now: float, number: int, rank: int) -> None:
        """The task has ended on this rank: tasks that needed nothing else can begin."""
        for following in self._needed_by[number]:
            key = (following, rank)
            if key in self._missing:
                self._missing[key] -= 1
                if not self._missing[key]:
                    heappush(self._agenda, (now, _READY, following, rank))

    def _begin(self, now: float, number: int, rank: int) -> None:
        if self._tasks[number].kind == "compute":
            heappush(self._queues[rank], number)
            heappush(self._agenda, (now, _NEXT, -1, rank))
        else:
            heappush(self._agenda, (now, _SEND, number, rank))

    def _compute_next(self, now: float, rank: int) -> None:
        if self._busy[rank] or not self._queues[rank]:
            return
        number = heappop(self._queues[rank])
        task = self._tasks[number]
        seconds = task.seconds or 0.0
        if self._cluster is not None:
            seconds = self._cluster.compute_seconds(task.flops, task.num_bytes, task.dtype, task.matmul)
        self._busy[rank] = True
        self.spans[number][rank] = Span(now, now + seconds)
        heappush(self._agenda, (now + seconds, _ENDED, number, rank))

    def _send(self, now: float, number: int, rank: int) -> None:
        task = self._tasks[number]
        if task.kind == "collective" or task.together:
            self._join(now, number, rank)
            return
        gets_zeros = rank not in {target for _, target in task.pairs}
        # When hops are counted, a round ends with its messages: otherwise a tree's root would send to all at once.
        only_sends = gets_zeros and self._cluster is None and rank in {source for source, _ in task.pairs}
        if gets_zeros and not only_sends:
            heappush(self._agenda, (now, _ENDED, number, rank))  # it need not wait for zeros
        for source, target in task.pairs:
            if source != rank:
                continue
            if source == target:
                heappush(self._agenda, (now, _ENDED, number, rank))
                continue
            span = self.spans[number][rank] = Span(*self._links.message(source, target, task.num_bytes, now))
            self._arrive(span.end, number, target)
            if only_sends:
                heappush(self._agenda, (span.end, _ENDED, number, rank))

    def _join(self, now: float, number: int, rank: int) -> None:
        task = self._tasks[number]
        group = next(group for group in task.groups if rank in group)
        arrived = self._ready_at[number, group]
        arrived.append(now)
        if len(arrived) < len(group):
            return
        if task.together:
            self._send_all(max(arrived), number, group)
            return
        span = self._links.collective(task.costs, task.num_bytes, group, max(arrived))
        for member in group:
            self.spans[number][member] = span
            self._arrive(span.end, number, member)

    def _send_all(self, now: float, number: int, group: tuple[int, ...]) -> None:
        """Lock-step: the messages leave when all ranks are here, and no rank goes on before the last has arrived."""
        task, end = self._tasks[number], now
        for source, target in sorted(task.pairs):
            if source in group and source != target:
                span = self.spans[number][source] = Span(*self._links.message(source, target, task.num_bytes, now))
                end = max(end, span.end)
        for member in group:
            self._arrive(end, number, member)

    def _arrive(self, end: float, number: int, rank: int) -> None:
        self._arrivals[rank].append((end, number))
        heappush(self._agenda, (end, _ENDED, number, rank))

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
