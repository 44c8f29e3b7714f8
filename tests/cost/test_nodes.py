"""Collectives over several nodes: both levels by hand, trees, unequal nodes, cards, and one answer everywhere."""

from dataclasses import replace
from math import ceil, log2

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tplab import Mesh, cost, jax
from tplab import torch as tt
from tplab.cost import Cluster, Link
from tplab.cost.named import A100_NODE, H100_NODE
from tplab.errors import ClusterError

ROUND = Cluster("round", H100_NODE.chip, Link("near", 2.0, 400.0), node_size=4, outer_link=Link("far", 8.0, 100.0))
"""Numbers that are easy by hand: 4 cards of 100 B/s are as fast as one link of 400 B/s."""
COUNTS = [1, 2, 3, 4, 8, 12, 16, 64]
LARGE = 1e12


def test_all_reduce_by_hand():
    """16 ranks, 4 nodes: 30 hops of which 6 lead to another node; 2 * 15/16 of the tensor pass each level."""
    latency = 24 * 2 + 6 * 8
    slow_cards = replace(ROUND, oversubscription=2.0)  # 4 * 50 B/s: half of what a link carries
    slow_links = replace(ROUND, inner_link=Link("near", 2.0, 200.0))
    assert ROUND.collective_seconds("all_reduce", 64e6, 16) == pytest.approx(latency + 120e6 / 400)
    assert slow_cards.collective_seconds("all_reduce", 64e6, 16) == pytest.approx(latency + 120e6 / 200)
    assert slow_links.collective_seconds("all_reduce", 64e6, 16) == pytest.approx(latency + 120e6 / 200)
    both = replace(slow_links, oversubscription=2.0)
    assert both.collective_seconds("all_reduce", 64e6, 16) == pytest.approx(latency + 120e6 / 200)  # a maximum, no sum


def test_the_others_by_hand():
    gathered = 15 * 2 - 3 * 2 + 3 * 8 + 60e6 / 400
    assert ROUND.collective_seconds("all_gather", 64e6, 16) == pytest.approx(gathered)
    assert ROUND.collective_seconds("reduce_scatter", 64e6, 16) == pytest.approx(gathered)
    # 12 of 16 parts go to other nodes, by a card of one's own; 3 to other ranks of the node
    assert ROUND.collective_seconds("all_to_all", 16e6, 16) == pytest.approx(3 * 2 + 12 * 8 + 12e6 / 100)
    assert ROUND.collective_seconds("broadcast", LARGE, 16) == pytest.approx(LARGE / 400, rel=1e-3)
    assert ROUND.collective_seconds("ring_shift", 100, 16) == 8 + 1


def test_the_two_nodes_of_sixteen_h100():
    """1 GB over 16 H100: 8 cards of 50 GB/s carry 400 GB/s, a little less than NVLink."""
    seconds = H100_NODE.collective_seconds("all_reduce", 1e9, 16)
    assert seconds == pytest.approx(28 * 1.9e-6 + 2 * 4e-6 + 2 * 15 / 16 * 1e9 / 400e9)
    one_card = replace(H100_NODE, cards=1).collective_seconds("all_reduce", 1e9, 16)
    assert one_card == pytest.approx(28 * 1.9e-6 + 2 * 4e-6 + 2 * 15 / 16 * 1e9 / 50e9)


@pytest.mark.parametrize("nodes", [2, 3, 4, 64])
def test_trees_for_few_bytes(nodes):
    few, many = (cost.collective("all_reduce", n, 8 * nodes, "h100") for n in (1024, LARGE))
    assert (few.algorithm, many.algorithm) == ("tree", "ring")
    tree = cost.collective("all_reduce", 1024, 8 * nodes, "h100", "tree")
    assert tree.hops == 2 * (7 + ceil(log2(nodes)))
    assert tree.seconds == pytest.approx(14 * 1.9e-6 + 2 * ceil(log2(nodes)) * 4e-6 + 2048 / 400e9)
    assert tree.bytes == 2048


def test_in_one_node_a_tree_is_a_chain_and_no_faster_than_the_ring():
    """NCCL's latency of a tree is 2 ((R/k - 1) hops in a node + log2 k between nodes): for k = 1 that is the ring's. So
    for few bytes two nodes of 8 are faster than one of 16."""
    together, apart = (
        replace(H100_NODE, node_size=size, cards=8).collective_cost("all_reduce", 1024, 16) for size in (16, 8)
    )
    chain = 2 * (16 - 1 + log2(1))
    assert (together.algorithm, together.hops, chain) == ("ring", 30, 30)
    assert together.seconds == pytest.approx(chain * 1.9e-6 + 2 * 15 / 16 * 1024 / 450e9)
    assert (apart.algorithm, apart.hops) == ("tree", 16) and apart.seconds < together.seconds


