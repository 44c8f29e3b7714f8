"""Clusters: the figures against what they are made of, links between ranks, the roofline, and errors."""

import copy
import math
import pickle
from dataclasses import FrozenInstanceError, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tplab.cost import Chip, Cluster, Link, find
from tplab.cost import data_sheets as sheets
from tplab.cost import named as c
from tplab.cost.link import NO_LINK, ONE_HOP
from tplab.errors import ClusterError

# Each figure once more, from the parts of the chip: units x clock x width. The parts are in the vendors' architecture
# white papers (GA100, GH100), in the TPU v5e page, and in NVLink's and InfiniBand's rates per lane.
FROM_PARTS = {
    "A100 bfloat16": (sheets.A100.flops["bfloat16"], 108 * 1.41e9 * 1024 * 2),  # SMs, boost clock, FMAs a clock
    "A100 float32": (sheets.A100.flops["float32"], 108 * 1.41e9 * 64 * 2),
    "A100 float64": (sheets.A100.flops["float64"], 108 * 1.41e9 * 64 * 2),
    "A100 int8": (sheets.A100.flops["int8"], 108 * 1.41e9 * 2048 * 2),
    "A100 memory": (sheets.A100.memory_bandwidth, 5120 / 8 * 3.186e9),  # bits of HBM2e x rate of a pin
    "H100 bfloat16": (sheets.H100.flops["bfloat16"], 132 * 1.83e9 * 2048 * 2),
    "H100 float32": (sheets.H100.flops["float32"], 132 * 1.98e9 * 128 * 2),
    "H100 float64": (sheets.H100.flops["float64"], 132 * 1.98e9 * 128 * 2),
    "H100 float8": (sheets.H100.flops["float8_e4m3fn"], 132 * 1.83e9 * 4096 * 2),
    "H100 memory": (sheets.H100.memory_bandwidth, 5120 / 8 * 5.23e9),
    "B200 memory": (sheets.B200.memory_bandwidth, 8192 / 8 * 7.5e9),
    "TPU v5e bfloat16": (sheets.TPU_V5E.flops["bfloat16"], 4 * 128 * 128 * 1.5e9 * 2),  # MXUs, systolic array, clock
    "TPU v5e int8": (sheets.TPU_V5E.flops["int8"], 4 * 128 * 128 * 1.5e9 * 2 * 2),
    "laptop float32": (sheets.LAPTOP.flops["float32"], 2 * 3e9 * 2 * 8 * 2),  # cores, clock, FMA units, lanes
    "laptop, one core": (2 * sheets.LAPTOP_CORE.flops["float32"], sheets.LAPTOP.flops["float32"]),
    "NVLink 4": (sheets.NVLINK_4.bandwidth, 18 * 25e9),  # links x B/s a direction
    "NVLink 3": (sheets.NVLINK_3.bandwidth, 12 * 25e9),
    "NVLink 5": (sheets.NVLINK_5.bandwidth, 18 * 50e9),
    "InfiniBand NDR": (sheets.INFINIBAND_NDR.bandwidth, 4 * 100e9 / 8),  # lanes x bit/s
    "InfiniBand HDR": (sheets.INFINIBAND_HDR.bandwidth, 4 * 50e9 / 8),
    "ICI of TPU v5e": (sheets.ICI_V5E.bandwidth, 1600e9 / 4 / 8),  # bit/s of the chip over 4 ports
    "1 Gb Ethernet": (sheets.ETHERNET_1G.bandwidth, 1e9 / 8),
    "10 Gb Ethernet": (sheets.ETHERNET_10G.bandwidth, 10e9 / 8),
}


@pytest.mark.parametrize("name", FROM_PARTS)
def test_figures_follow_from_the_parts(name):
    figure, parts = FROM_PARTS[name]
    assert figure == pytest.approx(parts, rel=5e-3)  # data sheets print three or four digits


@pytest.mark.parametrize("cluster", c.NAMED.values(), ids=c.NAMED)
def test_every_figure_names_its_source(cluster):
    links = [cluster.inner_link] + ([cluster.outer_link] if cluster.outer_link else [])
    for part in (cluster.chip, *links):
        assert part.source
        assert part.source in cluster.table()
    assert cluster.name in cluster.table()


