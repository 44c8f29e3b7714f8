"""docs/clock.md, "How right is the clock?": every measured table beside the clock's times, computed by its code.

python -m website.clock      rewrites the page
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from benchmarks.fit import attention
from benchmarks.fit import matmuls as fit
from benchmarks.fit.least import summary
from benchmarks.fit.tables import matmuls, prompts, source
from tplab import cost
from tplab.cost import measured
from tplab.cost.kernels import Kernels
from tplab.units import bytes_text
from website import device, networks, sheets
from website.device import table, us
from website.networks import off, pair

PAGE = Path(__file__).parent.parent / "docs" / "clock.md"
NAMES = {"a100": "A100", "h100": "H100", "b200": "B200"}
OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
SIZES = ((1, 64), (65, 1024), (1025, 1 << 30))
"""Rows of a left matrix: few, some and many tokens."""
LENGTHS = ((128, 1023), (1024, 4095), (4096, 1 << 30))
"""Tokens of a prompt."""

INTRODUCTION = """\
# How right is the clock?

<!-- written by python -m website.clock -->

A modelled time in tplab is one of two things, and every trace, summary and widget says which.

- On a **data sheet** (`cluster="h100"`), a time is modelled at peak rates: chips and links reach what is promised, and
  every operation takes 5 us to start. That is right for comparing designs. It is neither a forecast nor a bound. Large
  operations take longer on a real GPU, mostly by a quarter to a half. Small ones may take less: see "Faster than the
  data sheet" below.
- A **forecast** (`cluster="h100-measured"`, `"a100-measured"`, `"b200-measured"`) is the same clock with constants
  fitted to what others have measured. Its label has its error: half of the rows that it had not seen are nearer than
  that. Between nodes, the label names the network and has the network's error.

Below is every table that the constants were fitted to, with its source, beside what the clock says.
`python -m benchmarks.fit.chips` and `python -m benchmarks.fit.fabrics` fit them again. There are at most 22
constants per chip: nine for NCCL (`tplab.cost.nccl`), six for matmuls, four for those in FP8 (`tplab.cost.kernels`),
and three for attention (`tplab.cost.attention`). About a dozen more are shared by chips. A network has two to six
(`tplab.cost.fabric`).

## In short

"Seen" are errors on the rows that were fitted, "unseen" on rows that a fit had not seen: a third of the rows at a time
(collectives, matmuls, attention), or all rows of one number of nodes (networks). Each pair is the median, and what nine
of ten rows stay below.
"""

LIMITS = """\
## What this does not say

- The rows are of one operation at a time. A program that starts each operation from Python may wait for Python longer
  than a small one takes.
- An all_to_all of few bytes sometimes took 16 us and sometimes 7 on the same H100s. No smooth formula follows that.
- NCCL's jump from one protocol to another is at one number of bytes per link here. It really depends on the operation
  and on the number of GPUs, and near it errors of 20 to 30 % are common.
- Kernels of an H200 are taken to be those of an H100, with the memory of an H200. "On GPUs of our own" above has the
  errors of that on one H200. Its memory is faster, and no table of others was fitted to it.
- No collective of large messages was measured on InfiniBand NDR, HDR or Ethernet, so their labels have no error. Single
  runs differ: on 64 nodes of the playbook's cluster, the source draws a band from a third of the mean to five times it.
- The rows of the playbook's network are of 256 MB. Its latencies come from training steps, so they have in them what
  nanotron did beside its messages.
- What is limited by memory counts as if it read and wrote each number once. A softmax took twice as long as that on our
  H100 and three times on our H200, and a transposed copy six times on both.
- A product of groups (`grouped_mm`, as experts have it) counts as that many products of equal size: on the H200 its
  kernels took 6 to 11 % longer. An `index_add` of rows in bfloat16 adds number by number: it took 5 to 13 times as long
  as its bytes, which is most of what experts of few features were off by.
- Attention in torch counts as the FlashAttention 2 of 2023. On our GPUs, the one in torch 2.11 takes 4 % more to 32 %
  less than that, and cuDNN's kernels take half of it.
