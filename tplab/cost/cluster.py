"""Clusters: chips, the links between them, and how long each takes; every figure has its source.

There are only two formulas:

    compute    launch + max(FLOPs / peak, bytes / memory bandwidth)     the roofline, Williams et al. 2009
    message    latency + bytes / bandwidth                              Hockney 1994

Peaks are what data sheets promise. Real programs reach only part of them, so a modelled time is a lower bound: it
compares designs fairly, but it does not forecast seconds.

You can define your own cluster like those below, or change one figure of a known one with `dataclasses.replace`:

    mine = Cluster("mine", chip=H100, inner_link=Link("PCIe 5 x16", latency=5e-6, bandwidth=64e9))
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Real
from types import MappingProxyType
from typing import Literal

from tplab.errors import ClusterError


def _check(what: str, name: str, value: object, *, zero: bool = False, infinite: bool = False) -> None:
    """Raise ClusterError if a figure is not a number, or not a possible one."""
    number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    enough = number >= 0 if zero else number > 0  # False for nan
    if not enough or (number == math.inf and not infinite):
        least = "0 or more" if zero else "more than 0"
        units = "plain units: s, B, B/s, FLOP/s"
        raise ClusterError(f"{what}: {name} is {value!r}; it must be a number, {least}, in {units}")


@dataclass(frozen=True)
class Chip:
    """What one rank computes on.

    flops              FLOP/s by dtype name: {"bfloat16": 989e12, ...}. Dense peaks, without structured sparsity
    memory_bandwidth   B/s between the chip and its main memory
    memory             B of main memory
    launch             s of overhead before every operation starts, however small it is
    source             where the figures come from
    """

    name: str
    flops: Mapping[str, float] = field(hash=False)  # a mapping has no hash; equality still compares it
    memory_bandwidth: float
    memory: float
    launch: float = 0.0
    source: str = ""

    def __post_init__(self):
        what = f"chip {self.name!r}"
        if not isinstance(self.flops, Mapping) or not self.flops:
            raise ClusterError(f"{what}: flops is {self.flops!r}; give one dtype at least, as {{'float32': 1e12}}")
        for dtype, rate in self.flops.items():
            _check(what, f"flops[{dtype!r}]", rate)
        _check(what, "memory_bandwidth", self.memory_bandwidth)
        _check(what, "memory", self.memory)
        _check(what, "launch", self.launch, zero=True)
        object.__setattr__(self, "flops", MappingProxyType(dict(self.flops)))

    def __reduce__(self):  # a mapping proxy cannot be pickled, and chips travel to other processes
        values = [getattr(self, f.name) for f in fields(self)]
        return Chip, tuple(dict(value) if isinstance(value, Mapping) else value for value in values)

    def peak(self, dtype: str) -> float:
        """FLOP/s for `dtype`. A dtype without a figure of its own runs at the slowest rate listed."""
        rate = self.flops.get(dtype)
        return min(self.flops.values()) if rate is None else rate

    def seconds(self, flops: float, bytes: float, dtype: str = "float32") -> float:
        """The roofline: launch + max(flops / peak(dtype), bytes / memory_bandwidth)."""
        return self.launch + max(flops / self.peak(dtype), bytes / self.memory_bandwidth)

    def ridge(self, dtype: str) -> float:
        """The FLOPs per byte from which an operation is limited by arithmetic rather than by memory."""
        return self.peak(dtype) / self.memory_bandwidth


@dataclass(frozen=True)
class Link:
    """What carries messages between two ranks; both directions work at once.

    latency     s until the first byte arrives
    bandwidth   B/s in one direction
    source      where the figures come from
    """

    name: str
    latency: float
    bandwidth: float
    source: str = ""

    def __post_init__(self):
        what = f"link {self.name!r}"
        _check(what, "latency", self.latency, zero=True)
        _check(what, "bandwidth", self.bandwidth, infinite=True)

    def seconds(self, bytes: float) -> float:
        """One message: latency + bytes / bandwidth."""
        return self.latency + bytes / self.bandwidth


@dataclass(frozen=True)
class Cluster:
    """The chips that a program runs on, one per rank, and the links that connect them.

    inner_link   between two ranks of one node
    node_size    how many consecutive ranks make a node (8: ranks 0..7, 8..15, ...); None: all ranks are one node
    outer_link   between ranks of different nodes

    wiring       "switch": every rank has one outgoing port, as fast as the link, which all its messages share
                 (NVSwitch, Ethernet). "torus": every rank has its own link to each neighbour, so messages up and down
                 a ring do not slow each other down (TPU); the axes of the mesh are then the axes of the torus
    """

    name: str
    chip: Chip
    inner_link: Link
    node_size: int | None = None
    outer_link: Link | None = None
    wiring: Literal["switch", "torus"] = "switch"

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
        if self.outer_link is None:
            return
        if not isinstance(self.outer_link, Link):
            raise ClusterError(f"{what}: outer_link is {self.outer_link!r}; give a tplab.cost.Link")
        if isinstance(self.node_size, bool) or not isinstance(self.node_size, int) or self.node_size < 1:
            raise ClusterError(f"{what}: node_size is {self.node_size!r}; it must be a whole number, 1 or more")

    def link(self, a: int, b: int) -> Link:
        """The link that carries a message from rank `a` to rank `b`. A message to itself takes no time."""
        if a < 0 or b < 0:
            raise ClusterError(f"cluster {self.name!r}: no link from rank {a} to rank {b}; ranks count from 0")
        if a == b:
            return NO_LINK
        if self.node_size is None or self.outer_link is None or a // self.node_size == b // self.node_size:
            return self.inner_link
        return self.outer_link

    def group_link(self, ranks: Sequence[int]) -> Link:
        """The slowest link on the ring over `ranks`: every round of a ring lasts as long as its slowest hop.

        Slowest means the least bandwidth and, if that is equal, the most latency. One rank alone needs no link.
        """
        if len(ranks) == 0:
            raise ClusterError(f"cluster {self.name!r}: a group of no ranks has no links; give one rank at least")
        hops = zip(ranks, [*ranks[1:], ranks[0]])
        return min((self.link(a, b) for a, b in hops), key=lambda link: (link.bandwidth, -link.latency))

    def compute_seconds(self, flops: float, bytes: float, dtype: str = "float32") -> float:
        """The roofline of this cluster's chip: launch + max(flops / peak(dtype), bytes / memory bandwidth)."""
        return self.chip.seconds(flops, bytes, dtype)

    def table(self) -> str:
        """Every figure with its source, as text to print."""
        chip, lines = self.chip, [f"cluster {self.name}"]
        lines.append(f"  chip  {chip.name}")
        lines += [f"        {dtype:<15}{_si(rate, 'FLOP/s')}" for dtype, rate in chip.flops.items()]
        lines.append(f"        {'memory':<15}{_si(chip.memory, 'B')} at {_si(chip.memory_bandwidth, 'B/s')}")
        lines.append(f"        {'launch':<15}{_si(chip.launch, 's')}")
        lines.append(f"        {chip.source or 'no source given'}")
        links = [(f"{self.inner_link.name}, within a node of {self.node_size or 'all'} ranks", self.inner_link)]
        if self.outer_link is not None:
            links.append((f"{self.outer_link.name}, between nodes", self.outer_link))
        for title, link in links:
            lines.append(f"  link  {title}")
            lines.append(f"        {_si(link.latency, 's')} + bytes / ({_si(link.bandwidth, 'B/s')})")
            lines.append(f"        {link.source or 'no source given'}")
        return "\n".join(lines)


