"""Networks between nodes: by hand, near what was measured, and one price for a message whoever asks."""

import json
import pickle
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.fit import fabrics as fit
from tests.pairwise import pairs
from tplab import Mesh
from tplab import torch as tt
from tplab.cost import H100_MEASURED, OPS, Fabric, find
from tplab.cost.measured import FABRICS, between, fabrics
from tplab.cost.named import A100_MEASURED, B200_MEASURED, CARDS, H100_NODE
from tplab.errors import ClusterError
from tplab.forecast import Model, Plan, forecast
from tplab.forecast.messages import price

EVERY = [find("h100-measured", fabric=name) for name in CARDS] + [A100_MEASURED, B200_MEASURED]
ROUND = Fabric("round", reached=0.5, fall=1.0, hop=1e-3, near=1e-4, tree=4e-3, begin=2e-3, peer=1e-5, by_peers=0.8)
SLOW = replace(H100_MEASURED, fabric=ROUND)


def inside(op, whole, ranks):
    assert H100_MEASURED.fitted is not None
    return H100_MEASURED.fitted.nccl.taken(op, whole, ranks).seconds


# ------------------------------------------------------------------------------------------------------------- by hand


def test_rings_and_trees_by_hand():
    """4 nodes of 8: a card gives 50 GB/s x 0.5 / 4; 31 hops a lap, of which 3 lead to another node."""
    start, cards = H100_MEASURED.fitted.nccl.start, 8 * 50e9 * 0.5 / 4  # type: ignore[union-attr]
    lap, n = 3 * 1e-3 + 28 * 1e-4, 1e9
    assert SLOW.collective_seconds("all_gather", n, 32) == pytest.approx(lap + start + 31 / 32 * n / cards)
    assert SLOW.collective_seconds("reduce_scatter", n, 32) == SLOW.collective_seconds("all_gather", n, 32)
    ring = 2 * lap + start + 2 * 31 / 32 * n / cards
    tree = 2 * 2 * 4e-3 + start + n / cards
    assert tree < ring and SLOW.collective_cost("all_reduce", n, 32).algorithm == "tree"
    assert SLOW.collective_seconds("all_reduce", n, 32) == pytest.approx(tree)
    few = SLOW.collective_cost("all_reduce", 8, 32)
    assert (few.algorithm, few.latency) == ("ring", pytest.approx(2 * lap))
    assert few.seconds == pytest.approx(2 * lap + inside("all_reduce", 8, 8))


def test_the_slower_level_sets_the_pace_and_latencies_add():
    """Cards of 50 TB/s: then what is left is what one node takes, and the hops."""
    fast = replace(SLOW, outer_link=replace(H100_NODE.outer_link, bandwidth=5e13))  # type: ignore[type-var]
    hops = 1e-3 + 14 * 1e-4
    assert fast.collective_seconds("all_gather", 1e9, 16) == pytest.approx(hops + inside("all_gather", 1e9, 8))


def test_an_all_to_all_sends_by_cards_only_what_crosses():
    peers, n = 2e-3 + 15 * 1e-5, 1e9
    assert SLOW.collective_seconds("all_to_all", n, 16) == pytest.approx(peers + n * 8 / 16 / (50e9 * 0.8))
    fast = replace(SLOW, cards=64)
    assert fast.collective_seconds("all_to_all", n, 16) == pytest.approx(
        peers + max(inside("all_to_all", n / 2, 8), n / 2 / (8 * 50e9 * 0.8))
    )


def test_a_message_takes_a_hop_and_the_part_of_a_card_that_two_nodes_reach():
    link = SLOW.link(0, 8)
    assert (link.latency, link.bandwidth) == (1e-3, 50e9 * 0.5 / 2)
    assert SLOW.link(0, 7) == H100_MEASURED.inner_link


def test_one_member_per_node_has_one_card():
    start = H100_MEASURED.fitted.nccl.start  # type: ignore[union-attr]
    found = SLOW.collective_seconds("all_gather", 1e9, range(0, 32, 8))
    assert found == pytest.approx(3 * 1e-3 + start + 3 / 4 * 1e9 / (50e9 * 0.5 / 4))


# ------------------------------------------------------------------------------------------------------------ one price


GRID = pairs(range(len(EVERY)), (1, 2, 3, 4, 8), ("all_reduce", "all_gather", "reduce_scatter"), (1, 500, 40_000))


