"""A real run, recorded: `torchrun -m tplab.record`, with NCCL and gloo on the GPU and gloo on the CPU, merged.

NCCL refuses two ranks of one host on one GPU (items/nodes.py gives each its own host). A group of one rank sends
nothing, so it is usually not recorded; here it is, to record NCCL.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial, reduce
from pathlib import Path

from benchmarks.device import process
from benchmarks.device.check import Figures, Place, Task, Wrong
from tplab.trace import merge

SCRIPT = """\
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tplab.torch.record import group

group.FEWEST = 1
DEVICE = torch.device("WHERE")
dist.init_process_group("BACKEND")
torch.manual_seed(0)
layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)]
model = DistributedDataParallel(nn.Sequential(*layers).to(DEVICE), bucket_cap_mb=4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x = torch.randn(256, WIDTH, device=DEVICE)
for _ in range(5):
    loss = (model(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
work = dist.all_gather(parts, x, async_op=True)
work.wait()
dist.barrier()
print("loss", loss.item())
dist.destroy_process_group()
"""


def tasks(place: Place) -> Iterator[Task]:
    yield Task("2 ranks, gloo on the CPU", partial(recorded, 2, "cpu", "gloo", 64 if place.quick else 1024), 90)
    if place.device == "cuda":
        yield Task("1 rank, NCCL on the GPU", partial(recorded, 1, "cuda", "nccl", 1024), 90)
        yield Task("2 ranks, gloo on the GPU", partial(recorded, 2, "cuda", "gloo", 1024), 90)
    yield Task("tplab.merge", partial(command, place), 90)


def recorded(ranks: int, device: str, backend: str, width: int) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        record(Path(folder), ranks, device, backend, width)
        return judged(Path(folder) / "trace", ranks)


def judged(folder: Path, ranks: int) -> Figures:
    """Check that every rank has its collectives, each with a duration, within the run. In a broadcast the root may be
    done before another rank arrives, which then takes no time, since it counts from the last arrival."""
    merged = merge(folder)
    trace = merged.trace
    events = [event for event in trace.events if event.kind == "collective"]
    ops = sorted({str(event.op) for event in events})
    spans = [event.end - event.start for event in events if event.op != "broadcast" or ranks == 1]
    figures: Figures = {
        "collectives": len(events), "operations": ops, "makespan": trace.makespan,
        "shortest": min(spans, default=None), "longest": max(spans, default=None),
        "unfinished": list(merged.unfinished), "clocks": str(merged.clocks)[:300],
    }  # fmt: skip
    missing = {"all_reduce", "all_gather"} - set(ops)
    ends = [event.end for event in events]
    if missing or merged.unfinished or len({event.rank for event in events}) != ranks:
        raise Wrong(f"missing: {missing}; unfinished: {merged.unfinished}", figures)
    if not min(spans) > 0 or not max(ends) <= trace.start + trace.makespan + 1e-9:
        figures["events"] = [(e.rank, str(e.op), e.start, e.end) for e in events if not e.end > e.start]
        raise Wrong("an event takes no time, or ends after the run", figures)
    return figures


def written(device: str, backend: str, width: int) -> str:
    """The script."""
    values = {"WHERE": device, "BACKEND": backend, "WIDTH": str(width)}
    return reduce(lambda text, item: text.replace(*item), values.items(), SCRIPT)


def record(folder: Path, ranks: int, device: str, backend: str, width: int) -> None:
    script = folder / "train.py"
    script.write_text(written(device, backend, width), encoding="utf8")
    launcher = [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(ranks),
        "--standalone",
        "--local-addr",
        "127.0.0.1",
    ]
    done = process.run([*launcher, "-m", "tplab.record", "--to", str(folder / "trace"), str(script)], 75)
    if done.code or "loss" not in done.out:
        raise Wrong(f"the recorded run failed: {done.tail}", {"exit status": done.code})


def command(place: Place) -> Figures:
    """Run the command. It writes the trace, since the page of --html needs packages for notebooks."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        record(folder, 1, place.device, "nccl" if place.device == "cuda" else "gloo", 64)
        file = folder / "trace.json"
        done = process.run(["-m", "tplab.merge", str(folder / "trace"), "--trace", str(file)], 60)
        if done.code or not file.exists():
            raise Wrong(f"tplab.merge: {done.tail}", {"exit status": done.code})
        return {"said": done.out.strip().splitlines()[:6]}
