"""Published measurements on real GPUs: one table per file, each with its source, and the constants fitted to them.

Forecasts are fitted to these rows, by `benchmarks.fit` in the repository, and compared with them.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tplab.cost.attention import Attention
from tplab.cost.fabric import Error, Fabric, Fitted
from tplab.cost.kernels import Kernels, Tiles
from tplab.cost.nccl import Nccl, Ratios

HERE = Path(__file__).parent
CONSTANTS = HERE / "constants.json"
FABRICS = HERE / "fabrics.json"
MULTIPROCESSORS = {"h100": (132, 50e6), "a100": (108, 40e6), "b200": (148, 126e6)}
"""Multiprocessors of a chip, and bytes of the cache that they share (data sheets)."""


class Collective(NamedTuple):
    """One collective of NCCL in a node of `gpu`s. bytes: the whole tensor; for an all_to_all, the input of each GPU."""

    gpu: str
    op: str
    gpus: int
    bytes: float
    seconds: float


class Network(NamedTuple):
    """One collective of 256 MB over `nodes` nodes of 8 GPUs. low and high: the band that the source draws around it."""

    op: str
    nodes: int
    bus_bandwidth: float
    low: float
    high: float

    def seconds_at(self, bus_bandwidth: float) -> float:
        """Bus bandwidth counts what passes a rank's link: (R-1)/R of the tensor, twice for an all_reduce."""
        ranks = 8 * self.nodes
        return (2 if self.op == "all_reduce" else 1) * (ranks - 1) / ranks * NETWORK_BYTES / bus_bandwidth

    @property
    def seconds(self) -> float:
        return self.seconds_at(self.bus_bandwidth)


class Between(NamedTuple):
    """One collective over `nodes` nodes of 8 H100s, connected by a fabric. bytes: as in `Collective`."""

    fabric: str
    op: str
    nodes: int
    bytes: float
    seconds: float


class RingAttention(NamedTuple):
    """Attention of Llama 3.1 8B over 8 `gpu`s with 8,192 tokens each.

    api       "batch": one sequence of 65,536 tokens; "varlen": packed documents
    passes    "fwd" or "fwd+bwd"
    variant   "ring", "zigzag", "stripe"; "llama3_allgather", which gathers keys and values
    seconds   of one iteration; ideal: with the same FLOPs of flash attention on each GPU, and nothing sent
    """

    api: str
    gpu: str
    passes: str
    variant: str
    seconds: float
    ideal: float

    @property
    def efficiency(self) -> float:
        return self.ideal / self.seconds


NETWORK_BYTES = 256e6


@cache
def collectives() -> tuple[Collective, ...]:
    rows = read(HERE / "nccl.csv")
    return tuple(Collective(r["gpu"], r["op"], int(r["gpus"]), float(r["bytes"]), float(r["us"]) / 1e6) for r in rows)


def collective_times(gpu: str, op: str, gpus: int) -> list[tuple[float, float]]:
    """(bytes of the whole tensor, seconds) of NCCL's `op` over this many `gpu`s of a node."""
    return [(row.bytes, row.seconds) for row in collectives() if row[:3] == (gpu, op, gpus)]


@cache
def network() -> tuple[Network, ...]:
    rows = read(HERE / "network_h100.csv")
    rates = [(float(r["gb_s"]) * 1e9, float(r["low"]) * 1e9, float(r["high"]) * 1e9) for r in rows]
    return tuple(Network(r["op"], int(r["nodes"]), *rate) for r, rate in zip(rows, rates))


@cache
def between() -> tuple[Between, ...]:
    """All collectives between nodes, for every measured fabric that `tplab.cost.find` knows."""
    playbook = [
        Between("playbook", row.op, row.nodes, NETWORK_BYTES, row.seconds) for row in network() if row.nodes > 1
    ]
    rows = read(HERE / "between.csv")
    others = [Between(r["fabric"], r["op"], int(r["nodes"]), float(r["bytes"]), float(r["us"]) / 1e6) for r in rows]
    return (*playbook, *others)


@cache
def ring_attention() -> tuple[RingAttention, ...]:
    return tuple(
        RingAttention(r["api"], r["gpu"], r["pass"], r["variant"], 1 / float(r["reached"]), 1 / float(r["ideal"]))
        for r in read(HERE / "ring_attention.csv")
    )


def source(name: str, part: str = "") -> str:
    """The source of a table: "nccl", "network_h100", "ring_attention"; or "between" and the name of a fabric, each of
    which has its own source."""
    return source_of(HERE / f"{name}.csv", part)


def source_of(table: Path, part: str = "") -> str:
    """The source of a table, or of a part of it, from its first lines."""
    first = f"# source of {part}: " if part else "# source: "
    lines = table.read_text(encoding="utf-8").splitlines()
    return next(line.removeprefix(first) for line in lines if line.startswith(first))


def read(table: Path) -> list[dict[str, str]]:
    """The rows of a table; lines that begin with # are about it."""
    lines = table.read_text(encoding="utf-8").splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


# ------------------------------------------------------------------------------------------------------------ constants


@cache
def constants() -> dict[str, Any]:
    """The constants written by `python -m benchmarks.fit.chips --write` and `...fabrics --write`."""
    return json.loads(CONSTANTS.read_text(encoding="utf-8"))


@cache
def fitted(gpu: str) -> Fitted:
    """The constants fitted to nodes of "a100", "h100" or "b200"."""
    found = constants()
    nccl = Nccl(**found["nccl"][gpu], ratios=Ratios(**found["ratios"]))
    errors = {name: Error(*of[gpu]) for name, of in found["errors"].items() if gpu in of}
    return Fitted(nccl, errors, source("nccl"))


@cache
def fabrics() -> dict[str, Fabric]:
    """The measured networks between nodes, by key, as written by `benchmarks.fit.fabrics`."""
    found = json.loads(FABRICS.read_text(encoding="utf-8"))
    return {key: Fabric(**of | {"error": Error(*of["error"]) if of["error"] else None}) for key, of in found.items()}


@cache
def kernels(gpu: str) -> Kernels:
    """The measured kernels of a chip."""
    return kernels_of(gpu, constants())


def kernels_of(gpu: str, found: Mapping[str, Any]) -> Kernels:
    """The kernels of a chip with these constants."""
    narrow = found["matmuls in 8 bit"].get(gpu)
    multiprocessors, cache_bytes = MULTIPROCESSORS[gpu]
    return Kernels(
        wide=Tiles(**found["matmuls"][gpu]),
        narrow=narrow and Tiles(**narrow),
        bandwidth=found["bandwidth"][gpu],
        multiprocessors=multiprocessors,
        cache=cache_bytes,
        resident=found["resident"],
        attention=tuple(Attention(**kernel) for kernel in found["attention"][gpu]),
    )
