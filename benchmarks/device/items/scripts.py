"""Scripts that name cuda and nccl, on a machine with one GPU: on simulated ranks, and with the doctor."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from benchmarks.device import process
from benchmarks.device.check import Figures, Place, Task, Wrong

PLAIN = process.ROOT / "docs" / "train.py"
ON_CUDA = """\
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

local = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(SET)
device = torch.device("cuda", torch.cuda.current_device())
dist.init_process_group("nccl")
torch.manual_seed(0)
layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)]
model = DistributedDataParallel(nn.Sequential(*layers).to(device), device_ids=[device.index])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.randn(3, 16, 64, generator=torch.Generator().manual_seed(0))
for batch in data:
    x = batch.chunk(dist.get_world_size())[dist.get_rank()].to(device)
    loss = (model(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
mean = loss.detach() / dist.get_world_size()
dist.all_reduce(mean)
if dist.get_rank() == 0:
    print("the last loss is", round(mean.item(), 4))
dist.destroy_process_group()
"""
"""DDP on GPUs. SET is the GPU that a rank chooses: its own number, or that modulo the number of GPUs."""
BY_NUMBER, MODULO = "local", "local % torch.cuda.device_count()"


def tasks(place: Place) -> Iterator[Task]:
    launcher, doctor = ["tplab.torchrun", "--cluster", "h100"], ["tplab.doctor"]
    yield Task("torchrun, docs/train.py", partial(started, launcher, 2 if place.quick else 8, None, "sent"))
    yield Task("torchrun --device cpu, a script for cuda", partial(on_cuda, [*launcher, "--device", "cpu"], BY_NUMBER))
    yield Task("doctor --device cpu, a script for cuda", partial(on_cuda, [*doctor, "--device", "cpu"], BY_NUMBER))
    if place.device == "cuda":
        yield Task("torchrun, every rank on the one GPU", partial(on_cuda, launcher, MODULO))
        yield Task("doctor, every rank on the one GPU", partial(on_cuda, doctor, MODULO))
        yield Task("torchrun, each rank on a GPU of its own", partial(one_gpu_too_few, launcher))


def started(command: Sequence[str], ranks: int, script: str | None, expected: str) -> Figures:
    """The last lines that the command printed. Raises Wrong if it failed."""
    done = _run(command, ranks, script)
    if done.code or expected not in done.out:
        raise Wrong(f"{' '.join(command)}: {done.tail}\n{done.out[-800:]}", {"exit status": done.code})
    return {"said": done.out.strip().splitlines()[-6:]}


def on_cuda(command: Sequence[str], choice: str) -> Figures:
    expected = "same" if "doctor" in command[0] else "the last loss is"
    return started(command, 4, ON_CUDA.replace("SET", choice), expected)


def one_gpu_too_few(command: Sequence[str]) -> Figures:
    """Rank 1 asks for a second GPU. There is none, and the error must name the way out."""
    done = _run(command, 4, ON_CUDA.replace("SET", BY_NUMBER))
    figures: Figures = {"exit status": done.code, "said": done.errors.strip().splitlines()[-4:]}
    if done.code in (0, None) or "--device cpu" not in done.errors:
        raise Wrong(f"the error names no way out: {done.tail}", figures)
    return figures


def _run(command: Sequence[str], ranks: int, script: str | None) -> process.Done:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "train.py" if script else PLAIN
        if script:
            file.write_text(script, encoding="utf8")
        module, *flags = command
        return process.run(["-m", module, *flags, "--nproc-per-node", str(ranks), str(file)], 50)