def _si(value: float, unit: str) -> str:
    """3.35e12, 'B/s' -> '3.35 TB/s'."""
    for exponent, prefix in zip(range(15, -12, -3), ("P", "T", "G", "M", "k", "", "m", "u", "n")):
        if value >= 10.0**exponent:
            return f"{value / 10.0**exponent:.4g} {prefix}{unit}"
    return f"{value:.4g} {unit}"


NO_LINK = Link("the rank itself", latency=0.0, bandwidth=math.inf, source="nothing is sent")
ONE_HOP = Link("one hop", latency=1.0, bandwidth=math.inf, source="unit times: a message takes 1, whatever its size")

# ---------------------------------------------------------------------------------------------------------- figures

# What an eagerly launched GPU kernel costs if nothing hides it: a few microseconds, depending on the host.
_GPU_LAUNCH = 5e-6

H100 = Chip(
    "H100 SXM 80GB",
    flops={
        "bfloat16": 989e12,
        "float16": 989e12,
        "float32": 67e12,  # without TF32, as torch multiplies by default
        "float64": 67e12,  # tensor cores
        "float8_e4m3fn": 1979e12,
        "float8_e5m2": 1979e12,
        "int8": 1979e12,
    },
    memory_bandwidth=3.35e12,
    memory=80e9,
    launch=_GPU_LAUNCH,
    source="NVIDIA H100 data sheet; its tensor-core peaks count sparsity: halved here. launch: assumed",
)
A100 = Chip(
    "A100 SXM 80GB",
    flops={
        "bfloat16": 312e12,
        "float16": 312e12,
        "float32": 19.5e12,  # without TF32
        "float64": 19.5e12,  # tensor cores
        "int8": 624e12,
    },
    memory_bandwidth=2.039e12,
    memory=80e9,
    launch=_GPU_LAUNCH,
    source="NVIDIA A100 80GB data sheet. launch: assumed",
)
TPU_V5E = Chip(
    "TPU v5e",
    flops={
        "bfloat16": 197e12,
        "float32": 197e12,  # XLA multiplies float32 in one bfloat16 pass unless asked for more precision
        "int8": 393e12,
    },
    memory_bandwidth=819e9,
    memory=16e9,
    launch=1e-6,
    source="cloud.google.com/tpu/docs/v5e. launch: assumed; operations are compiled into one program",
)
LAPTOP = Chip(
    "laptop, 2 cores",
    flops={"float32": 192e9, "float64": 96e9},
    memory_bandwidth=40e9,
    memory=8e9,
    launch=5e-6,
    source="assumed: 2 cores x 3 GHz x 2 FMA units (2 FLOPs) x 8 float32 (AVX2); two channels of DDR4; eager dispatch",
)
LAPTOP_CORE = Chip(
    "laptop, one of its cores",
    flops={"float32": 96e9, "float64": 48e9},
    memory_bandwidth=20e9,
    memory=4e9,
    launch=5e-6,
    source="assumed: half of a 2-core laptop",
)

