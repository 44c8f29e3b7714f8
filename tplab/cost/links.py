"""The links between ranks on the modelled clock: when each message and each collective runs."""

from __future__ import annotations

from typing import NamedTuple

from tplab.cost import collectives as cost
from tplab.cost.cluster import Cluster


class Span(NamedTuple):
    """The time from when something is sent until it has arrived."""

    start: float
    end: float


class Links:
    """How long each rank's outgoing ports are still busy.

    With a cluster, a message occupies the sender's port for bytes / bandwidth seconds and arrives a latency later; a
    collective takes as long as the ring algorithm over its group. On a switch, a rank has one port for all its
    messages; on a torus, one port to each other rank. Without a cluster, time counts hops: each message and each
    collective takes 1, and every pair of ranks has its own link.

    Incoming ports are not modelled: if seven ranks send to one rank at once on a switch, all seven messages arrive as
    soon as a single one would, while a real switch carries one after the other. This does not affect rings and
    collectives, in which a rank receives as much as it sends. To model it, we would need to know whose message comes
    first before placing any; but simulated ranks take turns, and a rank's clock may be far ahead of the others'.

    Call these methods in the order in which each rank issues its operations: the first call goes first.
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
        """A collective over `group`, with an input of `num_bytes` on each rank, whose last rank arrives at `ready`.

        It occupies each member's port to the next one on the group's ring.
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
        return cost.collective(op, num_bytes, group, self._cluster).seconds
