"""The links between ranks: what each message and each collective takes of them, and for how long."""

from __future__ import annotations

from typing import NamedTuple

from tplab.cost import collectives as cost
from tplab.cost.cluster import Cluster


class Route(NamedTuple):
    """What a message or a collective takes: links, as numbers, and for how long.

    owned     (link, rank): which rank's link it is; where several ranks share a link, it is there for each of them
    ways      the links, each once
    held      how long it holds all of them
    latency   how much later it arrives
    """

    owned: tuple[tuple[int, int], ...]
    ways: tuple[int, ...]
    held: float
    latency: float = 0.0


class Links:
    """Every rank's outgoing links on a cluster.

    With a cluster, a message occupies the sender's port for bytes / bandwidth seconds and arrives a latency later; a
    collective occupies each member's port to the next one on the group's ring, for as long as it takes. On a switch, a
    rank has one port for all its messages; on a torus, one port to each other rank. Without a cluster, time counts
    hops: each message and each collective takes 1, and every pair of ranks has its own link.

    Incoming ports are not modelled: if seven ranks send to one rank at once on a switch, all seven messages arrive as
    soon as a single one would, while a real switch carries one after the other. This does not affect rings and
    collectives, in which a rank receives as much as it sends.
    """

    def __init__(self, cluster: Cluster | None):
        self._cluster = cluster
        self._shared = cluster is not None and cluster.wiring == "switch"
        self._numbers: dict[tuple[int, int], int] = {}

    def message(self, source: int, target: int, num_bytes: int) -> Route:
        """A message from `source` to `target`."""
        owned = ((self._link(source, target), source),)
        if self._cluster is None:
            return _route(owned, 1.0)
        link = self._cluster.link(source, target)
        return _route(owned, num_bytes / link.bandwidth, link.latency)

    def collective(self, op: str, num_bytes: int, group: tuple[int, ...]) -> Route:
        """A collective over `group`, with an input of `num_bytes` on each rank."""
        hops = zip(group, group[1:] + group[:1], strict=True)
        return _route(tuple((self._link(a, b), a) for a, b in hops), self._seconds(op, num_bytes, group))

    def _link(self, source: int, target: int) -> int:
        way = (source, -1 if self._shared else target)
        return self._numbers.setdefault(way, len(self._numbers))

    def _seconds(self, op: str, num_bytes: int, group: tuple[int, ...]) -> float:
        if self._cluster is None:
            return 1.0
        return cost.collective(op, num_bytes, group, self._cluster).seconds


def _route(owned: tuple[tuple[int, int], ...], held: float, latency: float = 0.0) -> Route:
    return Route(owned, tuple(dict.fromkeys(way for way, _ in owned)), held, latency)