def test_one_member_per_node_has_one_card():
    across = range(0, 64, 8)
    seconds = H100_NODE.collective_seconds("all_reduce", 8e9, across)
    assert seconds == pytest.approx(14 * 4e-6 + 2 * 7 / 8 * 8e9 / 50e9)
    assert H100_NODE.collective_seconds("all_reduce", 8e9, [0, 1, 8, 9]) == pytest.approx(
        4 * 1.9e-6 + 2 * 4e-6 + 1.5 * 8e9 / 100e9
    )


def test_nodes_with_unequal_counts():
    """8 ranks and 3: only three rings can cross, as the second node has three cards that belong to the group."""
    seconds = H100_NODE.collective_seconds("all_reduce", 1e9, 11)
    assert seconds == pytest.approx(18 * 1.9e-6 + 2 * 4e-6 + 2 * 10 / 11 * 1e9 / 150e9)
    # rank 8, alone in its node, sends 8 of 9 parts through one card; each of the others sends it one part
    assert H100_NODE.collective_seconds("all_to_all", 9e9, 9) == pytest.approx(8 * 4e-6 + 8e9 / 50e9)
    tree = cost.collective("all_reduce", 0, 11, "h100", "tree")
    assert tree.hops == 2 * (7 + 1)  # the longest chain


def test_cards_that_are_shared_and_cards_to_spare():
    few, many = replace(H100_NODE, cards=4), replace(H100_NODE, cards=16)
    large = 2 * 15 / 16 * LARGE
    assert few.collective_seconds("all_reduce", LARGE, 16) == pytest.approx(large / 200e9, rel=1e-3)
    assert many.collective_seconds("all_reduce", LARGE, 16) == pytest.approx(large / 450e9, rel=1e-3)  # now NVLink
    assert few.collective_seconds("all_reduce", LARGE, [0, 1, 8, 9]) == pytest.approx(1.5 * LARGE / 50e9, rel=1e-3)
    assert few.collective_seconds("all_reduce", LARGE, [0, 2, 8, 10]) == pytest.approx(1.5 * LARGE / 100e9, rel=1e-3)
    assert (few.link(0, 8).bandwidth, many.link(0, 8).bandwidth) == (50e9, 100e9)
    assert [few.port(rank) for rank in range(10)] == [0, 0, 2, 2, 4, 4, 6, 6, 8, 8]
    assert [many.port(rank) for rank in range(10)] == list(range(10))
    assert replace(H100_NODE, oversubscription=4.0).link(0, 8).bandwidth == 12.5e9
    assert (H100_NODE.num_cards, few.num_cards, cost.find("laptop").num_cards) == (8, 4, 0)
    assert "between nodes, 4 cards per node, oversubscribed 2 times" in replace(few, oversubscription=2.0).table()


@pytest.mark.parametrize("op", cost.OPS)
@given(n=st.integers(0, 2**34), more=st.integers(0, 2**34), ranks=st.sampled_from(COUNTS), data=st.data())
def test_more_bytes_take_no_less_time_and_the_order_of_ranks_none(op, n, more, ranks, data):
    cluster = data.draw(st.sampled_from([H100_NODE, A100_NODE, ROUND]))
    seconds = cluster.collective_seconds(op, n, ranks)
    assert cluster.collective_seconds(op, n + more, ranks) >= seconds >= 0
    shuffled = data.draw(st.permutations(range(ranks)))
    moved = [rank + 8 for rank in shuffled]
    assert cluster.collective_seconds(op, n, shuffled) == seconds == cluster.collective_seconds(op, n, moved)
    assert (seconds == 0) == (ranks == 1)


@pytest.mark.parametrize("op", [op for op in cost.OPS if op not in ("ppermute", "ring_shift")])
@pytest.mark.parametrize("n", [0, 1000, 10**6, 10**9])
def test_more_nodes_take_no_less_time(op, n):
    seconds = [H100_NODE.collective_seconds(op, n, 8 * nodes) for nodes in (1, 2, 3, 4, 5, 8, 16, 64)]
    assert seconds == sorted(seconds)


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter"])
@given(n=st.integers(0, 2**36), nodes=st.integers(1, 9), size=st.integers(1, 8))
def test_no_time_is_below_the_bound_of_one_level(op, n, nodes, size):
    """What leaves a node and comes back to it passes its cards at least once."""
    ranks = [8 * node + rank for node in range(nodes) for rank in range(size)]
    R, factor = len(ranks), 2 if op == "all_reduce" else 1
    least = factor * (R - 1) / R * n / 450e9
    if nodes > 1:
        least = max(least, factor * (nodes - 1) / nodes * n / (size * 50e9))
    assert H100_NODE.collective_seconds(op, n, ranks) >= least * (1 - 1e-9)


