"""The links between ranks on the modelled clock: when each message and each collective runs."""

from __future__ import annotations

from typing import NamedTuple

from tplab.cost import collectives as cost
from tplab.cost.cluster import Cluster


class Span(NamedTuple):
    """From when something is on its way until it has arrived."""

    start: float
    end: float


class Links:
    """Until when each rank's way out is taken.

    With a cluster, a message holds the sender's way out for bytes / bandwidth seconds and arrives a latency later; a
    collective takes what the ring algorithm costs over its group. On a switch a rank has one way out for all its
    messages; on a torus, one to each other rank. Without a cluster time counts hops: each message, and each collective,
    takes 1, and every pair of ranks has a way of its own.

    Ways in are not taken: on a switch, seven ranks that send to one at once are done as soon as one of them, where a
    real one carries one after the other. Rings and collectives, in which a rank receives as much as it sends, are not
    touched by it. Whose message comes first would have to be known before any is placed; but ranks that take turns ask
    in the order of turns, in which one may be far ahead of the others on the clock.

    Ask in the order in which each rank issues: what was asked for first goes first.
    """

    def __init__(self, cluster: Cluster | None):
        self._cluster = cluster
        self._shared = cluster is not None and cluster.wiring == "switch"
        self._free: dict[tuple[int, int], float] = {}
        self._seconds: dict[tuple[str, int, tuple[int, ...]], float] = {}

    def message(self, source: int, target: int, num_bytes: int, ready: float) -> tuple[float, float]:
        """When a message from `source` to `target`, which can leave at `ready`, is on its way: (start, end)."""
        way = (source, -1) if self._shared else (source, target)
        free = self._free.get(way, 0.0)
        start = ready if ready > free else free
        if self._cluster is None:
            end = self._free[way] = start + 1.0
            return start, end
        link = self._cluster.link(source, target)
        carried = num_bytes / link.bandwidth
        self._free[way] = start + carried
        return start, start + carried + link.latency

    def collective(self, op: str, num_bytes: int, group: tuple[int, ...], ready: float) -> Span:
        """A collective over `group`, each rank putting in `num_bytes`, whose last rank is there at `ready`.

        It holds each member's way to the next one on the group's ring.
        """
        ways = [(a, -1 if self._shared else b) for a, b in zip(group, group[1:] + group[:1], strict=True)]
        start = max(ready, *(self._free.get(way, 0.0) for way in ways))
        key = (op, num_bytes, group)
        seconds = self._seconds.get(key)
        if seconds is None:
            seconds = self._seconds[key] = self._collective_seconds(*key)
        for way in ways:
            self._free[way] = start + seconds
        return Span(start, start + seconds)

    def _collective_seconds(self, op: str, num_bytes: int, group: tuple[int, ...]) -> float:
        if self._cluster is None:
            return 1.0
        return cost.collective(op, num_bytes, len(group), self._cluster.group_link(group)).seconds
