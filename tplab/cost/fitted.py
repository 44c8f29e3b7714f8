"""What is known of a kind of node beyond its data sheets: the constants that were fitted, and how far off they are."""

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
    errors    how far off it is: of "collectives" in a node, of "matmuls", of "attention". What is missing was not
              measured
    source    by whom it was measured
    borrowed  the chip that was measured, where it is another one: "an H100"
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
        """A collective whose ranks have an input of `nbytes` each: over the nodes in `levels`, which `fabric` joins, or
        in one of them.

        What was not measured (a broadcast, say) starts as NCCL does, and then takes what its algorithm takes over a
        link with NCCL's hops and bandwidth.
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