def test_a_cluster_prints_all_its_figures():
    cluster = Cluster("mine", Chip("abacus", {"float32": 1.5e3}, 2e6, 64, launch=0.25), Link("string", 0.0, 3e-3))
    assert (
        cluster.table()
        == """\
cluster mine
  chip  abacus
        float32        1.5 kFLOP/s
        memory         64 B at 2 MB/s
        launch         250 ms
        no source given
  link  string, within a node of all ranks
        0 s + bytes / (3 mB/s)
        no source given"""
    )


def test_find_knows_names_and_passes_clusters_through():
    assert find("h100") is c.H100_NODE
    assert find("a100") is c.A100_NODE
    assert find("tpu_v5e") is c.TPU_V5E_RING
    assert find("laptop") is c.THIS_LAPTOP
    assert find("ethernet") is c.SLOW_ETHERNET
    mine = replace(c.H100_NODE, name="mine")
    assert find(mine) is mine
    for cluster in c.NAMED.values():
        assert find(cluster.name) is cluster  # a trace keeps the name alone


def test_find_says_what_there_is():
    with pytest.raises(ClusterError, match=r"no cluster is named 'h300'; there are 'h100', 'h200', 'a100'"):
        find("h300")
    with pytest.raises(ClusterError, match=r"cluster is 8; give one of 'h100'"):
        find(8)  # type: ignore[arg-type]


@given(a=st.integers(0, 40), b=st.integers(0, 40), node_size=st.integers(1, 9))
def test_ranks_of_one_node_share_the_inner_link(a, b, node_size):
    cluster = replace(c.H100_NODE, node_size=node_size)
    nodes = [set(range(first, first + node_size)) for first in range(0, 41, node_size)]
    if a == b:
        expected = NO_LINK
    elif any({a, b} <= node for node in nodes):
        expected = sheets.NVLINK_4
    else:
        expected = sheets.INFINIBAND_NDR
    assert cluster.link(a, b) is expected
    assert cluster.link(b, a) is expected
    assert c.TPU_V5E_RING.link(a, b) is (NO_LINK if a == b else sheets.ICI_V5E)


@given(ranks=st.lists(st.integers(0, 30), min_size=1, max_size=12, unique=True))
def test_a_ring_is_as_slow_as_its_slowest_hop(ranks):
    slowest = c.H100_NODE.group_link(ranks)
    hops = [c.H100_NODE.link(a, b) for a, b in zip(ranks, ranks[1:] + ranks[:1])]
    assert slowest in hops
    assert all(slowest.seconds(nbytes) >= hop.seconds(nbytes) for hop in hops for nbytes in (0, 1, 10**9))


def test_group_links_of_a_mesh_of_two_nodes():
    assert c.H100_NODE.group_link(range(8)) is sheets.NVLINK_4
    assert c.H100_NODE.group_link(range(8, 16)) is sheets.NVLINK_4
    assert c.H100_NODE.group_link([0, 8]) is sheets.INFINIBAND_NDR
    assert c.H100_NODE.group_link(range(16)) is sheets.INFINIBAND_NDR
    assert c.H100_NODE.group_link([5]) is NO_LINK
    equal = replace(c.H100_NODE, inner_link=Link("near", 1.0, 10.0), outer_link=Link("far", 2.0, 10.0))
    assert equal.group_link([0, 1, 8]).name == "far"


def test_only_a_torus_has_a_link_to_each_neighbour():
    assert [name for name, cluster in c.NAMED.items() if cluster.wiring == "torus"] == ["tpu_v5e"]


@given(nbytes=st.integers(0, 2**50))
def test_a_message_takes_latency_and_bytes_over_bandwidth(nbytes):
    link = Link("link", latency=0.5, bandwidth=4.0)
    assert link.seconds(nbytes) == 0.5 + nbytes / 4
    assert NO_LINK.seconds(nbytes) == 0
    assert ONE_HOP.seconds(nbytes) == 1


