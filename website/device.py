"""The section of docs/clock.md about our own GPUs: the results of `python -m benchmarks.device`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.device import report
from benchmarks.device.__main__ import RESULT
from benchmarks.device.check import Check

TITLE = "## On GPUs of our own\n"
COMMAND = "python -m benchmarks.device"


def section(*files: Path) -> str:
    """The section, read from one file per GPU (by default those beside the command), or a note if there is none."""
    files = tuple(file for file in files or sorted(RESULT.parent.glob(f"{RESULT.stem}*.json")) if file.exists())
    if not files:
        return (
            f"{TITLE}\nNot run yet. On a machine with a GPU, `{COMMAND}` takes eight minutes and writes the tables.\n"
        )
    return "\n".join([TITLE, INTRODUCTION, *(part for file in files for part in _gpu(*report.read(file)))])


INTRODUCTION = f"""\
`{COMMAND}` writes these tables. Measured beside modelled, by class: what half of the
rows are within, and nine of ten. "Measured" is a CUDA graph of the operation, replayed; backward passes are measured
eagerly. The last column is the eager time as a multiple of that, in the middle row. No constant of the clock was fitted
to these rows.
"""


def _gpu(about: Mapping[str, Any], checks: Sequence[Check]) -> list[str]:
    measured = [check for check in checks if check.item == "clock" and check.figures.get("rows")]
    return [f"### {about.get('chip', 'A machine without a GPU')}\n", _about(about), *_clock(measured), *_tried(checks)]


def _about(about: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in about.get("packages", {}).items() if name in _SHOWN)
    driver = f"Driver {about['driver']}, CUDA {about['cuda']}, " if "driver" in about else ""
    return f"{driver}Python {about.get('python', '?')}, {versions}. {about['date']}, tplab {about['commit']}.\n"


_SHOWN = ("torch", "triton", "jax", "numpy")


# --- the clock --------------------------------------------------------------------------------------------------------


def _clock(checks: Sequence[Check]) -> list[str]:
    if not checks:
        return []
    first = checks[0].figures
    text = f'The forecast is `cluster="{first["forecast"]}"`, and the data sheet is `cluster="{first["sheet"]}"`.\n'
    head = ["class", "rows", "forecast off by", "data sheet off by", "eager takes"]
    rows = [[check.what, str(len(check.figures["rows"])), *_spreads(check.figures["rows"])] for check in checks]
    tables = [_details(check) for check in checks]
    return [text, table(head, rows), *tables]


def _spreads(rows: Sequence[Sequence[Any]]) -> list[str]:
    measured, eager, forecast, sheet = (np.array([row[place] for row in rows], float) for place in (1, 2, 3, 4))
    return [*(spread(found / measured - 1) for found in (forecast, sheet)), f"{np.median(eager / measured):.1f} x"]


def spread(errors: Iterable[float]) -> str:
    off = 100 * np.abs(np.array([*errors]))
    return f"{np.median(off):.1f}, {np.quantile(off, 0.9):.0f} %"


def _details(check: Check) -> str:
    lines = []
    for what, measured, eager, forecast, sheet, _ in check.figures["rows"]:
        off = [f"{100 * (found / measured - 1):+.0f} %" for found in (forecast, sheet)]
        lines.append([what, us(measured), us(eager), us(forecast), off[0], us(sheet), off[1]])
    head = [f"{check.what}, microseconds", "measured", "eager", "forecast", "off by", "data sheet", "off by"]
    return f"<details>\n<summary>{check.what}</summary>\n\n{table(head, lines)}\n</details>\n"


def us(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f}" if seconds < 1e-4 else f"{seconds * 1e6:,.0f}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---", *("--:" for _ in head[1:])], *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


# --- what ran ---------------------------------------------------------------------------------------------------------


def _tried(checks: Sequence[Check]) -> list[str]:
    """The counts of checks that passed, failed and were not run, with the last line of each error."""
    names = {True: "passed", False: "failed", None: "not run"}
    items = list(dict.fromkeys(check.item for check in checks))
    rows = []
    for item in items:
        mine = [check for check in checks if check.item == item]
        counts = [str(sum(check.passed is state for check in mine)) for state in names]
        rows.append([item.replace("_", " "), *counts, f"{sum(check.seconds for check in mine):.0f} s"])
    text = "What ran there, by item of the command:\n"
    found = [text, table(["item", *names.values(), "time"], rows)]
    others = [check for check in checks if not check.passed]
    if others:
        lines = [
            f"- {check.item.replace('_', ' ')}, {check.what}: {names[check.passed]}. {_why(check)}" for check in others
        ]
        found.append("\n".join(lines) + "\n")
    return found


def _why(check: Check) -> str:
    """One line of the check's message, safe in Markdown."""
    lines = [line.strip() for line in check.said.splitlines() if line.strip()]
    raised = [line for line in lines if "Error: " in line or ".Wrong: " in line]
    last = (raised or lines or [""])[-1]
    more = lines[lines.index(last) + 1 :] if last.endswith(":") else []
    last = " ".join([last.split(".Wrong: ")[-1], *more])
    return f"`{last[:200].replace('`', chr(39))}`" if last else ""