@pytest.mark.parametrize("cluster", ["h100", "a100", ROUND], ids=str)
@pytest.mark.parametrize("ranks", [2, 3, 8, 11, 16])
@pytest.mark.parametrize("num_elements", [1, 11 * 48, 11 * 48 * 5000])
def test_formula_best_and_runs_agree_to_the_digit(cluster, ranks, num_elements):
    """A meta tensor has no numbers, so that a run of a large one is quick."""
    x = torch.empty(num_elements, dtype=torch.bfloat16, device="meta")
    ran = tt.run(lambda x: tt.all_reduce(x, "tp"), Mesh(tp=ranks), x, cluster=cluster).trace.makespan
    on, n = cost.find(cluster), 2 * num_elements
    assert ran == on.collective_seconds("all_reduce", n, ranks) == cost.best("all_reduce", n, ranks, on).seconds
    assert ran == cost.collective("all_reduce", n, ranks, on).seconds
    assert ran == cost.collective("all_reduce", n, range(ranks), cluster).seconds


def test_a_run_over_jax_agrees_too():
    import numpy as np

    x = np.zeros((16, 1000), np.float32)
    out = jax.run(lambda x: jax.all_gather(x, "dp"), Mesh(dp=2, tp=2), x, cluster=ROUND_OF_TWO)
    assert out.trace.makespan == ROUND_OF_TWO.collective_seconds("all_gather", 2 * x.nbytes, [0, 2])


ROUND_OF_TWO = replace(ROUND, node_size=2)


def test_a_ring_written_by_hand_pays_for_its_own_hops():
    """One ring crosses the network at one card, whatever NCCL's many rings do."""

    def by_hand(x):
        total = x
        for _ in range(15):
            x = tt.ring_shift(x, "tp")
        return total

    x = torch.empty(25_000_000, dtype=torch.bfloat16, device="meta")
    ran = tt.run(by_hand, Mesh(tp=16), x, cluster="h100").trace.makespan
    assert ran == pytest.approx(15 * 50e6 / 50e9, rel=0.01)  # latencies overlap
    assert H100_NODE.group_link(range(16)) is H100_NODE.outer_link


def test_a_matmul_is_the_roofline():
    chip = H100_NODE.chip
    assert chip.matmul_seconds(4096, 512, 2048, "bfloat16") == chip.seconds(
        2 * 4096 * 512 * 2048, 2 * (4096 * 2048 + 2048 * 512 + 4096 * 512), "bfloat16"
    )
    assert chip.matmul_seconds(64, 64, 64, "float8_e4m3fn", batch=3) == chip.seconds(
        6 * 64**3, 9 * 64**2, "float8_e4m3fn"
    )
    a, b = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((512, 4096), (4096, 64)))
    assert tt.run(lambda a, b: a @ b, Mesh(tp=1), a, b, cluster="h100").trace.makespan == chip.matmul_seconds(
        512, 64, 4096, "bfloat16"
    )


def test_what_cannot_be_is_refused():
    for cards in (0, -1, 2.0, True):
        with pytest.raises(ClusterError, match=r"cards is .*; it must be a whole number, 1 or more"):
            replace(H100_NODE, cards=cards)
    with pytest.raises(ClusterError, match="the 8 ranks of a node cannot share 3 cards equally"):
        replace(H100_NODE, cards=3)
    with pytest.raises(ClusterError, match=r"oversubscription is 0\.5; it must be 1 or more"):
        replace(H100_NODE, oversubscription=0.5)
    with pytest.raises(ClusterError, match="oversubscription is nan; it must be a number"):
        replace(H100_NODE, oversubscription=float("nan"))
    with pytest.raises(ClusterError, match="cards and oversubscription need an outer_link"):
        replace(cost.find("laptop"), cards=2)
    for ranks in (0, -1, True, 2.0, [], [0, 0], [-1, 0], None):
        with pytest.raises(ClusterError, match=r"ranks is .*; give the number of ranks, 1 or more, or their numbers"):
            H100_NODE.collective_seconds("all_reduce", 8, ranks)  # type: ignore[arg-type]
    with pytest.raises(ClusterError, match="no collective is named 'allreduce'"):
        H100_NODE.collective_seconds("allreduce", 8, 16)
    with pytest.raises(ClusterError, match="'bruck' for all_to_all between nodes; there are ring"):
        cost.collective("all_to_all", 8, 16, "h100", "bruck")
    for nbytes in (-1, float("nan"), float("inf")):
        with pytest.raises(ClusterError, match="nbytes is "):
            H100_NODE.collective_seconds("all_reduce", nbytes, 16)
