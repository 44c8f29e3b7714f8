"""The bytes sent to the browser for an animation of a ring all_reduce over 64 ranks."""

from __future__ import annotations

import json

import torch
from ipywidgets.widgets.widget import _remove_buffers

from benchmarks.table import Row, seconds
from tplab import Mesh
from tplab.torch import ring_all_reduce, run
from tplab.widgets import animate

NUM_RANKS = 64


def payload(widget, names: list[str] | None = None) -> int:
    """Bytes of the traits `names` (all of them) as they go over the wire: JSON and binary buffers."""
    state, _, buffers = _remove_buffers(widget.get_state(names))
    return len(json.dumps(state).encode()) + sum(memoryview(buffer).nbytes for buffer in buffers)


def measure() -> list[Row]:
    out = run(lambda: ring_all_reduce(torch.ones(NUM_RANKS), "tp"), Mesh(tp=NUM_RANKS))
    made = []
    took = seconds(lambda: made.append(animate(out.trace)))
    total = payload(made[0]) / 1e3
    code = payload(made[0], ["_esm", "_css"]) / 1e3
    measured = f"{total:.0f} KB, of which {code:.0f} KB is the widget's code; made in {took * 1e3:.0f} ms"
    return [Row(f"widget, ring all_reduce over {NUM_RANKS} ranks: sent", "<= 100 KB", measured, total <= 100)]
