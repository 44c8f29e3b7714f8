"""A row of the table, the machine on which it was measured, and the two ways of measuring that rows share."""

from __future__ import annotations

import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """One figure: its name, its target, the measurement beside others of the same run, and whether it suffices.

    measured   begins with the figure itself: "141 us; beside it gloo processes 900 us"
    """

    what: str
    reach: str
    measured: str
    ok: bool

    @property
    def figure(self) -> float | None:
        """The number that `measured` begins with; None if nothing was measured."""
        found = re.match(r"[0-9][0-9,]*\.?[0-9]*", self.measured)
        return float(found[0].replace(",", "")) if found else None

    @property
    def is_more_better(self) -> bool:
        return self.reach.startswith(">")


def markdown(rows: list[Row]) -> str:
    """The rows as a Markdown table that also reads well in a terminal."""
    cells = [("what", "reach", "measured", "ok")]
    return aligned([*cells, *((row.what, row.reach, row.measured, "yes" if row.ok else "NO") for row in rows)])


def aligned(cells: Sequence[tuple[str, ...]]) -> str:
    """A Markdown table whose columns are as wide as their cells; the first line is its head."""
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths)) + " |" for line in cells]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def machine() -> str:
    """One line about this machine: processor, cores, memory, system, versions."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parts = [_processor(), f"{cores} cores"]
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        parts.append(f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB")
    parts += [f"{platform.system()} {platform.release().split('-')[0]}", f"Python {platform.python_version()}"]
    for package in ("torch", "jax", "numpy", "anywidget"):
        try:
            parts.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            parts.append(f"no {package}")
    return ", ".join(parts)


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def seconds(work: Callable[[], object]) -> float:
    """The duration of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def in_turns(work: Callable[[], float], beside: Callable[[], float], repetitions: int) -> tuple[float, float, float]:
    """(median of work / beside, median seconds of each). Both return their seconds, and take turns at going first.

    A busy moment of the machine then affects both, and drops out of the median of the ratios.
    """
    pairs = []
    for repetition in range(repetitions):
        first, second = (work, beside) if repetition % 2 else (beside, work)
        took = {first: first(), second: second()}
        pairs.append((took[work], took[beside]))
    ratio = statistics.median(a / b for a, b in pairs)
    return ratio, statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs)
