"""A forecast: the constants that were fitted to measurements of a kind of node, and how far off they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil, log2
from types import MappingProxyType
from typing import NamedTuple

from tplab.cost.algorithms import GATHERS, Cost, over_link
from tplab.cost.link import Link
from tplab.cost.nccl import MEASURED, Nccl
from tplab.cost.nodes import Levels, over_nodes


class Error(NamedTuple):
    """How far off a forecast is on rows that it was not fitted to: shares of the measured time.

    median   half of the rows are nearer
    most     nine of ten rows are nearer
    """

    median: float
    most: float


@dataclass(frozen=True, slots=True)
class Fabric:
    """The network between the nodes of one cluster, as measured.

    reached      share of the cards' bandwidth that two nodes would reach
    congestion   with k nodes, bandwidth falls as 1 / k^congestion: others use the network too, and the slowest
                 of more and more cards sets the pace
    """

    reached: float = 1.0
    congestion: float = 0.0


@dataclass(frozen=True, slots=True)
class Forecast:
    """What is known of a kind of node beyond its data sheets.

    nccl      collectives in a node
    fabric    collectives between nodes; None: nobody has measured it, so the cards count as on their data sheet
    errors    how far off it is: of "collectives", "matmuls", "network". What is missing was not measured
    source    by whom it was measured
    borrowed  the chip that was measured, where it is another one: "an H100"
    """

    nccl: Nccl
    fabric: Fabric | None
    errors: Mapping[str, Error] = field(hash=False)
    source: str
    borrowed: str = ""

    def __post_init__(self):
        object.__setattr__(self, "errors", MappingProxyType(dict(self.errors)))

    def __reduce__(self):  # a mapping proxy cannot be pickled
        return Forecast, (self.nccl, self.fabric, dict(self.errors), self.source, self.borrowed)

    def cost(self, op: str, nbytes: float, num_ranks: int, levels: Levels | None) -> Cost:
        """A collective whose ranks have an input of `nbytes` each, over the nodes in `levels`, or in one of them.

        What was not measured (a broadcast, say) starts as NCCL does, and then takes what its algorithm takes over a
        link with NCCL's hops and bandwidth.
        """
        if num_ranks == 1:
            return Cost(0.0, 0, 0)
        link = Link("NCCL's ring", self.nccl.hop, self.nccl.bandwidth)
        if op not in MEASURED:
            if levels is None:
                cost = over_link(op, nbytes, num_ranks, link, "ring")
            else:
                cost = over_nodes(op, nbytes, self._levels(levels), "ring")
            return Cost(self.nccl.start + cost.seconds, cost.hops, cost.bytes, cost.algorithm)
        whole = nbytes * num_ranks if op in GATHERS else nbytes
        ring = over_link(op, nbytes, num_ranks, link, "ring")
        taken = self.nccl.taken(op, whole, num_ranks)
        if levels is None:
            return Cost(taken.seconds, ring.hops, ring.bytes, taken.protocol)
        if op == "all_to_all":
            apart = over_nodes(op, nbytes, self._levels(levels), "ring")
            return Cost(max(taken.seconds, self.nccl.start + apart.seconds), ring.hops, ring.bytes, taken.protocol)
        seconds, protocol = self._ring(op, whole, levels, taken.seconds), taken.protocol
        if op == "all_reduce":
            tree = self._tree(whole, levels)
            if tree < seconds:
                seconds, protocol = tree, "tree"
        return Cost(seconds, ring.hops, ring.bytes, protocol)

    def _ring(self, op: str, whole: float, levels: Levels, inside: float) -> float:
        """As in one node; between nodes a hop takes longer, and bytes may."""
        laps = 2 if op == "all_reduce" else 1
        hops, outer = laps * (levels.num_ranks - 1), laps * (len(levels.nodes) - 1)
        far = outer * max(0.0, levels.outer.latency - self.nccl.hop)
        carried = hops / levels.num_ranks * whole
        between = self.nccl.start + hops * self.nccl.hop + carried * self._per_byte(levels)
        return far + max(inside, between)

    def _tree(self, whole: float, levels: Levels) -> float:
        """Added up in each node, and then in trees over the nodes.

        Measured on real fabrics, an all_reduce takes the network as long as an all_gather of the same tensor, and not
        twice as long. So the tensor counts once.
        """
        most = max(node.ranks for node in levels.nodes)
        inside = self.nccl.taken("all_reduce", whole, most).seconds
        far = 2 * ceil(log2(len(levels.nodes))) * levels.outer.latency
        return far + max(inside, self.nccl.start + 2 * (most - 1) * self.nccl.hop + whole * self._per_byte(levels))

    def _per_byte(self, levels: Levels) -> float:
        return 1 / (min(node.cards for node in levels.nodes) * self._levels(levels).outer.bandwidth)

    def _levels(self, levels: Levels) -> Levels:
        """With the bandwidth that the network really has."""
        fabric = self.fabric or Fabric()
        reached = fabric.reached / len(levels.nodes) ** fabric.congestion
        outer = Link(levels.outer.name, levels.outer.latency, levels.outer.bandwidth * reached)
        return Levels(levels.nodes, levels.inner, outer)
