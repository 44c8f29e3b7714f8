"""Collectives over several nodes, with fast links within each node and network cards between them.

R ranks in k nodes; S: bytes of the whole tensor. A ring passes every rank of a node and then goes on to the next node.
A node has c cards, so c rings run at once, each through its own card and with 1/c of the tensor. Then all fast links
and all cards are always busy, and the slower of the two levels sets the pace:

    all_reduce       2(R-1)/R S bytes pass   the link of every rank, at B_link      time = the larger of the two
                                             the c cards of every node, at c B_card
    all_gather, reduce_scatter   (R-1)/R S,  likewise
    broadcast, reduce            S,          likewise, in pieces, one after the other

Of the R-1 hops of one lap, k-1 lead to another node. The tree is a chain within each node and two binary trees over the
nodes, which share the tensor. It has (R/k - 1) + log2 k hops instead of R-1, and sends slightly more: S bytes instead
of (R-1)/R S each way. So it is best for few bytes. In one node the tree is just a chain, with as many hops as the ring:
for few bytes, 16 ranks in one node take longer, with 30 hops, than in two nodes of 8, with 2 (7 + 1).

In an all_to_all, each rank sends to other nodes through the cards of its node, and to its own node over its own link,
both at once.

Sources. NCCL builds its rings and trees (src/graph/search.cc, connect.cc) and counts hops (src/graph/tuning.cc) so;
Hu et al. 2025, "Demystifying NCCL". Two nodes with 8 x 100 Gb/s reach about 600 Gb/s: NVIDIA/nccl, issue 495.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tplab.cost.algorithms import Cost, terms, whole
from tplab.cost.link import Link
from tplab.errors import ClusterError


@dataclass(frozen=True, slots=True)
class Node:
    """The part of a group that is in one node: how many ranks, and how many cards they have, which may be fractions."""

    ranks: int
    cards: float


@dataclass(frozen=True, slots=True)
class Levels:
    """A group over two nodes or more.

    inner   the link between two ranks of a node
    outer   the link from a card to a card of another node
    own     cards per rank for its own messages: less than 1 if ranks share a card and use it at once
    """

    nodes: Sequence[Node]
    inner: Link
    outer: Link
    own: float = 1.0

    @property
    def num_ranks(self) -> int:
        return sum(node.ranks for node in self.nodes)

    def latency(self, hops: int, outer_hops: int) -> float:
        return (hops - outer_hops) * self.inner.latency + outer_hops * self.outer.latency

    def seconds(self, num_bytes: float) -> float:
        """The time for `num_bytes` to pass every rank's link, or the cards of every node: the larger of the two.

        If nodes have different numbers of cards, there are only as many rings as the node with the fewest cards allows.
        """
        between = num_bytes / (min(node.cards for node in self.nodes) * self.outer.bandwidth)
        most = max(node.ranks for node in self.nodes)
        return between if most == 1 else max(num_bytes / self.inner.bandwidth, between)


_TREES = {"all_reduce": 2, "barrier": 1}
"""Operations that have a tree, and how often they traverse it."""


def algorithms_over_nodes(op: str) -> tuple[str, ...]:
    return ("ring", "tree") if op in _TREES else ("ring",)


def over_nodes(op: str, nbytes: float, levels: Levels, algorithm: str) -> Cost:
    """One collective over the ranks of several nodes, with an input of `nbytes` per rank."""
    known = algorithms_over_nodes(op)
    if algorithm not in known:
        raise ClusterError(f"no algorithm is named {algorithm!r} for {op} between nodes; there are {', '.join(known)}")
    if algorithm == "tree":
        return _tree(op, nbytes, levels)
    if op == "all_to_all":
        return _all_to_all(nbytes, levels)
    if op in ("gather", "scatter"):
        return _at_root(op, nbytes, levels)
    return _ring(op, nbytes, levels)


def _ring(op: str, n: float, levels: Levels) -> Cost:
    R, k = levels.num_ranks, len(levels.nodes)
    lap = levels.latency(R - 1, k - 1)
    byte = levels.seconds(1.0)
    mean = Link("one hop of the ring", lap / (R - 1), 1 / byte if byte else float("inf"))
    hops, sent, carried = terms(op, n, R, mean, "ring")
    if op in ("ppermute", "ring_shift"):  # one message per rank, and some of them go to another node
        own = levels.own * levels.outer.bandwidth
        return Cost(max(levels.inner.seconds(n), levels.outer.latency + n / own), hops, whole(sent))
    return Cost(lap * (hops / (R - 1)) + levels.seconds(carried), hops, whole(sent))


def _tree(op: str, n: float, levels: Levels) -> Cost:
    between, times = (len(levels.nodes) - 1).bit_length(), _TREES[op]
    hops = max(node.ranks for node in levels.nodes) - 1 + between
    sent = 0 if op == "barrier" else times * n
    return Cost(times * levels.latency(hops, between) + levels.seconds(sent), times * hops, whole(sent), "tree")


def _all_to_all(n: float, levels: Levels) -> Cost:
    R = levels.num_ranks
    slowest = 0.0
    for node in levels.nodes:
        inside = (node.ranks - 1) * n / R / levels.inner.bandwidth
        between = node.ranks * (R - node.ranks) * n / R / (node.cards * levels.outer.bandwidth)
        slowest = max(slowest, levels.latency(R - 1, R - node.ranks) + max(inside, between))
    return Cost(slowest, R - 1, whole((R - 1) * n / R))


def _at_root(op: str, n: float, levels: Levels) -> Cost:
    """The root receives n bytes from every rank, or sends them their parts, in the node where that takes longest."""
    R = levels.num_ranks
    part = n if op == "gather" else n / R
    slowest = 0.0
    for node in levels.nodes:
        inside = (node.ranks - 1) * part / levels.inner.bandwidth
        between = (R - node.ranks) * part / levels.outer.bandwidth
        slowest = max(slowest, levels.latency(R - 1, R - node.ranks) + max(inside, between))
    return Cost(slowest, R - 1, whole(n if op == "gather" else (R - 1) * part))
