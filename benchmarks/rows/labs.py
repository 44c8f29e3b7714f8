"""Each lab, restarted and run from top to bottom: seconds, and the most memory its kernel and its children held."""

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
    """Bytes that every process started from here holds now."""
    total = 0
    for process in psutil.Process(os.getpid()).children(recursive=True):
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total


def run_lab(lab: Path) -> tuple[float, int]:
    """(seconds, peak bytes) of one clean run."""
    notebook = nbformat.read(lab, as_version=4)
    client = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(lab.parent)}})
    peak, finished = 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not finished.wait(0.05):
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
