"""Fits the networks between nodes to measurements on them, and prints their errors.

    python -m benchmarks.fit.fabrics            fit, and print constants and errors
    python -m benchmarks.fit.fabrics --write    and write them to tplab/cost/measured/fabrics.json

playbook         collectives of 256 MB, and the training steps of the same cluster on up to 32 nodes, which send smaller
                 messages, whose latency no collective of 256 MB shows. A step also needs two constants of its stack;
                 they are fitted too, and discarded (`benchmarks.fit.steps` fits them again)
efa-p5           all_reduce and all_to_all of many sizes
infiniband-ndr   two sizes of DeepEP's all_to_all. A hop is NCCL's own constant for InfiniBand with its protocol Simple
                 (src/graph/tuning.cc); with it two nodes take 43 us for few bytes, where 46 to 48 were measured
                 (NVIDIA/nccl, issue 1244)

The errors are those on rows that were held out: all rows of one number of nodes at a time. No row can be held out of
two rows for two constants, so InfiniBand has no errors.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from typing import Any

import numpy as np

from benchmarks.fit.least import Array, least, print_errors, rounded, summary
from benchmarks.fit.steps import ratios
from tplab.cost import Cluster, Fabric, find
from tplab.cost.measured import FABRICS, Between, between, source
from tplab.forecast.measured import Run, playbook
from tplab.forecast.stacks import find_stack

MOST_NODES = 32
"""On more nodes the playbook's steps take up to twice as long as on half of them: software, or chance."""
WEIGHT = 0.3
"""The weight of a collective of 256 MB relative to a training step: its measurements spread by a factor of up to 14."""
HOP = 14e-6
PLAYBOOK = {"reached": 0.8, "fall": 0.3, "hop": 45e-6, "tree": 0.6e-3, "factor": 1.3, "host": 4e-3}
EFA = {"reached": 0.7, "fall": 0.2, "hop": 40e-6, "tree": 0.1e-3, "by_peers": 0.8, "peer": 6e-6}
NDR = {"by_peers": 0.9, "begin": 36e-6}
ETHERNET = Fabric("100 Gb Ethernet", 0.9, 0.0, 20e-6, 0.0, 20e-6, 20e-6, 0.0, 0.9, source="not measured: assumed")


def _node(key: str, fabric: Fabric) -> Cluster:
    return replace(find("h100-measured", fabric=key), fabric=fabric)


def errors(key: str, fabric: Fabric, rows: Sequence[Between]) -> list[float]:
    """predicted / measured - 1, for each row."""
    node = _node(key, fabric)
    return [node.collective_seconds(row.op, row.bytes, 8 * row.nodes) / row.seconds - 1 for row in rows]


def rows_of(key: str) -> list[Between]:
    return [row for row in between() if row.fabric == key]


def _fabric(key: str, values: Mapping[str, float]) -> Fabric:
    """A fabric of these constants. By default, `near` is `hop`, and all_to_all reaches the bandwidth of rings."""
    of: dict[str, Any] = {name: value for name, value in values.items() if name in Fabric.__slots__}
    if key != "infiniband-ndr":
        of = {"near": of["hop"], "begin": 0.0 if "peer" in of else of["hop"], "by_peers": of["reached"]} | of
    else:
        of = {"hop": HOP, "tree": HOP, "reached": of["by_peers"]} | of
    return Fabric(NAMES[key], **of)


NAMES = {"playbook": "the playbook's network", "efa-p5": "EFA", "infiniband-ndr": "InfiniBand NDR"}


# ------------------------------------------------------------------------------------------------------------- fitting


def fit_rows(key: str, begin: Mapping[str, float], rows: Sequence[Between]) -> Fabric:
    """Fit the constants that `begin` names, to collectives only."""

    def residuals(theta: Array) -> Array:
        return np.log1p(errors(key, _fabric(key, dict(zip(begin, np.exp(theta).tolist()))), rows))

    shares = [place for place, name in enumerate(begin) if name in ("reached", "by_peers")]
    _, theta = least(residuals, np.log(list(begin.values())), 0.05, shares=shares)
    return _fabric(key, dict(zip(begin, np.exp(theta).tolist())))


@cache
def steps() -> tuple[Run, ...]:
    """The playbook's steps without a pipeline: its engine was later replaced."""
    return tuple(run for run in playbook() if run.plan.pp == 1 and run.plan.ranks <= 8 * MOST_NODES)


def fit_playbook(rows: Sequence[Between], runs: Sequence[Run]) -> Fabric:
    nanotron = find_stack("nanotron")

    def residuals(theta: Array) -> Array:
        values = dict(zip(PLAYBOOK, np.exp(theta).tolist()))
        fabric = _fabric("playbook", values)
        stack = replace(nanotron, factor=values["factor"], host=values["host"])
        node = _node("playbook", fabric)
        taken = -np.log(ratios(runs, stack, node))
        return np.concatenate([taken, WEIGHT * np.log1p(errors("playbook", fabric, rows))])

    _, theta = least(residuals, np.log(list(PLAYBOOK.values())), 0.05, shares=[0])
    return _fabric("playbook", dict(zip(PLAYBOOK, np.exp(theta).tolist())))


def fit(key: str, left_out: int = 0) -> Fabric:
    """A fabric, fitted to its measurements except for the rows on `left_out` nodes."""
    rows = [row for row in rows_of(key) if row.nodes != left_out]
    if key == "playbook":
        return fit_playbook(rows, [run for run in steps() if run.plan.ranks != 8 * left_out])
    return fit_rows(key, EFA if key == "efa-p5" else NDR, rows)


def hold_out(key: str) -> list[float]:
    """The errors on rows that were held out: those of each number of nodes in turn."""
    numbers = sorted({row.nodes for row in rows_of(key)})
    fitted = {number: fit(key, number) for number in numbers}
    return [
        off for number in numbers for off in errors(key, fitted[number], [r for r in rows_of(key) if r.nodes == number])
    ]


def constants(fabric: Fabric) -> dict[str, Any]:
    """The constants of a fabric for the file."""
    found = {name: rounded(value) if isinstance(value, float) else value for name, value in asdict(fabric).items()}
    return {name: value for name, value in found.items() if value != 0}


def main(arguments: Sequence[str]) -> None:
    written = json.loads(FABRICS.read_text(encoding="utf-8"))
    for key in NAMES:
        fabric = fit(key)
        seen = errors(key, fabric, rows_of(key))
        print_errors(f"{key}, fitted", {"": summary(seen)})
        if key != "infiniband-ndr":
            off = summary(hold_out(key))
            print_errors(f"{key}, numbers of nodes left out", {"": off})
            fabric = replace(fabric, error=off)
        written[key] = constants(replace(fabric, source=source_of(key)))
        print(written[key])
    ndr = written["infiniband-ndr"]
    written["infiniband-hdr"] = ndr | {"name": "InfiniBand HDR", "source": "not measured: constants of InfiniBand NDR"}
    written["ethernet-100g"] = constants(ETHERNET)
    if "--write" in arguments:
        FABRICS.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
        print(f"written: {FABRICS.name}; import tplab anew to use it")


def source_of(key: str) -> str:
    return source("network_h100") if key == "playbook" else source("between", key)


if __name__ == "__main__":
    main(sys.argv[1:])
