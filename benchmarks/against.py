"""Measure each row on two commits in turns, and print the ratio."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks.table import Row, aligned

MOST = 1.05
"""A row that takes more than this many times as long as before is not fine."""

Measure = Callable[[str, Path], list[Row]]
"""(a row's name, the root of a checkout) -> the rows measured there"""


def checkout(revision: str, root: Path) -> Path:
    """The files of a commit, in a folder under build/, with the benchmarks of the working tree. Raises ValueError."""
    named = subprocess.run(
        ["git", "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}"], cwd=root, capture_output=True, text=True
    )
    if named.returncode:
        raise ValueError(
            f"git knows no commit {revision!r} here; a shallow clone gets all of them by git fetch --unshallow"
        )
    commit = named.stdout.strip()
    there = root / "build" / "against" / commit[:12]
    if not there.exists():
        unpacked = there.with_name(f"{there.name}.part")
        shutil.rmtree(unpacked, ignore_errors=True)
        unpacked.mkdir(parents=True)
        archive = unpacked.with_suffix(".tar")
        subprocess.run(["git", "archive", "--output", str(archive), commit], cwd=root, check=True)
        with tarfile.open(archive) as files:
            files.extractall(unpacked, filter="data")
        archive.unlink()
        unpacked.rename(there)
    shutil.rmtree(there / "benchmarks", ignore_errors=True)  # the same rows on both
    shutil.copytree(root / "benchmarks", there / "benchmarks", ignore=shutil.ignore_patterns("__pycache__"))
    return there


def compare(names: Iterable[str], before: Path, now: Path, measure: Measure, rounds: int) -> list[tuple[Row, Row]]:
    """The best of each figure on both sides: (before, now). The sides take turns at going first."""
    pairs: list[tuple[Row, Row]] = []
    for name in names:
        found: dict[Path, list[list[Row]]] = {before: [], now: []}
        for turn in range(rounds):
            for side in (before, now) if turn % 2 == 0 else (now, before):
                found[side].append(measure(name, side))
        whats = dict.fromkeys(row.what for rows in found[now] for row in rows)
        for what in whats:
            old, new = ([row for rows in found[side] for row in rows if row.what == what] for side in (before, now))
            if old and new:
                pairs.append((_best(old), _best(new)))
            else:
                pairs.append((Row(what, "", "not there", ok=False), _best(new)))
    return pairs


def ratio(before: Row, now: Row) -> float | None:
    """The cost now relative to before: above 1 is worse. None if either was not measured."""
    old, new = before.figure, now.figure
    if not old or not new:
        return None
    return old / new if now.is_more_better else new / old


def ratios(pairs: list[tuple[Row, Row]]) -> str:
    """The table of both commits: the measurements on each, and the ratio."""
    cells = [("what", "before", "now", "now / before", "ok")]
    for before, now in pairs:
        times = ratio(before, now)
        text = "" if times is None else f"{times:.2f}"
        cells.append((now.what, before.measured, now.measured, text, "yes" if is_fine(before, now) else "NO"))
    return aligned(cells)


def is_fine(before: Row, now: Row) -> bool:
    """A row that cannot be measured on the other commit is fine if it can be now."""
    times = ratio(before, now)
    return now.figure is not None if times is None else times <= MOST


def _best(rows: list[Row]) -> Row:
    measured = [row for row in rows if row.figure is not None] or rows[:1]
    return min(measured, key=lambda row: (row.figure or 0.0) * (-1 if row.is_more_better else 1))
