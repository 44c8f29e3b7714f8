"""`torchrun --nproc-per-node 8 -m tplab.measure --out mine.json`: your own cluster, accepted wherever a name is."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path

from tplab.commands import leave_working_directory_out
from tplab.cost import NAMED, Cluster, find
from tplab.cost.named import THIS_LAPTOP
from tplab.cost.own import Row, fit_cluster, read_tables, save
from tplab.cost.own.fit import Own
from tplab.errors import TplabError
from tplab.parser import Parser, ended


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, or read measurements; fit a cluster, print its predictions beside them, and write it to a file."""
    parser = Parser(
        prog="torchrun [...] -m tplab.measure",
        description="Measure collectives, messages and matmuls on these ranks, and write a file that is accepted "
        "wherever a cluster's name is. With --nccl-tests, read what nccl-tests printed instead, without torchrun.",
    )
    parser.add_argument("--out", default="mine.json", metavar="FILE", help="the file to write (default: mine.json)")
    parser.add_argument("--name", help="what the cluster is called (default: the file's name)")
    parser.add_argument(
        "--nccl-tests", nargs="+", metavar="FILE", help="tables that all_reduce_perf and the like printed"
    )
    parser.add_argument("--chip", metavar="CLUSTER", help="with --nccl-tests: whose chip it is, as h100-measured")
    parser.add_argument("--fabric", metavar="NAME", help="with --nccl-tests: whose network cards, as infiniband-ndr")
    parser.add_argument("--most", type=int, metavar="MIB", help="the largest tensor (default: 256 on GPUs, 16 on CPUs)")
    given = parser.parse_args(arguments)
    name = given.name or Path(given.out).stem
    if not given.out.endswith(".json") or not Path(given.out).resolve().parent.is_dir():
        parser.error(f"--out is {given.out}; give the name of a .json file in a folder that exists")
    try:
        rows, own = _from_tables(name, given) if given.nccl_tests else _from_ranks(name, given.most)
        if own is not None:
            save(own.cluster, given.out)
            print(report(rows, own), f"\n{given.out}: use it as --cluster {given.out}, or find({given.out!r})")
    except TplabError as error:
        print(f"tplab.measure: {error}", file=sys.stderr)
        return 2
    return 0


def _from_tables(name: str, given: argparse.Namespace) -> tuple[list[Row], Own]:
    tables = read_tables(given.nccl_tests)
    rows = [row for table in tables for row in table.rows]
    base = find(given.chip or _known(tables[0].chip) or "h100-measured", given.fabric)
    source = f"nccl-tests on {tables[0].chip}: {', '.join(Path(file).name for file in given.nccl_tests)}"
    return rows, fit_cluster(name, rows, base, source)


def _from_ranks(name: str, most: int | None) -> tuple[list[Row], Own | None]:
    """Measure on the ranks of torchrun, or on this process alone. Returns ([], None) on all ranks but the first."""
    leave_working_directory_out()
    from tplab.torch.measuring import on_these_ranks

    found = on_these_ranks(most and most * 2**20)
    if not found.rows:
        return [], None
    source = f"measured by tplab.measure with {found.how}, {date.today()}"
    return found.rows, fit_cluster(name, found.rows, _base(found.chip, found.on_gpus), source)


def _base(title: str, on_gpus: bool) -> Cluster:
    """The cluster to start from, for a GPU of this name. For an unknown GPU or a CPU, mostly the measurements count."""
    base = find(_known(title) or "h100-measured") if on_gpus else THIS_LAPTOP
    return replace(base, chip=replace(base.chip, name=title))


def _known(title: str) -> str:
    """The cluster with this chip, preferably a measured one: "NVIDIA H100 80GB HBM3" -> "h100-measured"."""
    words = title.upper().replace("-", " ").split()
    names = [name for name in NAMED if name.removesuffix("-measured").upper() in words]
    return max(names, key=len, default="")


def report(rows: Sequence[Row], own: Own) -> str:
    """The measurements beside the predictions, and the errors on rows that the fit had not seen."""
    lines = [f"{'':16}{'ranks':>6}{'nodes':>6}{'bytes, FLOPs':>14}{'measured':>12}{'predicted':>12}"]
    for row, seconds in zip(rows, own.predicted):
        off = seconds / row.seconds - 1
        name = f"{row.op} {row.dtype}".strip()
        lines.append(
            f"{name:16}{row.ranks:6}{row.nodes:6}{row.bytes:14.4g}"
            f"{row.seconds * 1e6:9.1f} us{seconds * 1e6:9.1f} us{off:+7.0%}"
        )
    errors = dict(own.cluster.fitted.errors) if own.cluster.fitted else {}
    if own.cluster.fabric and own.cluster.fabric.error:
        errors["between nodes"] = own.cluster.fabric.error
    lines += ["Error on rows that the fit had not seen:", f"{'':16}{'median':>12}{'90th percentile':>18}"]
    for name, error in errors.items():
        poor = "   a poor fit: these times do not follow its formula" if error.median > 0.5 else ""
        lines.append(f"{name:16}{error.median:12.0%}{error.most:18.0%}{poor}")
    if not any(row.ranks > 1 for row in rows):
        lines.append("1 rank: no links were measured; start it with torchrun --nproc-per-node 8 -m tplab.measure")
    return "\n".join(lines)


if __name__ == "__main__":
    ended(main)
