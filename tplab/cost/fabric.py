"""Collectives as measured (`Fitted`), and the network between nodes: a hop's cost, and the share of cards' bandwidth.

R ranks in k nodes, each with g ranks and c cards of its own; S: bytes of the whole tensor; inside(S): NCCL's time in
one node of g ranks; start: the time before its first byte. A card gives B = its bandwidth x reached / k^fall. An
all_reduce takes 2 laps or the tree, whichever is faster; an all_gather and a reduce_scatter take 1 lap.

    ring         laps [(k-1) hop + (R-k) near] + max(inside(S), start + laps (R-1)/R S / (c B))
    tree         2 ceil(log2 k) tree + max(inside(S), start + S / (c B))
    all_to_all   begin + (R-1) peer + max(inside of the own node's part, S (R-g)/R / (card x by_peers))

The two levels work at the same time, so bytes take as long as the slower level. Latencies do not overlap: a ring over
nodes waits for each of its hops. Runs, traces and forecasts all use this model, through `Cluster.collective_cost`.

Sources. NCCL builds its rings and trees this way (src/graph/connect.cc); the formulas were chosen on the tables in
`measured/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from math import ceil, log2
from typing import TYPE_CHECKING, NamedTuple

from tplab.cost.algorithms import GATHERS, Cost, over_link
from tplab.cost.link import Link, check
from tplab.cost.nccl import MEASURED, Nccl
from tplab.cost.nodes import Levels, over_nodes
from tplab.errors import ClusterError

if TYPE_CHECKING:
    from tplab.cost.nccl import Nccl
    from tplab.cost.nodes import Levels


class Error(NamedTuple):
    """The error of a forecast on rows that it was not fitted to, as shares of the measured time.

    median   of the rows' errors
    most     the 90th percentile of the rows' errors
    """

    median: float
    most: float


@dataclass(frozen=True, slots=True)
class Fabric:
    """A network between nodes, in addition to the data sheet of its cards (`Cluster.outer_link`).

    name       its common name: "InfiniBand NDR"
    reached    share of a card's bandwidth that two nodes would reach
    fall       with k nodes, bandwidth falls as 1 / k^fall: others use the network too, and the slowest of ever more
               cards sets the pace
    hop        s for a hop to another node
    near       s for each hop within a node, on a ring over several nodes
    tree       s for each step of a tree over the nodes
    begin      s before an all_to_all's first byte
    peer       s for each other rank in an all_to_all
    by_peers   share of a card's bandwidth that an all_to_all reaches
    error      of its forecasts; None: it has not been measured
    source     where the constants come from
    """

    name: str
    reached: float = 1.0
    fall: float = 0.0
    hop: float = 0.0
    near: float = 0.0
    tree: float = 0.0
    begin: float = 0.0
    peer: float = 0.0
    by_peers: float = 1.0
    error: Error | None = None
    source: str = ""

    def __post_init__(self):
        for name in [one.name for one in fields(self) if one.name not in ("name", "error", "source")]:
            check(f"fabric {self.name!r}", name, getattr(self, name), zero=True)
        for name in ("reached", "by_peers"):
            if getattr(self, name) <= 0:
                raise ClusterError(
                    f"fabric {self.name!r}: {name} is 0; nothing would ever arrive. Give a share above 0"
                )

    def link(self, card: Link, nodes: int = 2) -> Link:
        """The link of a message between two nodes, while `nodes` nodes use the network."""
        return Link(
            f"{card.name}, as {self.name} reaches it", self.hop, card.bandwidth * self._share(nodes), self.source
        )

    def cost(self, op: str, whole: float, levels: Levels, nccl: Nccl) -> Cost:
        """An all_reduce, all_gather, reduce_scatter or all_to_all of `whole` bytes over the nodes in `levels`.

        Nodes may have different numbers of ranks: the node with the fewest cards sets the pace, and the longest chain
        of ranks the latency.
        """
        R, k = levels.num_ranks, len(levels.nodes)
        most = max(node.ranks for node in levels.nodes)
        laps = 2 if op == "all_reduce" else 1
        sent = laps * (R - 1) / R * whole
        if op == "all_to_all":
            return self._all_to_all(whole, levels, nccl)
        inside = nccl.taken(op, whole, most)
        per_byte = 1 / (min(node.cards for node in levels.nodes) * levels.outer.bandwidth * self._share(k))
        latency = laps * ((k - 1) * self.hop + (R - k) * self.near)
        seconds = latency + max(inside.seconds, nccl.start + sent * per_byte)
        ring = Cost(seconds, laps * (R - 1), sent, "ring", latency)
        if op != "all_reduce":
            return ring
        latency = 2 * ceil(log2(k)) * self.tree
        seconds = latency + max(inside.seconds, nccl.start + whole * per_byte)
        return min(
            ring, replace(ring, seconds=seconds, algorithm="tree", latency=latency), key=lambda cost: cost.seconds
        )

    def _all_to_all(self, whole: float, levels: Levels, nccl: Nccl) -> Cost:
        """Each rank sends to other nodes through its share of the cards, and to its own node over its own link."""
        R, slowest = levels.num_ranks, 0.0
        for node in levels.nodes:
            inside = nccl.taken("all_to_all", whole * node.ranks / R, node.ranks).seconds
            own = node.cards / node.ranks * levels.outer.bandwidth * self.by_peers
            slowest = max(slowest, inside, whole * (R - node.ranks) / R / own)
        latency = self.begin + (R - 1) * self.peer
        return Cost(latency + slowest, R - 1, (R - 1) / R * whole, "ring", latency)

    def _share(self, nodes: int) -> float:
        return self.reached / nodes**self.fall


@dataclass(frozen=True, slots=True)
class Fitted:
    """Collectives as measured.

    nccl      collectives in a node
    errors    of forecasts of "collectives" in a node, "matmuls" and "attention"; those not measured are missing
    source    who measured it
    borrowed  the chip that was measured, if it is another one: "an H100"
    """

    nccl: Nccl
    errors: Mapping[str, Error] = field(hash=False)
    source: str
    borrowed: str = ""

    def cost(self, op: str, nbytes: float, num_ranks: int, levels: Levels | None, fabric: Fabric | None) -> Cost:
        """A collective with an input of `nbytes` per rank: over the nodes in `levels`, connected by `fabric`, or in one
        node.

        A collective that was not measured, such as a broadcast, takes NCCL's start, and then the time of its algorithm
        over a link with NCCL's hop and bandwidth.
        """
        if num_ranks == 1:
            return Cost(0.0, 0, 0)
        link = Link("NCCL's ring", self.nccl.hop, self.nccl.bandwidth)
        if op not in MEASURED:
            if levels is None or fabric is None:
                cost = over_link(op, nbytes, num_ranks, link, "ring")
            else:
                outer = fabric.link(levels.outer, len(levels.nodes))
                cost = over_nodes(op, nbytes, Levels(levels.nodes, link, outer), "ring")
            return Cost(self.nccl.start + cost.seconds, cost.hops, cost.bytes, cost.algorithm)
        whole = nbytes * num_ranks if op in GATHERS else nbytes
        if levels is not None and fabric is not None:
            return fabric.cost(op, whole, levels, self.nccl)
        ring, taken = over_link(op, nbytes, num_ranks, link, "ring"), self.nccl.taken(op, whole, num_ranks)
        return Cost(taken.seconds, ring.hops, ring.bytes, taken.protocol)
