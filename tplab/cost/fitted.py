"""Constants fitted to measurements of a kind of node, beyond its data sheets, and their errors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from tplab.cost.algorithms import GATHERS, Cost, over_link
from tplab.cost.fabric import Error, Fabric
from tplab.cost.link import Link
from tplab.cost.nccl import MEASURED, Nccl
from tplab.cost.nodes import Levels, over_nodes


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

    def __post_init__(self):
        object.__setattr__(self, "errors", MappingProxyType(dict(self.errors)))

    def __reduce__(self):  # a mapping proxy cannot be pickled
        return Fitted, (self.nccl, dict(self.errors), self.source, self.borrowed)

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
