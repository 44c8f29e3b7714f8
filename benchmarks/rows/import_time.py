"""`import tplab` in a fresh interpreter, with neither torch nor jax loaded."""

from __future__ import annotations

import statistics
import subprocess
import sys

from benchmarks.table import Row

PROGRAM = """
import sys, time
start = time.perf_counter()
import tplab
took = time.perf_counter() - start
print(took * 1e3, *(name for name in ("torch", "jax") if name in sys.modules))
"""


def measure() -> list[Row]:
    outputs = []
    for _ in range(8):
        done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
        outputs.append(done.stdout.split())
    warm = outputs[1:]  # the first one reads the files from disk
    took = statistics.median(float(line[0]) for line in warm)
    loaded = sorted({name for line in outputs for name in line[1:]})
    frameworks = " and ".join(loaded) + " loaded" if loaded else "neither torch nor jax loaded"
    measured = f"{took:.0f} ms, {frameworks}"
    return [Row("`import tplab`", "<= 100 ms, neither torch nor jax loaded", measured, took <= 100 and not loaded)]