@pytest.mark.parametrize(("place", "nodes", "op", "rows"), GRID)
def test_one_price_whoever_asks(place, nodes, op, rows):
    """The clock of a run, the cluster and the forecast: the same number, to the digit."""
    cluster, ranks, call = EVERY[place], 8 * nodes, getattr(tt, op)
    x = torch.empty(rows * (1 if op == "all_gather" else ranks), 512, dtype=torch.bfloat16, device="meta")
    whole = x.nbytes * (ranks if op == "all_gather" else 1)
    ran = tt.run(lambda x: call(x, "tp"), Mesh(tp=ranks), x, cluster=cluster).trace.makespan
    assert ran == cluster.collective_seconds(op, whole, ranks) == price(cluster, op, whole, tuple(range(ranks))).seconds


@pytest.mark.parametrize("op", OPS)
@given(
    cluster=st.sampled_from(EVERY),
    n=st.integers(0, 2**34),
    nodes=st.integers(1, 9),
    stride=st.sampled_from([1, 2, 4, 8]),
)
def test_the_forecast_asks_the_cluster_for_every_operation(cluster, op, n, nodes, stride):
    ranks = tuple(range(0, 8 * nodes, stride))
    seconds = price(cluster, op, n, ranks).seconds
    assert seconds == (cluster.collective_seconds(op, n, ranks) if n and len(ranks) > 1 else 0)
    assert price(cluster, "send", n, (0, 8)).seconds == (cluster.link(0, 8).seconds(n) if n else 0)


@pytest.mark.parametrize("cards", [1, 2, 4])
def test_groups_that_send_at_once_share_cards_on_the_clock_as_in_a_forecast(cards):
    """Eight groups of one rank per node: each has its part of the cards. Where bytes count, the clock says the same."""
    shared, whole, ranks = replace(H100_MEASURED, cards=cards), 2 * 40_000 * 512, (0, 8)
    at_once, alone = (shared.collective_seconds("all_reduce", whole, ranks, at_once=flag) for flag in (True, False))
    assert alone == H100_MEASURED.collective_seconds("all_reduce", whole, ranks)
    assert price(shared, "all_reduce", whole, ranks).seconds == at_once > alone
    x = torch.empty(40_000, 512, dtype=torch.bfloat16, device="meta")
    ran = tt.run(lambda x: tt.all_reduce(x, "dp"), Mesh(dp=2, tp=8), x, cluster=shared).trace.makespan
    assert ran == pytest.approx(8 / cards * alone)  # one after the other, or each with its part of a card
    bytes_alone = whole / (50e9 * shared.fabric.reached / 2**shared.fabric.fall)  # type: ignore[union-attr]
    assert at_once - alone == pytest.approx((8 / cards - 1) * bytes_alone, rel=0.01)
    assert shared.link(0, 8, at_once=True).bandwidth == pytest.approx(shared.link(0, 8).bandwidth * cards / 8)


PLANS = [Plan(dp=4, tp=8, zero=1), Plan(dp=16, cp=2, tp=4), Plan(dp=32, zero=3), Plan(dp=4, tp=4, pp=2, zero=1)]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_network_of_ones_own_counts_in_a_forecast(plan):
    def seconds(cluster):
        return forecast("llama3-8b", plan, cluster, batch=64, sequence=4096).seconds

    known = seconds(H100_MEASURED)
    slower = replace(H100_MEASURED, fabric=replace(H100_MEASURED.fabric, reached=0.05))  # type: ignore[type-var]
    for other in (slower, replace(H100_MEASURED, cards=1), replace(H100_MEASURED, oversubscription=8.0), SLOW):
        assert seconds(other) > 1.01 * known
    assert seconds(replace(H100_MEASURED, cards=8)) == known
    quick, slow = (seconds(find("h100-measured", fabric=name)) for name in ("infiniband-ndr", "ethernet-100g"))
    assert quick < known and quick < slow


# ----------------------------------------------------------------------------------------------------------- measured


def test_committed_constants_are_what_the_fits_find():
    stored = json.loads(FABRICS.read_text())
    assert set(stored) == set(CARDS) == set(fabrics())
    for key in fit.NAMES:
        found = fit.constants(fit.fit(key))
        for name, value in found.items():
            if isinstance(value, float):
                assert stored[key][name] == pytest.approx(value, rel=0.02), (key, name)


@pytest.mark.parametrize(
    "key, median, most", [("efa-p5", 0.08, 0.25), ("infiniband-ndr", 0.01, 0.01), ("playbook", 0.3, 0.7)]
)
def test_what_was_measured_is_as_near_as_the_page_says(key, median, most):
    error = fit.summary(fit.errors(key, fabrics()[key], fit.rows_of(key)))
    assert error.median <= median and error.most <= most