def test_the_roofline_is_the_larger_of_arithmetic_and_memory():
    chip = Chip(
        "chip", {"float32": 100.0, "bfloat16": 200.0, "int4": 800.0}, memory_bandwidth=10.0, memory=1.0, launch=3.0
    )
    assert chip.seconds(flops=1000, bytes=10, dtype="float32") == 3 + 10
    assert chip.seconds(flops=1000, bytes=10, dtype="bfloat16") == 3 + 5
    assert chip.seconds(flops=1000, bytes=500, dtype="bfloat16") == 3 + 50
    assert chip.seconds(0, 0) == 3
    assert Cluster("one", chip, sheets.NVLINK_4).compute_seconds(1000, 10, "float32") == 13
    # a dtype that the chip has no figure for is never modelled faster than one it has
    assert chip.peak("complex128") == 100


@pytest.mark.parametrize("cluster", c.NAMED.values(), ids=c.NAMED)
def test_clusters_are_values(cluster):
    same = pickle.loads(pickle.dumps(cluster))
    assert same == cluster == copy.deepcopy(cluster)
    assert {cluster: 1}[same] == 1
    assert replace(cluster, name="other") != cluster
    with pytest.raises(FrozenInstanceError):
        cluster.name = "other"
    with pytest.raises(TypeError):
        cluster.chip.flops["float32"] = 1.0


def test_a_chip_keeps_its_own_figures():
    figures = {"float32": 1e12}
    chip = Chip("chip", figures, 1e9, 1e9)
    figures["float32"] = 2e12
    assert chip.peak("float32") == 1e12
    assert chip != replace(chip, flops=figures)


NOT_A_FIGURE = (-1.0, math.nan, math.inf, "1 TB/s", None, True, 1j)


@pytest.mark.parametrize("value", NOT_A_FIGURE, ids=repr)
def test_impossible_figures_are_refused(value):
    chip = sheets.H100
    for name in ("memory_bandwidth", "memory", "launch"):
        with pytest.raises(ClusterError, match=f"chip 'H100 SXM 80GB': {name} is "):
            replace(chip, **{name: value})
    with pytest.raises(ClusterError, match=r"flops\['int8'\] is"):
        replace(chip, flops={"float32": 1.0, "int8": value})
    with pytest.raises(ClusterError, match="link 'link': latency is"):
        Link("link", value, 1.0)
    if value != math.inf:  # a link may be as fast as one likes: NO_LINK, ONE_HOP
        with pytest.raises(ClusterError, match="link 'link': bandwidth is"):
            Link("link", 0.0, value)


def test_zero_is_a_latency_but_not_a_bandwidth():
    assert Link("link", 0, 1).latency == 0
    for name in ("memory_bandwidth", "memory"):
        with pytest.raises(ClusterError, match=f"{name} is 0; it must be a number, more than 0"):
            replace(sheets.H100, **{name: 0})
    with pytest.raises(ClusterError, match="bandwidth is 0"):
        Link("link", 1, 0)
    for flops in ({}, None, 1e12):
        with pytest.raises(ClusterError, match="give one dtype at least"):
            replace(sheets.H100, flops=flops)  # type: ignore[arg-type]


def test_impossible_clusters_are_refused():
    with pytest.raises(ClusterError, match="node_size is 8 and outer_link is None; give both"):
        Cluster("mine", sheets.H100, sheets.NVLINK_4, node_size=8)
    with pytest.raises(ClusterError, match="node_size is None and outer_link is Link"):
        Cluster("mine", sheets.H100, sheets.NVLINK_4, outer_link=sheets.INFINIBAND_NDR)
    for node_size in (0, -8, 2.5, True):
        with pytest.raises(ClusterError, match="it must be a whole number, 1 or more"):
            replace(c.H100_NODE, node_size=node_size)
    with pytest.raises(ClusterError, match=r"chip is 'h100'; give a tplab\.cost\.Chip"):
        Cluster("mine", "h100", sheets.NVLINK_4)  # type: ignore
    with pytest.raises(ClusterError, match=r"inner_link is 450000000000\.0; give a"):
        Cluster("mine", sheets.H100, 450e9)  # type: ignore[arg-type]
    with pytest.raises(ClusterError, match="outer_link is 'slow'"):
        replace(c.H100_NODE, outer_link="slow")
    with pytest.raises(ClusterError, match="wiring is 'star'; it must be one of switch, torus"):
        replace(c.H100_NODE, wiring="star")
    with pytest.raises(ClusterError, match="no link from rank -1 to rank 3"):
        c.H100_NODE.link(-1, 3)
    with pytest.raises(ClusterError, match="a group of no ranks"):
        c.H100_NODE.group_link([])
