"""The links between ranks: which ports and network cards each message and each collective takes, and for how long."""

from __future__ import annotations

from typing import NamedTuple

from tplab.cost import collectives as cost
from tplab.cost.cluster import Cluster


class Route(NamedTuple):
    """The ports and cards, as numbers, that a message or a collective occupies, and for how long.

    owned     (port or card, rank) pairs; a card that several ranks share appears once for each of them
    ways      these ports and cards, each once
    held      how long it holds all of them
    latency   the time from their release to its arrival
    slows     the ranks whose computing it slows meanwhile
    """

    owned: tuple[tuple[int, int], ...]
    ways: tuple[int, ...]
    held: float
    latency: float = 0.0
    slows: tuple[int, ...] = ()


class Links:
    """The outgoing ports and network cards of a cluster's ranks. Each carries one message or collective at a time.

    On a switch, a rank has a port for all its messages within its node, and a network card for those to other nodes;
    with fewer cards than ranks, neighbours share one (`Cluster.cards`). On a torus, it has a port to each other rank.
    A message occupies its sender's port or card for bytes / bandwidth seconds and arrives a latency later. A collective
    occupies each member's port for its whole duration, and each member's card too if they are in several nodes. So the
    collectives of one group run one after another.
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
        held = 1.0 if self._cluster is None else cost.collective(op, num_bytes, group, self._cluster).seconds
        return _route(tuple(owned), held, slows=group if self.share else ())

    def _link(self, source: int, target: int) -> int:
        """The port or card that a message from one rank to another occupies."""
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


def _route(owned: tuple[tuple[int, int], ...], held: float, latency: float = 0.0, slows: tuple[int, ...] = ()) -> Route:
    return Route(owned, tuple(dict.fromkeys(way for way, _ in owned)), held, latency, slows)