# NCCL has three protocols. This is the latency of LL128, which still reaches 95% of the peak bandwidth over NVLink
# (Hu et al. 2025, "Demystifying NCCL"); Simple would be 3.4 and 9.6 us, LL 0.6 and 2.7 us at half the bandwidth.
_NCCL = "latency: NCCL, src/graph/tuning.cc, ring with LL128"

NVLINK_4 = Link("NVLink 4", 1.9e-6, 450e9, f"NVIDIA H100 data sheet: 900 GB/s, both directions together. {_NCCL}")
NVLINK_3 = Link("NVLink 3", 1.9e-6, 300e9, f"NVIDIA A100 data sheet: 600 GB/s, both directions together. {_NCCL}")
INFINIBAND_NDR = Link("InfiniBand NDR", 4.0e-6, 50e9, f"400 Gb/s, one ConnectX-7 per GPU in DGX H100. {_NCCL}, network")
INFINIBAND_HDR = Link("InfiniBand HDR", 4.0e-6, 25e9, f"200 Gb/s, one ConnectX-6 per GPU in DGX A100. {_NCCL}, network")
ICI_V5E = Link(
    "ICI",
    1e-6,
    50e9,
    "cloud.google.com/tpu/docs/v5e: 1,600 Gb/s per chip over 4 ports, so 400 Gb/s per port and direction. "
    "latency: Austin et al. 2025, How to Scale Your Model, part 3",
)
LOOPBACK = Link("TCP over loopback", 25e-6, 5e9, "assumed; two processes on 2 cores measured 26 us and 5.1 GB/s")
ETHERNET_1G = Link("1 Gb Ethernet", 50e-6, 125e6, "IEEE 802.3ab: 1 Gb/s. latency: assumed, TCP through one switch")
ETHERNET_10G = Link("10 Gb Ethernet", 20e-6, 1.25e9, "IEEE 802.3an: 10 Gb/s. latency: assumed, TCP through one switch")

H100_NODE = Cluster("h100", H100, NVLINK_4, node_size=8, outer_link=INFINIBAND_NDR)
A100_NODE = Cluster("a100", A100, NVLINK_3, node_size=8, outer_link=INFINIBAND_HDR)
TPU_V5E_RING = Cluster("tpu_v5e", TPU_V5E, ICI_V5E, wiring="torus")
THIS_LAPTOP = Cluster("laptop", LAPTOP_CORE, LOOPBACK)
SLOW_ETHERNET = Cluster("ethernet", LAPTOP, ETHERNET_1G)

NAMED: Mapping[str, Cluster] = MappingProxyType(
    {cluster.name: cluster for cluster in (H100_NODE, A100_NODE, TPU_V5E_RING, THIS_LAPTOP, SLOW_ETHERNET)}
)
"""The clusters that `find` knows by name."""


def find(cluster: str | Cluster) -> Cluster:
    """A cluster by name ("h100", "a100", "tpu_v5e", "laptop", "ethernet"); a Cluster is returned unchanged."""
    if isinstance(cluster, Cluster):
        return cluster
    known = ", ".join(repr(name) for name in NAMED)
    if not isinstance(cluster, str):
        raise ClusterError(f"cluster is {cluster!r}; give one of {known}, or a tplab.cost.Cluster of your own")
    if cluster not in NAMED:
        raise ClusterError(f"no cluster is named {cluster!r}; there are {known}; or pass a tplab.cost.Cluster")
    return NAMED[cluster]
