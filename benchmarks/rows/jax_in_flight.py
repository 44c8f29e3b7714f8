"""1,000 runs of a ring in JAX on 8 devices, without waiting. Without precautions, the process dies before 100."""

from __future__ import annotations

import subprocess
import sys
import time

from benchmarks.table import Row

NUM_RANKS, CALLS = 8, 1000
PROGRAM = f"""
import jax, numpy as np
from tplab import Mesh, P
from tplab.jax import ring_shift, run

def ring(x):
    total = x
    for _ in range({NUM_RANKS} - 1):
        x = ring_shift(x, "tp")
        total = total + x
    return total

x = np.ones(({NUM_RANKS}, 64, 64), np.float32)
outs = [run(ring, Mesh(tp={NUM_RANKS}), x, in_specs=(P("tp"),), out_specs=P("tp")) for _ in range({CALLS})]
for out in outs:
    assert (np.asarray(jax.block_until_ready(out.value)) == {NUM_RANKS}).all()
"""


def measure() -> list[Row]:
    start = time.perf_counter()
    # A separate process: XLA may end it, and the row must survive to report that.
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    duration = time.perf_counter() - start
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        measured = f"ended with status {done.returncode} after {duration:.0f} s: {last[:100]}"
    else:
        measured = f"{CALLS:,} done, {duration:.1f} s with the start of JAX"
    what = f"JAX calls in flight before the process dies, {NUM_RANKS} devices"
    return [Row(what, f"never, at {CALLS:,}", measured, done.returncode == 0)]
