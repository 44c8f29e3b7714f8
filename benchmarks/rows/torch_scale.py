"""An all_reduce of 64 numbers and a division, per rank and call, on up to 1,024 torch ranks, beside LocalTensor."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.table import Row
from tplab import Mesh
from tplab.torch import all_reduce, run

SIZES = (8, 32, 128, 512, 1024)
LOCAL_SIZES = SIZES[:-1]  # with more, LocalTensor takes minutes to begin
AIM = 45


def _timed(step: Callable[[torch.Tensor], torch.Tensor], calls: int) -> float:
    """Seconds of this many calls, after two calls that warm up."""
    x = torch.ones(64)
    start = 0.0
    for call in range(calls + 2):
        if call == 2:
            start = time.perf_counter()
        x = step(x)
    return time.perf_counter() - start


def simulated(size: int) -> float:
    """Microseconds per rank and call, by the rank that took longest."""
    calls = max(12, 3200 // size)
    seconds = run(lambda: _timed(lambda x: all_reduce(x, "tp") / size, calls), Mesh(tp=size), keep_values=0).per_rank
    return max(seconds) / calls / size * 1e6


def local_tensor(size: int) -> float | None:
    """The same in torch's own single-process simulation; None if this torch has none."""
    try:
        from torch.distributed._local_tensor import LocalTensorMode
        from torch.testing._internal.distributed.fake_pg import FakeStore
    except ImportError:
        return None

    def step(x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        return x / size

    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        with LocalTensorMode(size):
            calls = max(6, 400 // size)
            return _timed(step, calls) / calls / size * 1e6
    finally:
        dist.destroy_process_group()


def measure() -> list[Row]:
    warnings.simplefilter("ignore")
    ours: dict[int, list[float]] = {size: [] for size in SIZES}
    theirs: dict[int, list[Any]] = {size: [] for size in LOCAL_SIZES}
    for _ in range(3):  # in turns, so that a busy moment hits all alike; the best of three, as little else ran then
        for size in SIZES:
            ours[size].append(simulated(size))
        for size in LOCAL_SIZES:
            theirs[size].append(local_tensor(size))
    rows = []
    for size in SIZES:
        best, local = min(ours[size]), theirs.get(size, [None])
        beside = "" if None in local else f"; LocalTensor, one program for all ranks, {min(local):.0f} us"
        name = f"all_reduce of 64 numbers and a division, per rank and call, {size:,} simulated torch ranks"
        rows.append(Row(name, f"<= {AIM} us", f"{best:.0f} us{beside}", best <= AIM))
    return rows
