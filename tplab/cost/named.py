"""The clusters that `find` knows: nodes from data sheets, the same nodes as measured, and networks to connect them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from tplab.cost import data_sheets as sheets
from tplab.cost.cluster import Cluster
from tplab.cost.link import Link
from tplab.cost.measured import fabrics, fitted, kernels
from tplab.cost.own.file import load
from tplab.errors import ClusterError

CARDS: Mapping[str, Link] = MappingProxyType(
    {
        "playbook": sheets.INFINIBAND_NDR,
        "infiniband-ndr": sheets.INFINIBAND_NDR,
        "infiniband-hdr": sheets.INFINIBAND_HDR,
        "efa-p5": sheets.EFA_P5,
        "ethernet-100g": sheets.ETHERNET_100G,
    }
)
"""The fabrics that `find` knows by name, and the link that each gives every GPU of a node by its data sheet."""

H100_NODE = Cluster("h100", sheets.H100, sheets.NVLINK_4, node_size=8, outer_link=sheets.INFINIBAND_NDR)
A100_NODE = Cluster("a100", sheets.A100, sheets.NVLINK_3, node_size=8, outer_link=sheets.INFINIBAND_HDR)
TPU_V5E_RING = Cluster("tpu_v5e", sheets.TPU_V5E, sheets.ICI_V5E, wiring="torus")
THIS_LAPTOP = Cluster("laptop", sheets.LAPTOP_CORE, sheets.LOOPBACK)
SLOW_ETHERNET = Cluster("ethernet", sheets.LAPTOP, sheets.ETHERNET_1G)
B200_NODE = Cluster("b200", sheets.B200, sheets.NVLINK_5, node_size=8, outer_link=sheets.INFINIBAND_NDR)
H200_NODE = replace(H100_NODE, name="h200", chip=sheets.H200)
B300_NODE = Cluster("b300", sheets.B300, sheets.NVLINK_5, node_size=8, outer_link=sheets.INFINIBAND_XDR)
GB200_NVL72 = Cluster("gb200", sheets.GB200, sheets.NVLINK_5, node_size=72, outer_link=sheets.INFINIBAND_NDR)
GB300_NVL72 = Cluster("gb300", sheets.GB300, sheets.NVLINK_5, node_size=72, outer_link=sheets.INFINIBAND_XDR)


def _measured(node: Cluster, fabric: str, gpu: str | None = None) -> Cluster:
    """The same node with constants fitted to measurements, instead of figures from data sheets.

    gpu   the chip whose constants are used, if the node's own chip was not measured
    """
    known, chip, link = fitted(gpu or node.name), node.chip, node.inner_link
    reached = kernels(gpu or node.name)
    if gpu is not None:
        known = replace(known, borrowed=f"an {gpu.upper()}")
    sent, latency = known.nccl.message_bandwidth, known.nccl.message_latency
    whose = f", those of {known.borrowed}," if known.borrowed else ""
    by = f"fitted{whose} by benchmarks.fit to {known.source}"
    return replace(
        node,
        name=f"{node.name}-measured",
        chip=replace(chip, launch=reached.wide.start, kernels=reached, source=f"{chip.source}. Shares: {by}"),
        inner_link=Link(f"{link.name}, as NCCL uses it", latency, sent, by),
        fitted=known,
        fabric=fabrics()[fabric],
    )


H100_MEASURED = _measured(H100_NODE, "playbook")
A100_MEASURED = _measured(A100_NODE, "infiniband-hdr")
B200_MEASURED = _measured(B200_NODE, "infiniband-ndr")
H200_MEASURED = _measured(H200_NODE, "infiniband-ndr", "h100")

NAMED: Mapping[str, Cluster] = MappingProxyType(
    {
        cluster.name: cluster
        for cluster in (
            *(H100_NODE, H200_NODE, A100_NODE, B200_NODE, B300_NODE, GB200_NVL72, GB300_NVL72),
            *(TPU_V5E_RING, THIS_LAPTOP, SLOW_ETHERNET),
            *(H100_MEASURED, H200_MEASURED, A100_MEASURED, B200_MEASURED),
        )
    }
)
"""The clusters that `find` knows by name."""


def find(cluster: str | Cluster, fabric: str | None = None) -> Cluster:
    """A cluster by name, or from a file that `tplab.measure` wrote; a Cluster is returned unchanged.

    "h100", "h200", "a100", "b200", "b300"                nodes of 8 from data sheets
    "gb200", "gb300"                                      NVL72: 72 GPUs that NVLink connects as one node
    "tpu_v5e", "laptop", "ethernet"                       likewise from data sheets
    "h100-measured", "a100-measured", "b200-measured"     forecasts, fitted to measurements
    "h200-measured"                                       an H100's constants, and an H200's memory
    "mine.json"                                           measured by you

    fabric   the network between its nodes, instead of its own: "playbook", "infiniband-ndr", "infiniband-hdr",
             "efa-p5", "ethernet-100g", or a file as above. On a data sheet, only its cards count
    """
    found = _find(cluster)
    return found if fabric is None else _joined_by(found, fabric)


def _find(cluster: str | Cluster) -> Cluster:
    if isinstance(cluster, Cluster):
        return cluster
    known = ", ".join(repr(name) for name in NAMED)
    if not isinstance(cluster, str):
        raise ClusterError(f"cluster is {cluster!r}; give one of {known}, or a tplab.cost.Cluster of your own")
    if cluster.endswith(".json"):
        return load(cluster)
    if cluster not in NAMED:
        raise ClusterError(
            f"no cluster is named {cluster!r}; there are {known}; or give a file that tplab.measure wrote, or a "
            "tplab.cost.Cluster"
        )
    return NAMED[cluster]


def _joined_by(cluster: Cluster, fabric: str) -> Cluster:
    """The cluster's nodes, connected by another network."""
    if cluster.outer_link is None:
        raise ClusterError(f"cluster {cluster.name!r} is one node, so no fabric joins it; it cannot have {fabric!r}")
    if str(fabric).endswith(".json"):
        other = load(fabric)
        if other.outer_link is None:
            raise ClusterError(f"{fabric} was measured on one node, so it says nothing of a network between nodes")
        return replace(cluster, outer_link=other.outer_link, fabric=other.fabric if cluster.fitted else None)
    if fabric not in CARDS:
        near = difflib.get_close_matches(str(fabric), CARDS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ClusterError(f"no fabric is named {fabric!r}; there are {', '.join(map(repr, CARDS))}{hint}")
    return replace(cluster, outer_link=CARDS[fabric], fabric=fabrics()[fabric] if cluster.fitted else None)
