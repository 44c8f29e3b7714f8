"""The time from the start of its kernel until lab 00 shows its first animation, with its cells run in order."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path

from jupyter_client.manager import start_new_kernel

from benchmarks.table import Row

LAB = Path(__file__).parent.parent.parent / "labs" / "00_first_look.ipynb"
WIDGET = "application/vnd.jupyter.widget-view+json"


def until_first_animation(lab: Path = LAB) -> float:
    """Seconds from starting the kernel to the first widget among the outputs."""
    cells = [cell for cell in json.loads(lab.read_text())["cells"] if cell["cell_type"] == "code"]
    start = time.perf_counter()
    manager, client = start_new_kernel(cwd=str(lab.parent))
    try:
        shown: list[float] = []

        def look(message: dict) -> None:
            if WIDGET in message["content"].get("data", {}) and not shown:
                shown.append(time.perf_counter() - start)

        for cell in cells:
            reply = client.execute_interactive("".join(cell["source"]), output_hook=look, timeout=120)
            if reply["content"]["status"] != "ok":
                raise RuntimeError(f"a cell of {lab.name} failed: {reply['content'].get('evalue')}")
            if shown:
                return shown[0]
        raise RuntimeError(f"no cell of {lab.name} shows a widget")
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def measure() -> list[Row]:
    took = statistics.median(until_first_animation() for _ in range(3))
    return [Row("first animation after the kernel starts, lab 00", "<= 8 s", f"{took:.1f} s", took <= 8)]
