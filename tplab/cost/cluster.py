"""Clusters: chips and the links between them, with a source for every figure.

On data sheets there are only two formulas:

    compute    launch + max(FLOPs / peak, bytes / memory bandwidth)     the roofline, Williams et al. 2009
    message    latency + bytes / bandwidth                              Hockney 1994

Peaks come from data sheets. Real programs reach only part of them, and their small operations may start sooner than
is assumed here. So times at peak rates compare designs, but are neither forecasts nor bounds. A *forecast*
("h100-measured") has constants fitted to published measurements, and states its error on rows that it has not seen:
`Cluster.kind` and `Cluster.label` say which it is.

A cluster is a chip, a node and a fabric: what computes, what connects the ranks of a node, and what connects nodes.
`find` knows some of each by name (`tplab.cost.named`). You can define your own, or change one figure of a known one
with `dataclasses.replace`:

    mine = Cluster("mine", chip=H100, inner_link=Link("PCIe 5 x16", latency=5e-6, bandwidth=64e9))
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import Literal

from tplab.cost.algorithms import GATHERS, Cost, check_op, over_link
from tplab.cost.algorithms import check as check_figures
from tplab.cost.attention import FusedAttention
from tplab.cost.chip import Chip
from tplab.cost.fabric import Fabric, Fitted
from tplab.cost.link import NO_LINK, Link, check, si
from tplab.cost.nodes import Levels, Node, algorithms_over_nodes, over_nodes
from tplab.errors import ClusterError, one_of


@dataclass(frozen=True)
class Cluster:
    """The chips that a program runs on, one per rank, and the links that connect them.

    inner_link   between two ranks of one node
    node_size    how many consecutive ranks form a node (8: ranks 0..7, 8..15, ...); None: all ranks are in one node
    outer_link   between ranks of different nodes: from one network card to another
    cards        network cards of a node: one per rank if not given. If there are fewer, neighbours share one; if there
                 are more, each rank has several and sends through all of them
    oversubscription    by how much the network between nodes is too small for all cards at once: with 2, every card
                 gets half of its bandwidth
    communication_share     the part of a chip that a running collective takes from computing: 16 / 132 if its kernels
                 run on 16 of an H100's 132 SMs. A computation in progress slows down accordingly

    fitted       constants measured in such a node; None: everything comes from data sheets
    fabric       what was measured of the network between nodes. A fitted cluster without one takes the latency and the
                 bandwidth of outer_link for it. Data sheets alone have none

    wiring       "switch": every rank has one outgoing port, as fast as the link, which all its messages within the node
                 share (NVSwitch, Ethernet). "torus": every rank has its own link to each neighbour, so messages up and
                 down a ring do not slow each other down (TPU); the axes of the mesh are then the axes of the torus.
                 Collectives go around in one direction: that is what they take along an axis whose ends are not joined
                 (of a v5e, one of fewer than 16 chips), and twice what XLA's take along one that is a ring, where both
                 directions carry half each (Austin et al. 2025, How to Scale Your Model, part 3)
    """

    name: str
    chip: Chip
    inner_link: Link
    node_size: int | None = None
    outer_link: Link | None = None
    wiring: Literal["switch", "torus"] = "switch"
    cards: int | None = None
    oversubscription: float = 1.0
    fitted: Fitted | None = None
    communication_share: float = 0.0
    fabric: Fabric | None = None

    def __post_init__(self):
        what = f"cluster {self.name!r}"
        if not isinstance(self.chip, Chip):
            raise ClusterError(f"{what}: chip is {self.chip!r}; give a tplab.cost.Chip, as H100")
        if not isinstance(self.inner_link, Link):
            raise ClusterError(f"{what}: inner_link is {self.inner_link!r}; give a tplab.cost.Link, as NVLINK_4")
        one_of(f"{what}: wiring", self.wiring, ("switch", "torus"), ClusterError)
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
        if self.fabric is not None and (self.fitted is None or self.outer_link is None):
            lacks = "fitted" if self.fitted is None else "outer_link"
            raise ClusterError(
                f"{what}: its fabric, {self.fabric.name}, is what was measured of a network, and it has no {lacks}; "
                'give both, or take a measured cluster, as find("h100-measured")'
            )
        if self.outer_link is None or self.node_size is None:
            if self.cards is not None or self.oversubscription != 1:
                raise ClusterError(f"{what}: one node holds every rank; cards and oversubscription need an outer_link")
            return
        if not isinstance(self.outer_link, Link):
            raise ClusterError(f"{what}: outer_link is {self.outer_link!r}; give a tplab.cost.Link")
        for name, number in (("node_size", self.node_size), ("cards", self.num_cards)):
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ClusterError(f"{what}: {name} is {number!r}; it must be a whole number, 1 or more")
        if self.num_cards % self.node_size and self.node_size % self.num_cards:
            raise ClusterError(
                f"{what}: the {self.node_size} ranks of a node cannot share {self.num_cards} cards equally; one number "
                "must divide the other"
            )

    @property
    def kind(self) -> str:
        """The source of its times: "data sheet", at peak rates, or "forecast", fitted to measurements."""
        return "data sheet" if self.fitted is None else "forecast"

    @property
    def label(self) -> str:
        """The name of a clock on this cluster: "modelled, data sheet", or "forecast, ±5 %"."""
        return "modelled, data sheet" if self.fitted is None else self.kind_on(1)

    def kind_on(self, num_ranks: int) -> str:
        """The kind, and a forecast's median error on rows that it has not seen, for a program on `num_ranks` ranks.

        For several nodes it names the network and includes its error: "EFA, forecast, ±8 %". If the network has not
        been measured, the error is that in one node: "InfiniBand HDR, forecast, ±6 % in a node". If the constants are
        those of another chip, so is the error: "forecast, ±6 % on an H100".
        """
        several = self.node_size is not None and num_ranks > self.node_size
        where = f"{self.network}, " if several else ""
        if self.fitted is None:
            return f"{where}data sheet"
        counts = ("collectives", "matmuls", "attention")
        errors = [error for name, error in self.fitted.errors.items() if name in counts]
        joined = self.fabric.error if self.fabric else None
        if several and joined is not None:
            errors.append(joined)
        median = ceil(100 * max(error.median for error in errors or self.fitted.errors.values()))
        of = f" on {self.fitted.borrowed}" if self.fitted.borrowed else ""
        return f"{where}forecast, ±{median} %{of}{' in a node' if several and joined is None else ''}"

    @property
    def network(self) -> str:
        """The name of the network between nodes: the measured fabric, or the link."""
        return "no network" if self.outer_link is None else (self.fabric or self.outer_link).name

    def link(self, a: int, b: int, *, at_once: bool = False) -> Link:
        """The link that carries a message from rank `a` to rank `b`. A message to itself takes no time.

        at_once   every rank of their nodes sends as much at the same time, so ranks that share a card split it
        """
        if a < 0 or b < 0:
            raise ClusterError(f"cluster {self.name!r}: no link from rank {a} to rank {b}; ranks count from 0")
        if a == b:
            return NO_LINK
        if self.node_size is None or self.outer_link is None or a // self.node_size == b // self.node_size:
            return self.inner_link
        part = self.num_cards / self.node_size
        if not at_once or part >= 1:
            return self._between
        return replace(self._between, bandwidth=self._between.bandwidth * part)

    @cached_property
    def _between(self) -> Link:
        """The link from a rank to one of another node, for the rank's own share of the network."""
        link = self._between_cards if self._fabric is None else self._fabric.link(self._between_cards)
        cards = max(1, self.num_cards // (self.node_size or 1))
        return link if cards == 1 else replace(link, bandwidth=link.bandwidth * cards)

    @cached_property
    def _between_cards(self) -> Link:
        assert self.outer_link is not None
        if self.oversubscription == 1:
            return self.outer_link
        return replace(self.outer_link, bandwidth=self.outer_link.bandwidth / self.oversubscription)

    @cached_property
    def _fabric(self) -> Fabric | None:
        """The measured network; for a fitted cluster without one, the figures of its cards' data sheet."""
        if self.fabric is not None or self.fitted is None or self.outer_link is None:
            return self.fabric
        latency = self.outer_link.latency
        return Fabric(self.outer_link.name, hop=latency, near=self.fitted.nccl.hop, tree=latency, begin=latency)

    @property
    def num_cards(self) -> int:
        """The network cards of each node; 0 if there is only one node."""
        return 0 if self.node_size is None else self.node_size if self.cards is None else self.cards

    def port(self, rank: int) -> int:
        """The rank whose network card `rank` uses: itself, or the first rank of those that share a card."""
        if self.node_size is None or self.num_cards >= self.node_size:
            return rank
        return rank - rank % (self.node_size // self.num_cards)

    def group_link(self, ranks: Sequence[int]) -> Link:
        """The slowest link on a ring of messages over `ranks`: each round lasts as long as its slowest hop.

        This is for rings that a program builds from messages. A collective over several nodes runs many rings at once:
        see `collective_seconds`.

        Slowest means the least bandwidth and, if that is equal, the most latency. A single rank needs no link.
        """
        if len(ranks) == 0:
            raise ClusterError(f"cluster {self.name!r}: a group of no ranks has no links; give one rank at least")
        hops = zip(ranks, [*ranks[1:], ranks[0]])
        return min((self.link(a, b) for a, b in hops), key=lambda link: (link.bandwidth, -link.latency))

    def collective_seconds(self, op: str, nbytes: float, ranks: int | Sequence[int], *, at_once: bool = False) -> float:
        """How long one collective takes.

        op       one of tplab.cost.OPS
        nbytes   size of the whole tensor: the result of all_gather and gather, and the input of each rank of an
                 all_reduce, a reduce_scatter, an all_to_all or a broadcast
        ranks    a number of ranks, from rank 0 on, or a sequence of ranks
        at_once  the other ranks of these nodes do the same at the same time, in their own groups, as in a training
                 step, so ranks that share a card split it. Otherwise this collective has the cards to itself
        """
        group = self._group(ranks)
        return self.collective_cost(
            op, nbytes / len(group) if op in GATHERS else nbytes, group, at_once=at_once
        ).seconds

    def collective_cost(
        self,
        op: str,
        nbytes: float,
        ranks: int | Sequence[int],
        algorithm: str | None = None,
        *,
        at_once: bool = False,
    ) -> Cost:
        """Seconds, hops and bytes of a collective whose ranks have an input of `nbytes` each: tplab.cost.collective."""
        group = self._group(ranks)
        check_op(op)
        check_figures(nbytes, len(group))
        levels = self._levels(group, at_once)
        if self.fitted is not None:
            if algorithm is not None:
                raise ClusterError(
                    f"algorithm is {algorithm!r}, but cluster {self.name!r} is a forecast, in which NCCL chooses; "
                    "leave it out, or take a cluster of data sheets"
                )
            return self.fitted.cost(op, nbytes, len(group), levels, self._fabric)
        if levels is None:
            return over_link(op, nbytes, len(group), self.inner_link, algorithm or "ring")
        names = [algorithm] if algorithm else algorithms_over_nodes(op)
        return min((over_nodes(op, nbytes, levels, name) for name in names), key=lambda cost: cost.seconds)

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

    @cached_property
    def _known_levels(self) -> dict[tuple[Sequence[int], bool], Levels | None]:
        return {}

    def _levels(self, group: Sequence[int], at_once: bool) -> Levels | None:
        """The nodes that the ranks are in; None if they are all in one."""
        if self.node_size is None:
            return None
        key = (group if isinstance(group, (tuple, range)) else tuple(group)), at_once
        if key not in self._known_levels:
            if len(self._known_levels) > 4096:
                self._known_levels.clear()
            self._known_levels[key] = self._levels_of(group, self.node_size, at_once)
        return self._known_levels[key]

    def _levels_of(self, group: Sequence[int], node_size: int, at_once: bool) -> Levels | None:
        sizes = Counter(rank // node_size for rank in group)
        if len(sizes) == 1:
            return None
        if at_once:
            own = self.num_cards / node_size
            nodes = [Node(size, size * own) for _, size in sorted(sizes.items())]
        else:
            own = max(1, self.num_cards // node_size)
            ports = Counter(port // node_size for port in {self.port(rank) for rank in group})
            nodes = [Node(sizes[node], ports[node] * own) for node in sorted(sizes)]
        return Levels(nodes, self.inner_link, self._between_cards, own)

    def compute_seconds(
        self,
        flops: float,
        bytes: float,
        dtype: str = "float32",
        matmul: tuple[int, int, int, int] | None = None,
        attention: FusedAttention | None = None,
    ) -> float:
        """The roofline of this cluster's chip: launch + max(flops / peak(dtype), bytes / memory bandwidth).

        matmul      (m, n, k, batch), if the operation is a matmul. If the chip's kernels have been measured, it takes
                    `Chip.matmul_seconds`
        attention   if it is fused attention. It then takes `Chip.attention_seconds` with the oldest measured kernels,
                    which on H100 and A100 are those of torch
        """
        kernels = self.chip.kernels
        if matmul is not None and kernels is not None:
            m, n, k, batch = matmul
            return self.chip.matmul_seconds(m, n, k, dtype, batch)
        if attention is not None and kernels is not None and kernels.attention:
            oldest = kernels.attention[0].name
            computing = self.chip.attention_seconds(*attention[:5], dtype, *attention[5:], kernel=oldest)
            return max(computing, self.chip.seconds(0, bytes))
        return self.chip.seconds(flops, bytes, dtype)

    def table(self) -> str:
        """Every figure with its source, as text to print."""
        chip, lines = self.chip, [f"cluster {self.name}" + (f": {self.label}" if self.fitted else "")]
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
        if self.fabric is not None:
            lines.append(f"  fabric  {self.fabric}")
        return "\n".join(lines)