- The test that failed on the H200 was given a wrong line by the command itself, which put a call of its own between
  a program and its backward pass. It is mended, and passes with the same command on a CPU; the GPU's time was over.
- Broadcasts, sends and everything else that nobody has measured start as NCCL does, and pass links as it does.
- Two kernels at once on one GPU, power limits and clocks that fall when a GPU is hot are not modelled.
"""


def page() -> str:
    tables = [_summary(), _faster(), _collectives(), _matmuls(), _attention(), networks.section()]
    parts = [INTRODUCTION, *tables, device.section(), sheets.section(), LIMITS]
    return "\n".join(part.rstrip() + "\n" for part in parts)


def _on(gpu: str) -> cost.Cluster:
    return cost.find(f"{gpu}-measured")


def _summary() -> str:
    rows: list[list[str]] = []
    for gpu, name in NAMES.items():
        forecast = _on(gpu).fitted
        assert forecast is not None
        seen = {"collectives": [_found(row) / row.seconds - 1 for row in measured.collectives() if row.gpu == gpu]}
        seen["matmuls"] = fit.matmul_errors(gpu, _kernels(gpu))
        if gpu in fit.IN_8_BIT:
            seen["matmuls in 8 bit"] = fit.errors_in_8_bit(gpu, fit.stored(gpu))
        if gpu in attention.CHIPS:
            seen["attention"] = attention.attention_errors(prompts(gpu), attention.stored(gpu)).tolist()
        for what, errors in seen.items():
            number, pairs = f"{len(errors):,}", (pair(summary(errors)), pair(forecast.errors[what]))
            rows.append([f"{name}, {what}", number, *pairs])
    return table(["what", "rows", "seen", "unseen"], rows + networks.summaries())


def _found(row: measured.Collective) -> float:
    return _on(row.gpu).collective_seconds(row.op, row.bytes, row.gpus)


def _faster() -> str:
    """How many rows were measured faster than at peak rates."""
    lines: list[list[str]] = []
    for gpu, name in NAMES.items():
        sheet = cost.find(gpu)
        took = {
            "collectives": [
                (sheet.collective_seconds(row.op, row.bytes, row.gpus), row.seconds)
                for row in measured.collectives()
                if row.gpu == gpu
            ]
        }
        took["matmuls"] = [(sheet.chip.matmul_seconds(*row[:3]), row.seconds) for row in matmuls(gpu)]
        for what, pairs in took.items():
            slower = [at_peak / seconds for at_peak, seconds in pairs if at_peak > 1.02 * seconds]
            lines.append([f"{name}, {what}", f"{len(pairs):,}", f"{len(slower):,}", f"{max(slower):.1f} times"])
    return f"""\
## Faster than the data sheet

Rows that were measured faster than at peak rates, by more than 2 %. Kernels that follow one another start in half of
5 us, and find a part of their operands in the cache. For few bytes NCCL takes a protocol with less latency than the one
whose latency counts here.

{table(["what", "rows", "faster", "at peak rates at most"], lines)}"""


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
            found, at_peak = _found(row), sheet.collective_seconds(op, row.bytes, row.gpus)
            errors.append(found / row.seconds - 1)
            size = f"{row.gpus} GPUs, {bytes_text(int(row.bytes))}"
            lines.append([size, *map(us, (row.seconds, found)), off(found, row.seconds), us(at_peak)])
        middle, most = summary(errors)
        title = f"{NAMES[gpu]}, {op}: half are within {100 * middle:.1f} %, nine of ten within {100 * most:.0f} %"
        head = ["size", "measured", "forecast", "off by", "data sheet"]
        text += f"\n<details>\n<summary>{title}</summary>\n\n{table(head, lines)}\n</details>\n"
    return text


def _matmuls() -> str:
    text = f"""\
## Matmuls in bfloat16

