"""The cost of recording a real collective, and a step of FSDP2 on simulated ranks compared with gloo processes."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.table import Row
from tplab import Mesh
from tplab.torch import run
from tplab.torch.record import start

NUM_RANKS = 4
LAYERS, WIDTH, TOKENS = 4, 256, 512
ROUNDS, CALLS, STEPS = 10, 200, 5


def measure() -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        costs = _under_torchrun(2, "recorded", folder)
    gloo = _under_torchrun(NUM_RANKS, "fsdp", "")[0]
    simulated = run(_fsdp_step, Mesh(dp=NUM_RANKS), distributed=True).per_rank[0]
    added = (costs[0] - costs[1]) * 1e6
    ratio = simulated / gloo
    recording = "recording: CPU time added to an all_reduce of 16 KB over gloo"
    fsdp = f"FSDP2 step of {LAYERS} layers {WIDTH} -> {4 * WIDTH}, {NUM_RANKS} ranks, simulated / gloo processes"
    return [
        Row(recording, "<= 100 µs", f"{added:.0f} µs", added <= 100),
        Row(fsdp, "<= 1", f"{ratio:.2f} ({simulated * 1e3:.3g} ms / {gloo * 1e3:.3g} ms)", ratio <= 1),
    ]


def _fsdp_step() -> float:
    """Seconds of a training step, the least of STEPS."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(LAYERS)]
    model = nn.Sequential(*layers)
    for unit in (*layers, model):
        fully_shard(unit)
    optimizer = torch.optim.AdamW(model.parameters())
    x, seconds = torch.randn(TOKENS, WIDTH), []
    for _ in range(STEPS):
        dist.barrier()
        begun = time.perf_counter()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        seconds.append(time.perf_counter() - begun)
    return min(seconds)


def _recorded(folder: str) -> list[float]:
    """CPU seconds of an all_reduce with and without the recorder, the least of ROUNDS."""
    start(folder)
    dist.init_process_group("gloo")
    group: Any = dist.group.WORLD
    x, options = torch.zeros(4096), dist.AllreduceOptions()
    options.asyncOp = False
    least = [float("inf")] * 2
    for _ in range(ROUNDS):
        for place, one in enumerate((group, group.real)):
            begun = time.thread_time()
            for _ in range(CALLS):
                one.allreduce([x], options).wait()
            least[place] = min(least[place], (time.thread_time() - begun) / CALLS)
    return least


def _under_torchrun(num_ranks: int, what: str, folder: str) -> list[float]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    root = str(Path(__file__).parents[2])
    ran = subprocess.run(
        [*command, __file__, what, folder],
        cwd=root,
        env={**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return [float(figure) for figure in ran.stdout.split()]


def _main(what: str, folder: str) -> None:
    """The program of one rank's process."""
    if what == "recorded":
        figures = _recorded(folder)
    else:
        dist.init_process_group("gloo")
        figures = [_fsdp_step()]
    if dist.get_rank() == 0:
        print(*figures)
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(*sys.argv[1:])
