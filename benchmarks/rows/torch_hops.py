"""An all_reduce and a ring step of 16 KB on 8 simulated torch ranks, compared with LocalTensor and gloo processes."""

from __future__ import annotations

import os
import tempfile
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.table import Row
from tplab import Mesh
from tplab.torch import all_reduce, ring_shift, run
from tplab.torch.ranks import turns
from tplab.torch.ranks.one_core import OneCore

NUM_RANKS = 8
SHAPE = (64, 64)  # float32: 16 KB
CALLS = 300


def simulated(op: Any, calls: int = CALLS) -> float:
    """Microseconds of one call on all 8 simulated ranks, timed by rank 0 inside the program."""

    def program() -> float:
        x = torch.randn(SHAPE)
        for _ in range(20):
            x = op(x, "tp") / NUM_RANKS
        start = time.perf_counter()
        for _ in range(calls):
            x = op(x, "tp") / NUM_RANKS
        return (time.perf_counter() - start) / calls * 1e6

    return run(program, Mesh(tp=NUM_RANKS)).per_rank[0]


def local_tensor(calls: int = CALLS) -> float | None:
    """The same in torch's own single-process simulation; None if this torch has none."""
    try:
        from torch.distributed._local_tensor import LocalTensorMode
        from torch.testing._internal.distributed.fake_pg import FakeStore
    except ImportError:
        return None
    dist.init_process_group("fake", rank=0, world_size=NUM_RANKS, store=FakeStore())
    try:
        with LocalTensorMode(NUM_RANKS):
            return _time_all_reduce(calls)
    finally:
        dist.destroy_process_group()


def _time_all_reduce(calls: int) -> float:
    x = torch.randn(SHAPE)
    for _ in range(20):
        dist.all_reduce(x)
        x = x / NUM_RANKS
    start = time.perf_counter()
    for _ in range(calls):
        dist.all_reduce(x)
        x = x / NUM_RANKS
    return (time.perf_counter() - start) / calls * 1e6


def _gloo_rank(rank: int, folder: str, calls: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=NUM_RANKS)
    microseconds = _time_all_reduce(calls)
    if rank == 0:
        with open(os.path.join(folder, "microseconds"), "w") as file:
            file.write(str(microseconds))
    dist.destroy_process_group()


def gloo(calls: int = 50) -> float:
    """The same on 8 processes over gloo."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_gloo_rank, args=(folder, calls), nprocs=NUM_RANKS)  # type: ignore[attr-defined]
        with open(os.path.join(folder, "microseconds")) as file:
            return float(file.read())


def on_any_core(op: Any) -> float:
    """The same as `simulated`, without keeping ranks that take short turns on one core."""
    one_core, turns.OneCore = turns.OneCore, lambda threads: OneCore([])  # type: ignore[assignment,misc]
    try:
        return simulated(op)
    finally:
        turns.OneCore = one_core


def measure() -> list[Row]:
    warnings.simplefilter("ignore")
    ours, shifts, theirs, free_ours, free_shifts = [], [], [], [], []
    for _ in range(5):  # in turns, so that a busy moment hits all alike; the best of five, as little else ran then
        ours.append(simulated(all_reduce))
        shifts.append(simulated(ring_shift))
        theirs.append(local_tensor())
        free_ours.append(on_any_core(all_reduce))
        free_shifts.append(on_any_core(ring_shift))
    reduce, shift = min(ours), min(shifts)
    beside = [f"gloo processes {gloo():,.0f} us"]
    if None not in theirs:
        beside.insert(0, f"LocalTensor {min(theirs):,.0f} us")
    return [
        Row(
            "all_reduce of 16 KB, 8 simulated torch ranks",
            "<= 200 us",
            f"{reduce:.0f} us; beside it {', '.join(beside)}",
            reduce <= 200,
        ),
        Row("ring step of 8 hops, 16 KB each, torch", "<= 80 us", f"{shift:.0f} us", shift <= 80),
        Row(
            "the same two, where ranks are kept on one core / on any core",
            "less",
            f"{reduce:.0f} / {min(free_ours):.0f} us, {shift:.0f} / {min(free_shifts):.0f} us",
            reduce < min(free_ours) and shift < min(free_shifts),
        ),
    ]
