"""docs/clock.md, "How right is the clock?": every measured table beside what the clock says, made by the clock's code.

python -m website.clock      writes the page again
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

from tplab import cost
from tplab.cost import fit, measured
from tplab.units import bytes_text
from website import device

PAGE = Path(__file__).parent.parent / "docs" / "clock.md"
NAMES = {"a100": "A100", "h100": "H100", "b200": "B200"}
OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
SIZES = ((1, 64), (65, 1024), (1025, 1 << 30))
"""Rows of a left matrix: few, some and many tokens."""

INTRODUCTION = """\
# How right is the clock?

<!-- written by python -m website.clock -->

A modelled time in tplab is one of two things, and every trace, summary and widget says which.

- On a **data sheet** (`cluster="h100"`), peaks count as promised. That is a bound: right for comparing designs, but
  real programs take longer, mostly by a quarter to a half. For a few kilobytes it is no bound: a hop has the latency of
  one protocol of NCCL, and for few bytes NCCL takes another.
- A **forecast** (`cluster="h100-measured"`, `"a100-measured"`, `"b200-measured"`) is the same clock with constants
  fitted to what others have measured. Its label has its error: half of the rows that it had not seen are nearer than
  that.

Below is every table that the constants were fitted to, with its source, beside what the clock says.
`python -m tplab.cost.fit` fits them again. There are at most twelve constants per chip: eight for NCCL
(`tplab.cost.nccl`) and four for matmuls (`tplab.cost.kernels`). Eleven more are the same for all chips, and two
describe one network.

## In short

"Seen" are errors on the rows that were fitted, "unseen" on rows that a fit had not seen: a third of the rows at a time
(collectives, matmuls), or all rows of one number of nodes (network). Each pair is the median, and what nine of ten rows
stay below.
"""

LIMITS = """\
## What this does not say

- The rows are of one operation at a time. A program that starts each operation from Python may wait for Python longer
  than a small one takes.
- An all_to_all of few bytes sometimes took 16 us and sometimes 7 on the same H100s. No smooth formula follows that.
- NCCL's jump from one protocol to another is at one number of bytes per link here. It really depends on the operation
  and on the number of GPUs, and near it errors of 20 to 30 % are common.
- No table of matmuls on a B200 was found. Its matmuls reach the same shares of the peaks as those of an H100, which
  nobody has checked.
- The network was measured at 256 MB, on one cluster, and single runs differ by far more than
  the forecast is off: on 64 nodes, the source draws a band from a third of the mean to five times it.
- Broadcasts, sends and everything else that nobody has measured start as NCCL does, and pass links as it does.
- Two kernels at once on one GPU, power limits and clocks that fall when a GPU is hot are not modelled.
"""


def page() -> str:
    parts = [INTRODUCTION, _summary(), _collectives(), _matmuls(), _network(), device.section(), LIMITS]
    return "\n".join(part.rstrip() + "\n" for part in parts)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---", *("--:" for _ in head[1:])], *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _off(found: float, true: float) -> str:
    return f"{100 * (found / true - 1):+.0f} %"


def _pair(error: tuple[float, float]) -> str:
    return f"{100 * error[0]:.1f}, {100 * error[1]:.0f} %"


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f}" if seconds < 1e-4 else f"{seconds * 1e6:,.0f}"


def _on(gpu: str) -> cost.Cluster:
    return cost.find(f"{gpu}-measured")


def _summary() -> str:
    rows: list[list[str]] = []
    for gpu, name in NAMES.items():
        forecast = _on(gpu).forecast
        assert forecast is not None
        seen = {"collectives": [_found(row) / row.seconds - 1 for row in measured.collectives() if row.gpu == gpu]}
        if gpu in fit.CHIPS:
            kernels = _on(gpu).chip.kernels
            assert kernels is not None
            seen["matmuls"] = fit.matmul_errors(measured.matmuls(gpu), kernels, fit.CHIPS[gpu])
        if forecast.fabric is not None:
            seen["network"] = fit.network_errors(measured.network(), forecast.fabric, _on(gpu))
        for what, errors in seen.items():
            number, pairs = f"{len(errors):,}", (_pair(fit.summary(errors)), _pair(forecast.errors[what]))
            rows.append([f"{name}, {what}", number, *pairs])
    return _table(["what", "rows", "seen", "unseen"], rows)


def _found(row: measured.Collective) -> float:
    return _on(row.gpu).collective_seconds(row.op, row.bytes, row.gpus)


def _collectives() -> str:
    text = f"""\
