"""Clusters: chips, the links between them, and how long each takes; every figure has its source.

On data sheets there are only two formulas:

    compute    launch + max(FLOPs / peak, bytes / memory bandwidth)     the roofline, Williams et al. 2009
    message    latency + bytes / bandwidth                              Hockney 1994

Peaks are what data sheets promise. Real programs reach only part of them, so a modelled time is a bound: it compares
designs fairly, but it does not forecast seconds. A *forecast* ("h100-measured") has constants fitted to what others
measured, and says how far off it is on rows that it has not seen: `Cluster.kind` and `Cluster.label` say which it is.

You can define your own cluster like those below, or change one figure of a known one with `dataclasses.replace`:

    mine = Cluster("mine", chip=H100, inner_link=Link("PCIe 5 x16", latency=5e-6, bandwidth=64e9))
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from types import MappingProxyType
from typing import Literal

from tplab.cost.algorithms import GATHERS, Cost, check_op, over_link
from tplab.cost.algorithms import check as check_figures
from tplab.cost.chip import Chip
from tplab.cost.data_sheets import (
    A100,
    B200,
    B300,
    ETHERNET_1G,
    H100,
    H200,
    ICI_V5E,
    INFINIBAND_HDR,
    INFINIBAND_NDR,
    INFINIBAND_XDR,
    LAPTOP,
    LAPTOP_CORE,
    LOOPBACK,
    NVLINK_3,
    NVLINK_4,
    NVLINK_5,
    TPU_V5E,
)
from tplab.cost.figures import check, si
from tplab.cost.forecast import Forecast
from tplab.cost.link import NO_LINK, Link
from tplab.cost.measured import forecast, kernels
from tplab.cost.nodes import Levels, Node, algorithms_over_nodes, over_nodes
from tplab.errors import ClusterError


@dataclass(frozen=True)
class Cluster:
    """The chips that a program runs on, one per rank, and the links that connect them.

    inner_link   between two ranks of one node
    node_size    how many consecutive ranks make a node (8: ranks 0..7, 8..15, ...); None: all ranks are one node
    outer_link   between ranks of different nodes: from one network card to another
    cards        network cards of a node: one per rank if not given. If there are fewer, neighbours share one; if there
                 are more, each rank has several and sends through all of them
    oversubscription    by how much the network between nodes is too small for all cards at once: with 2, every card
                 gets half of its bandwidth
    communication_share     the part of a chip that is taken from computing while a collective runs: 16 / 132 where its
                 kernels run on 16 of an H100's 132 SMs. Computing that is under way is slowed by it

    forecast     what was measured on such nodes; None: everything comes from data sheets

    wiring       "switch": every rank has one outgoing port, as fast as the link, which all its messages within the node
                 share (NVSwitch, Ethernet). "torus": every rank has its own link to each neighbour, so messages up and
                 down a ring do not slow each other down (TPU); the axes of the mesh are then the axes of the torus
    """

    name: str
    chip: Chip
    inner_link: Link
    node_size: int | None = None
    outer_link: Link | None = None
    wiring: Literal["switch", "torus"] = "switch"
    cards: int | None = None
    oversubscription: float = 1.0
    forecast: Forecast | None = None
    communication_share: float = 0.0

    def __post_init__(self):
        what = f"cluster {self.name!r}"
        if not isinstance(self.chip, Chip):
            raise ClusterError(f"{what}: chip is {self.chip!r}; give a tplab.cost.Chip, as H100")
        if not isinstance(self.inner_link, Link):
            raise ClusterError(f"{what}: inner_link is {self.inner_link!r}; give a tplab.cost.Link, as NVLINK_4")
        if self.wiring not in ("switch", "torus"):
            raise ClusterError(f"{what}: wiring is {self.wiring!r}; it must be 'switch' or 'torus'")
        if (self.node_size is None) != (self.outer_link is None):
            raise ClusterError(
                f"{what}: node_size is {self.node_size!r} and outer_link is {self.outer_link!r}; "
                "give both (nodes of so many ranks, and what joins them) or neither (one node holds every rank)"
            )
        check(what, "communication_share", self.communication_share, zero=True)
        if self.communication_share >= 1:
            raise ClusterError(f"{what}: communication_share is {self.communication_share!r}; it must be less than 1")
        check(what, "oversubscription", self.oversubscription)
        if self.oversubscription < 1:
            raise ClusterError(f"{what}: oversubscription is {self.oversubscription!r}; it must be 1 or more")
        if self.outer_link is None or self.node_size is None:
            if self.cards is not None or self.oversubscription != 1:
                raise ClusterError(f"{what}: one node holds every rank; cards and oversubscription need an outer_link")
            return
        if not isinstance(self.outer_link, Link):
            raise ClusterError(f"{what}: outer_link is {self.outer_link!r}; give a tplab.cost.Link")
        if isinstance(self.node_size, bool) or not isinstance(self.node_size, int) or self.node_size < 1:
            raise ClusterError(f"{what}: node_size is {self.node_size!r}; it must be a whole number, 1 or more")
        cards = self.cards
        if cards is None:
            return
        if isinstance(cards, bool) or not isinstance(cards, int) or cards < 1:
            raise ClusterError(f"{what}: cards is {cards!r}; it must be a whole number, 1 or more")
        if cards % self.node_size and self.node_size % cards:
            raise ClusterError(
                f"{what}: the {self.node_size} ranks of a node cannot share {cards} cards equally; one number must "
                "divide the other"
            )

    @property
    def kind(self) -> str:
        """Where its times come from: "data sheet", which is a bound, or "forecast", fitted to measurements."""
        return "data sheet" if self.forecast is None else "forecast"

    @property
    def label(self) -> str:
        """What a clock on this cluster is called: "modelled, data sheet", or "forecast, ±5 %"."""
        return "modelled, data sheet" if self.forecast is None else self.kind_text

    @property
    def kind_text(self) -> str:
        """The kind, and a forecast's median error in one node: "data sheet", "forecast, ±5 %"."""
        return self.kind_on(1)

    def kind_on(self, num_ranks: int) -> str:
        """The kind, and a forecast's median error on rows that it has not seen, for a program on so many ranks.

        Between nodes, the error of the network counts, too: "forecast, ±9 %". Where nobody has measured the network,
        the error is that in one node: "forecast, ±6 % in a node". Where the constants are another chip's, so is the
        error: "forecast, ±6 % on an H100".
        """
        if self.forecast is None:
            return "data sheet"
        several = self.node_size is not None and num_ranks > self.node_size
        errors = self.forecast.errors
        counts = ("collectives", "matmuls", "attention", *("network",) * several)
        median = max(error.median for name, error in errors.items() if name in counts)
        where = f" on {self.forecast.borrowed}" if self.forecast.borrowed else ""
        where += " in a node" if several and "network" not in errors else ""
        return f"forecast, ±{ceil(100 * median)} %{where}"

    def link(self, a: int, b: int) -> Link:
        """The link that carries a message from rank `a` to rank `b`. A message to itself takes no time."""
        if a < 0 or b < 0:
            raise ClusterError(f"cluster {self.name!r}: no link from rank {a} to rank {b}; ranks count from 0")
        if a == b:
            return NO_LINK
        if self.node_size is None or self.outer_link is None or a // self.node_size == b // self.node_size:
            return self.inner_link
        return self._between

    @cached_property
    def _between(self) -> Link:
        """The link from a rank to one of another node: the part of the network that is its own."""
        assert self.outer_link is not None
        per_rank = self._between_cards.bandwidth * max(1, self.num_cards // (self.node_size or 1))
        if per_rank == self.outer_link.bandwidth:
            return self.outer_link
        return replace(self.outer_link, bandwidth=per_rank)

    @cached_property
    def _between_cards(self) -> Link:
        assert self.outer_link is not None
        if self.oversubscription == 1:
            return self.outer_link
        return replace(self.outer_link, bandwidth=self.outer_link.bandwidth / self.oversubscription)

    @property
    def num_cards(self) -> int:
        """The network cards of each node; 0 if there is only one node."""
        return 0 if self.node_size is None else self.node_size if self.cards is None else self.cards

    def port(self, rank: int) -> int:
        """The rank whose way out of the node `rank` uses: its own, or the first of those that share a card."""
        if self.node_size is None or self.num_cards >= self.node_size:
            return rank
        return rank - rank % (self.node_size // self.num_cards)

    def group_link(self, ranks: Sequence[int]) -> Link:
        """The slowest link on a ring of messages over `ranks`: each of its rounds lasts as long as its slowest hop.

        This is for rings that a program builds of messages. A collective over several nodes runs many rings at once:
        `collective_seconds`.

        Slowest means the least bandwidth and, if that is equal, the most latency. One rank alone needs no link.
        """
        if len(ranks) == 0:
            raise ClusterError(f"cluster {self.name!r}: a group of no ranks has no links; give one rank at least")
        hops = zip(ranks, [*ranks[1:], ranks[0]])
        return min((self.link(a, b) for a, b in hops), key=lambda link: (link.bandwidth, -link.latency))

    def collective_seconds(self, op: str, nbytes: float, ranks: int | Sequence[int]) -> float:
        """How long one collective takes.

        op       one of tplab.cost.OPS
        nbytes   size of the whole tensor: what all_gather and gather put together, and what every rank has before an
                 all_reduce, a reduce_scatter, an all_to_all (each rank its own) or a broadcast
        ranks    a number of ranks, from rank 0 on, or their numbers
        """
        group = self._group(ranks)
        return self.collective_cost(op, nbytes / len(group) if op in GATHERS else nbytes, group).seconds

    def collective_cost(self, op: str, nbytes: float, ranks: int | Sequence[int], algorithm: str | None = None) -> Cost:
        """Seconds, hops and bytes of a collective whose ranks have an input of `nbytes` each: tplab.cost.collective."""
        group = self._group(ranks)
        levels = self._levels(group)
        if self.forecast is not None:
            check_op(op)
            check_figures(nbytes, len(group))
            if algorithm is not None:
                raise ClusterError(
                    f"algorithm is {algorithm!r}, but cluster {self.name!r} is a forecast, in which NCCL chooses; "
                    "leave it out, or take a cluster of data sheets"
                )
            return self.forecast.cost(op, nbytes, len(group), levels)
        if levels is None:
            return over_link(op, nbytes, len(group), self.inner_link, algorithm or "ring")
        costs = [
            over_nodes(op, nbytes, levels, name) for name in ([algorithm] if algorithm else algorithms_over_nodes(op))
        ]
        return min(costs, key=lambda cost: cost.seconds)

    def _group(self, ranks: int | Sequence[int]) -> Sequence[int]:
        if isinstance(ranks, int):
            group: Sequence[int] = range(0 if isinstance(ranks, bool) else ranks)
        else:
            group = ranks if isinstance(ranks, Sequence) else ()
        if not group or len(set(group)) < len(group) or min(group) < 0:
            raise ClusterError(
                f"cluster {self.name!r}: ranks is {ranks!r}; give the number of ranks, 1 or more, or their numbers, "
                "each once"
            )
        return group

    def _levels(self, group: Sequence[int]) -> Levels | None:
        """The nodes that the ranks are in; None if it is only one."""
        if self.node_size is None:
            return None
        sizes = Counter(rank // self.node_size for rank in group)
        if len(sizes) == 1:
            return None
        per_rank = max(1, self.num_cards // self.node_size)
        ports = Counter(port // self.node_size for port in {self.port(rank) for rank in group})
        nodes = [Node(sizes[node], ports[node] * per_rank) for node in sorted(sizes)]
        return Levels(nodes, self.inner_link, self._between_cards)

    def compute_seconds(
        self, flops: float, bytes: float, dtype: str = "float32", matmul: tuple[int, int, int, int] | None = None
    ) -> float:
        """The roofline of this cluster's chip: launch + max(flops / peak(dtype), bytes / memory bandwidth).

        matmul   (m, n, k, batch), if the operation is a matmul: where the chip's kernels have been measured, it takes
                 what `Chip.matmul_seconds` says
        """
        if matmul is not None and self.chip.kernels is not None:
            m, n, k, batch = matmul
            return self.chip.matmul_seconds(m, n, k, dtype, batch)
        return self.chip.seconds(flops, bytes, dtype)

    def table(self) -> str:
        """Every figure with its source, as text to print."""
        chip, lines = self.chip, [f"cluster {self.name}" + (f": {self.label}" if self.forecast else "")]
        lines.append(f"  chip  {chip.name}")
        lines += [f"        {dtype:<15}{si(rate, 'FLOP/s')}" for dtype, rate in chip.flops.items()]
        lines.append(f"        {'memory':<15}{si(chip.memory, 'B')} at {si(chip.memory_bandwidth, 'B/s')}")
        lines.append(f"        {'launch':<15}{si(chip.launch, 's')}")
        lines.append(f"        {chip.source or 'no source given'}")
        links = [(f"{self.inner_link.name}, within a node of {self.node_size or 'all'} ranks", self.inner_link)]
        if self.outer_link is not None:
            cards = f"{self.num_cards} cards per node"
            if self.oversubscription != 1:
                cards += f", oversubscribed {self.oversubscription:g} times"
            links.append((f"{self.outer_link.name}, between nodes, {cards}", self.outer_link))
        for title, link in links:
            lines.append(f"  link  {title}")
            lines.append(f"        {si(link.latency, 's')} + bytes / ({si(link.bandwidth, 'B/s')})")
            lines.append(f"        {link.source or 'no source given'}")
        return "\n".join(lines)


# --------------------------------------------------------------------------------------------------------- clusters

H100_NODE = Cluster("h100", H100, NVLINK_4, node_size=8, outer_link=INFINIBAND_NDR)
A100_NODE = Cluster("a100", A100, NVLINK_3, node_size=8, outer_link=INFINIBAND_HDR)
TPU_V5E_RING = Cluster("tpu_v5e", TPU_V5E, ICI_V5E, wiring="torus")
THIS_LAPTOP = Cluster("laptop", LAPTOP_CORE, LOOPBACK)
SLOW_ETHERNET = Cluster("ethernet", LAPTOP, ETHERNET_1G)
B200_NODE = Cluster("b200", B200, NVLINK_5, node_size=8, outer_link=INFINIBAND_NDR)
H200_NODE = replace(H100_NODE, name="h200", chip=H200)
B300_NODE = Cluster("b300", B300, NVLINK_5, node_size=8, outer_link=INFINIBAND_XDR)


def _measured(node: Cluster, gpu: str | None = None) -> Cluster:
    """The same node with constants fitted to measurements, instead of what data sheets promise.

    gpu   whose constants they are, where the node's own chip was not measured
    """
    known, chip, link = forecast(gpu or node.name), node.chip, node.inner_link
    reached = kernels(gpu or node.name)
    if gpu is not None:
        known = replace(known, borrowed=f"an {gpu.upper()}")
    sent, latency = known.nccl.message_bandwidth, known.nccl.message_latency
    whose = f", those of {known.borrowed}," if known.borrowed else ""
    fitted = f"fitted{whose} by benchmarks.fit to {known.source}"
    return replace(
        node,
        name=f"{node.name}-measured",
        chip=replace(chip, launch=reached.wide.start, kernels=reached, source=f"{chip.source}. Shares: {fitted}"),
        inner_link=Link(f"{link.name}, as NCCL uses it", latency, sent, fitted),
        forecast=known,
    )


A100_MEASURED, H100_MEASURED, B200_MEASURED = (_measured(node) for node in (A100_NODE, H100_NODE, B200_NODE))
H200_MEASURED = _measured(H200_NODE, "h100")

NAMED: Mapping[str, Cluster] = MappingProxyType(
    {
        cluster.name: cluster
        for cluster in (
            *(H100_NODE, H200_NODE, A100_NODE, B200_NODE, B300_NODE, TPU_V5E_RING, THIS_LAPTOP, SLOW_ETHERNET),
            *(H100_MEASURED, H200_MEASURED, A100_MEASURED, B200_MEASURED),
        )
    }
)
"""The clusters that `find` knows by name."""


def find(cluster: str | Cluster) -> Cluster:
    """A cluster by name; a Cluster is returned unchanged.

    "h100", "h200", "a100", "b200", "b300", "tpu_v5e", "laptop", "ethernet"      from data sheets
    "h100-measured", "a100-measured", "b200-measured"            forecasts, fitted to measurements
    "h200-measured"                                              an H100's constants, and an H200's memory
    """
    if isinstance(cluster, Cluster):
        return cluster
    known = ", ".join(repr(name) for name in NAMED)
    if not isinstance(cluster, str):
        raise ClusterError(f"cluster is {cluster!r}; give one of {known}, or a tplab.cost.Cluster of your own")
    if cluster not in NAMED:
        raise ClusterError(f"no cluster is named {cluster!r}; there are {known}; or pass a tplab.cost.Cluster")
    return NAMED[cluster]
