"""Each lab, restarted and run from top to bottom: seconds, and the peak memory of its kernel and its children.

Memory is PSS: a page that several processes share counts once, as it does for the machine.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

import nbformat
import psutil
from nbclient import NotebookClient

from benchmarks.table import Row, seconds

LABS = Path(__file__).parent.parent.parent / "labs"


def memory_of_children() -> int:
    """The bytes that all child processes hold now, with shared pages counted once."""
    total = 0
    for process in psutil.Process(os.getpid()).children(recursive=True):
        try:
            total += _held_by(process)
        except (psutil.NoSuchProcess, OSError):
            continue
    return total


def _held_by(process: psutil.Process) -> int:
    """A process's share of all pages (PSS) on Linux, or else its resident pages."""
    rollup = Path(f"/proc/{process.pid}/smaps_rollup")
    if not rollup.exists():
        return process.memory_info().rss
    line = next(line for line in rollup.read_text(encoding="ascii").splitlines() if line.startswith("Pss:"))
    return int(line.split()[1]) * 1024


def run_lab(lab: Path) -> tuple[float, int]:
    """(seconds, peak bytes) of one clean run."""
    notebook = nbformat.read(lab, as_version=4)
    client = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(lab.parent)}})
    peak, finished = 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not finished.wait(0.1):
            peak = max(peak, memory_of_children())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        took = seconds(client.execute)
    finally:
        finished.set()
        watcher.join()
    return took, peak


def measure() -> list[Row]:
    rows = []
    for lab in sorted(LABS.glob("*.ipynb")):
        took, peak = run_lab(lab)
        measured = f"{took:.0f} s, {peak / 1e9:.2f} GB"
        rows.append(Row(f"{lab.stem}, restart and run all", "<= 60 s, <= 1 GB", measured, took <= 60 and peak <= 1e9))
    if not rows:
        raise FileNotFoundError(f"no labs in {LABS}; `make labs` writes them")
    return rows
