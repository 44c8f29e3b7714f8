"""The links between ranks: which ports and network cards each message and each collective takes, and for how long."""

from __future__ import annotations

from typing import NamedTuple

from tplab.cost import collectives as cost
from tplab.cost.cluster import Cluster


class Route(NamedTuple):
    """What a message or a collective takes: ports and cards, as numbers, and for how long.

    owned     (port or card, rank): whose it is; a card that several ranks share is there for each of them
    ways      these ports and cards, each once
    held      how long it holds all of them
    latency   how much later it arrives
    slows     the ranks whose computing it slows meanwhile
    """

    owned: tuple[tuple[int, int], ...]
    ways: tuple[int, ...]
    held: float
    latency: float = 0.0
    slows: tuple[int, ...] = ()


class Links:
    """The ways out of every rank of a cluster, each of which carries one thing after another, whatever group it is for.

    On a switch, a rank has a port for all its messages within its node, and a network card for those to other nodes;
    with fewer cards than ranks, neighbours share one (`Cluster.cards`). On a torus, it has a port to each other rank.
    A message occupies its sender's port or card for bytes / bandwidth seconds and arrives a latency later. A collective
    occupies each member's port for as long as it takes, and each member's card too if they are in several nodes: so the
    collectives of one group, which share all of these, run one after another.
    Without a cluster, time counts hops: each message and each collective takes 1, and every pair of ranks has its own
    link.

    Incoming ports are not modelled: if seven ranks send to one rank at once on a switch, all seven messages arrive as
    soon as a single one would, while a real switch carries one after the other. This does not affect rings and
    collectives, in which a rank receives as much as it sends.
    """

    def __init__(self, cluster: Cluster | None):
        self.share = 0.0 if cluster is None else cluster.communication_share
        self._cluster = cluster
        self._shared = cluster is not None and cluster.wiring == "switch"
        self._numbers: dict[tuple[str | int, ...], int] = {}

    def message(self, source: int, target: int, num_bytes: int) -> Route:
        """A message from `source` to `target`."""
        owned = ((self._link(source, target), source),)
        if self._cluster is None:
            return _route(owned, 1.0)
        link = self._cluster.link(source, target)
        return _route(owned, num_bytes / link.bandwidth, link.latency)

    def collective(self, op: str, num_bytes: int, group: tuple[int, ...]) -> Route:
        """A collective over `group`, with an input of `num_bytes` on each rank."""
        if self._shared:
            owned = [(self._number("port", rank), rank) for rank in group]
            if len({self._node(rank) for rank in group}) > 1:
                owned += [(self._card(rank), rank) for rank in group]
        else:
            owned = [(self._link(a, b), a) for a, b in zip(group, group[1:] + group[:1], strict=True)]
        slows = group if self.share else ()
        return _route(tuple(owned), self._seconds(op, num_bytes, group), slows=slows)

    def _link(self, source: int, target: int) -> int:
        """What a message takes from one rank to another."""
        if not self._shared:
            return self._number("port", source, target)
        return self._number("port", source) if self._node(source) == self._node(target) else self._card(source)

    def _card(self, rank: int) -> int:
        assert self._cluster is not None
        return self._number("card", self._cluster.port(rank))

    def _node(self, rank: int) -> int:
        size = None if self._cluster is None else self._cluster.node_size
        return 0 if size is None else rank // size

    def _number(self, *way: str | int) -> int:
        return self._numbers.setdefault(way, len(self._numbers))

    def _seconds(self, op: str, num_bytes: int, group: tuple[int, ...]) -> float:
        if self._cluster is None:
            return 1.0
        return cost.collective(op, num_bytes, group, self._cluster).seconds


def _route(owned: tuple[tuple[int, int], ...], held: float, latency: float = 0.0, slows: tuple[int, ...] = ()) -> Route:
    return Route(owned, tuple(dict.fromkeys(way for way, _ in owned)), held, latency, slows)