def test_an_error_is_of_rows_that_were_left_out():
    assert fit.summary(fit.hold_out("efa-p5")) == pytest.approx(fabrics()["efa-p5"].error, abs=0.005)
    assert {row.fabric for row in between()} == set(fit.NAMES)
    assert {key for key, of in fabrics().items() if of.error is None} == {
        "infiniband-ndr",
        "infiniband-hdr",
        "ethernet-100g",
    }
    assert all(of.source for of in fabrics().values())


def test_few_bytes_over_two_nodes_take_what_was_measured():
    """NVIDIA/nccl, issue 1244: 46 to 48 us for an all_reduce of few bytes over two nodes with InfiniBand."""
    seconds = find("h100-measured", fabric="infiniband-ndr").collective_seconds("all_reduce", 1024, 16)
    assert seconds == pytest.approx(47e-6, rel=0.12)


# --------------------------------------------------------------------------------------------------------- properties


@pytest.mark.parametrize("op", OPS)
@given(
    cluster=st.sampled_from(EVERY),
    n=st.integers(0, 2**34),
    more=st.integers(0, 2**34),
    ranks=st.sampled_from([2, 8, 9, 16, 24, 64]),
    data=st.data(),
)
def test_more_bytes_take_no_less_time_and_the_order_of_ranks_none(cluster, op, n, more, ranks, data):
    at_once = data.draw(st.booleans())
    seconds = cluster.collective_seconds(op, n, ranks, at_once=at_once)
    assert cluster.collective_seconds(op, n + more, ranks, at_once=at_once) >= seconds > 0
    shuffled = data.draw(st.permutations(range(ranks)))
    assert cluster.collective_seconds(op, n, shuffled, at_once=at_once) == seconds
    assert 0 <= cluster.collective_cost(op, n, ranks).latency <= cluster.collective_cost(op, n, ranks).seconds


# -------------------------------------------------------------------------------------------------------------- errors


def test_a_cluster_says_what_joins_its_nodes():
    on = find("h100-measured", fabric="infiniband-ndr")
    assert (on.name, on.network) == ("h100-measured", "InfiniBand NDR")
    assert "InfiniBand NDR" in on.kind_on(16) and "InfiniBand" not in on.kind_on(8)
    assert find(on, fabric="playbook") == H100_MEASURED
    assert find("h100", fabric="ethernet-100g").outer_link == CARDS["ethernet-100g"]
    assert find("h100", fabric="ethernet-100g").network == "100 Gb Ethernet"
    assert pickle.loads(pickle.dumps(on)) == on and "InfiniBand NDR" in on.table()
    plain = replace(H100_MEASURED, fabric=None)
    assert plain.network == "InfiniBand NDR" and plain.kind_on(16) == "InfiniBand NDR, forecast, ±6 % in a node"
    assert plain.collective_seconds("all_gather", 1e12, 16) == pytest.approx(
        15 / 16 * 1e12 / 400e9, rel=0.03
    )  # NVLink's pace


def test_what_cannot_be_is_refused():
    with pytest.raises(
        ClusterError, match=r"no fabric is named 'infiniband'; there are 'playbook', .*did you mean 'infiniband-"
    ):
        find("h100-measured", fabric="infiniband")
    with pytest.raises(ClusterError, match="cluster 'laptop' is one node, so no fabric joins it"):
        find("laptop", fabric="playbook")
    for name in [field.name for field in fields(Fabric) if field.type == "float"]:
        for value in (-1.0, float("nan"), float("inf"), True, "1"):
            with pytest.raises(ClusterError, match=f"fabric 'mine': {name} is .*; it must be a number, 0 or more"):
                Fabric("mine", **{name: value})  # type: ignore[arg-type]
    for name in ("reached", "by_peers"):
        with pytest.raises(ClusterError, match=f"fabric 'mine': {name} is 0; nothing would ever arrive"):
            Fabric("mine", **{name: 0.0})  # type: ignore[arg-type]
    with pytest.raises(
        ClusterError, match="its fabric, round, is what was measured of a network, and it has no fitted"
    ):
        replace(H100_NODE, fabric=ROUND)


def test_models_are_found_on_every_fabric():
    for name in CARDS:
        found = forecast("llama3-8b", Plan(dp=2, tp=8), find("h100-measured", fabric=name), batch=8, sequence=4096)
        assert found.seconds > 0 and found.cluster.network in found.cluster.kind_on(found.plan.ranks)
    assert Model.find("llama3-8b").layers == 32