## Collectives in one node

{measured.source("nccl")}. Sizes are of the whole tensor; of an all_to_all,
what each GPU has. Microseconds.
"""
    rows = sorted(measured.collectives(), key=lambda row: (list(NAMES).index(row.gpu), OPS.index(row.op), row[2:]))
    for (gpu, op), group in groupby(rows, key=lambda row: (row.gpu, row.op)):
        sheet = cost.find(gpu)
        lines: list[list[str]] = []
        errors: list[float] = []
        for row in group:
            found, bound = _found(row), sheet.collective_seconds(op, row.bytes, row.gpus)
            errors.append(found / row.seconds - 1)
            size = f"{row.gpus} GPUs, {bytes_text(int(row.bytes))}"
            lines.append([size, *map(_us, (row.seconds, found)), _off(found, row.seconds), _us(bound)])
        middle, most = fit.summary(errors)
        title = f"{NAMES[gpu]}, {op}: half are within {100 * middle:.1f} %, nine of ten within {100 * most:.0f} %"
        head = ["size", "measured", "forecast", "off by", "data sheet"]
        text += f"\n<details>\n<summary>{title}</summary>\n\n{_table(head, lines)}\n</details>\n"
    return text


def _matmuls() -> str:
    text = f"""\
## Matmuls in bfloat16

{measured.source("matmul_h100")}. [m, k] @ [k, n]: the errors of all rows by the
height of the left matrix, and every 60th row.
"""
    for gpu, chip in fit.CHIPS.items():
        rows, kernels = measured.matmuls(gpu), _on(gpu).chip.kernels
        assert kernels is not None
        errors, sheet = fit.matmul_errors(rows, kernels, chip), [chip.matmul_seconds(*row[:3]) for row in rows]
        lines: list[list[str]] = []
        for low, high in SIZES:
            chosen = [place for place, row in enumerate(rows) if low <= row.m <= high]
            bound = [sheet[place] / rows[place].seconds - 1 for place in chosen]
            name = f"m from {low} to {high}" if high < 1 << 30 else f"m from {low}"
            pairs = (fit.summary([errors[place] for place in chosen]), fit.summary(bound))
            lines.append([name, f"{len(chosen):,}", *map(_pair, pairs)])
        text += f"\n{NAMES[gpu]}:\n\n" + _table(["size", "rows", "forecast off by", "data sheet off by"], lines)
        order = sorted(range(len(rows)), key=lambda place: rows[place].seconds)[::60]
        some = [
            [
                "{} x {} x {}".format(*rows[place][:3]),
                _us(rows[place].seconds),
                _us(rows[place].seconds * (1 + errors[place])),
                f"{100 * errors[place]:+.0f} %",
                _us(sheet[place]),
            ]
            for place in order
        ]
        head = ["m x n x k, microseconds", "measured", "forecast", "off by", "data sheet"]
        text += f"\n<details>\n<summary>{NAMES[gpu]}, every 60th row</summary>\n\n{_table(head, some)}\n</details>\n"
    return text


def _network() -> str:
    text = f"""\
## One real network

{measured.source("network_h100")}.
Bus bandwidth at 256 MB in GB/s, on nodes of 8 H100s: what passes each rank's link.
"""
    sheet, on = cost.find("h100"), _on("h100")
    lines: list[list[str]] = []
    for row in measured.network():
        found, bound = (c.collective_seconds(row.op, measured.NETWORK_BYTES, 8 * row.nodes) for c in (on, sheet))
        rates = [f"{row.bus_bandwidth * row.seconds / seconds / 1e9:.0f}" for seconds in (row.seconds, found, bound)]
        band = f"{row.low / 1e9:.0f} to {row.high / 1e9:.0f}"
        nodes = f"{row.nodes} node{'s' * (row.nodes > 1)}"
        lines.append([f"{row.op}, {nodes}", rates[0], band, rates[1], _off(found, row.seconds), rates[2]])
    head = ["what", "measured", "band", "forecast", "seconds off by", "data sheet"]
    return text + "\n" + _table(head, lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf8")