{source("matmul_h100")}. [m, k] @ [k, n]: the errors of all rows by the
height of the left matrix, and every 60th row.
"""
    for gpu, chip in fit.CHIPS.items():
        rows, errors = matmuls(gpu), fit.matmul_errors(gpu, _kernels(gpu))
        sheet = [chip.matmul_seconds(*row[:3]) for row in rows]
        lines: list[list[str]] = []
        for low, high in SIZES:
            chosen = [place for place, row in enumerate(rows) if low <= row.m <= high]
            at_peak = [sheet[place] / rows[place].seconds - 1 for place in chosen]
            name = f"m from {low} to {high}" if high < 1 << 30 else f"m from {low}"
            pairs = (summary([errors[place] for place in chosen]), summary(at_peak))
            lines.append([name, f"{len(chosen):,}", *map(pair, pairs)])
        text += f"\n{NAMES[gpu]}:\n\n" + table(["size", "rows", "forecast off by", "data sheet off by"], lines)
        order = sorted(range(len(rows)), key=lambda place: rows[place].seconds)[::60]
        some = [
            [
                "{} x {} x {}".format(*rows[place][:3]),
                us(rows[place].seconds),
                us(rows[place].seconds * (1 + errors[place])),
                f"{100 * errors[place]:+.0f} %",
                us(sheet[place]),
            ]
            for place in order
        ]
        head = ["m x n x k, microseconds", "measured", "forecast", "off by", "data sheet"]
        text += f"\n<details>\n<summary>{NAMES[gpu]}, every 60th row</summary>\n\n{table(head, some)}\n</details>\n"
    return text + _in_8_bit()


def _in_8_bit() -> str:
    lines: list[list[str]] = []
    for gpu in fit.IN_8_BIT:
        rows, errors = matmuls(gpu, 8), fit.errors_in_8_bit(gpu, fit.stored(gpu))
        for low, high in SIZES:
            chosen = [place for place, row in enumerate(rows) if low <= row.m <= high]
            name = f"{NAMES[gpu]}, m from {low}" + (f" to {high}" if high < 1 << 30 else "")
            lines.append([name, f"{len(chosen):,}", pair(summary([errors[place] for place in chosen]))])
    return f"""
## Matmuls in FP8

{source("matmul_h100_8bit")}. Products are in bfloat16. The rows also convert the left
matrix to 8 bit. What that takes is fitted too, and left out of forecasts, because libraries that
train convert elsewhere. Products with a scale per block of 128 were measured too, but these kernels are not tiles and
waves: half of the rows on an H100 were off by more than 18 %, so they are not forecast.

{table(["size", "rows", "forecast off by"], lines)}"""


def _attention() -> str:
    text = f"""\
## Fused attention

{source("attention")}. Causal, in bfloat16, forward: prompts of 128 tokens or
more, errors of all rows by the length of the prompt. The rows also write keys and values into a cache. What that takes
is fitted too, and left out of forecasts, because training writes none.
"""
    for gpu in attention.CHIPS:
        rows, kernels = prompts(gpu), attention.stored(gpu)
        errors, lines = attention.attention_errors(rows, kernels), list[list[str]]()
        for low, high in LENGTHS:
            chosen = [place for place, row in enumerate(rows) if low <= row.tokens <= high]
            name = f"from {low:,} to {high:,} tokens" if high < 1 << 30 else f"from {low:,} tokens"
            lines.append([name, f"{len(chosen):,}", pair(summary(errors[chosen].tolist()))])
        text += f"\n{NAMES[gpu]}:\n\n" + table(["length", "rows", "forecast off by"], lines)
    backward = 100 * _kernels("h100").attention_of("flash2", "H100").backward
    return (
        text
        + f"""
FlashAttention 2 is fitted to one pair of rows per GPU: {measured.source("ring_attention")}.
On sequences of 65,536 tokens it reached {_share("A100")} of the peak forward on an A100, and {_share("H800")} on an
H800, which computes as an H100 does. Backward, {backward:.0f} % of that was reached, in the mean. For want of
other rows that serves all kernels.
"""
    )


def _kernels(gpu: str) -> Kernels:
    found = _on(gpu).chip.kernels
    assert found is not None
    return found


def _share(gpu: str) -> str:
    return f"{100 * attention.reached(gpu):.0f} %"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf8")
