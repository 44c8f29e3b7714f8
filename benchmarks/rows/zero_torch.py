"""A step of ZeRO stage 3 on 4 simulated torch ranks, compared with torch's own FSDP2 on 4 processes over gloo, with the
same model, numbers and cores."""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from benchmarks.table import Row
from tplab import Mesh, P
from tplab.torch import GPTConfig, all_reduce, barrier, run, shard_parameters
from tplab.torch.models.plain import PlainGPT

CONFIG = GPTConfig(vocab_size=1024, width=256, num_layers=4, num_heads=4, context=128)
BATCH, NUM_RANKS, STEPS, ROUNDS = 8, 4, 4, 3


class WithLoss(nn.Module):
    """A GPT whose forward pass includes its loss: units of both implementations begin with a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gpt = PlainGPT(CONFIG)

    def forward(self, ids: Tensor) -> Tensor:
        return self.gpt.loss(ids[:, :-1], ids[:, 1:])


def train(model: nn.Module, ids: Tensor, wait: Callable[[], object]) -> tuple[float, list[Tensor]]:
    """(Seconds of the fastest step of AdamW after the first one, this rank's losses)."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, took = [], []
    for _ in range(STEPS + 1):
        wait()
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = model(ids)
        loss.backward()
        optimizer.step()
        wait()
        took.append(time.perf_counter() - start)
        losses.append(loss.detach())
    return min(took[1:]), losses


def simulated(ids: Tensor) -> tuple[float, float]:
    """(Seconds of a step, the last loss averaged over all ranks)."""

    def program(ids: Tensor) -> tuple[float, float]:
        model = WithLoss()
        shard_parameters(model, "dp")
        seconds, losses = train(model, ids, barrier)
        return seconds, float(all_reduce(losses[-1], "dp", "mean"))

    ranks = run(program, Mesh(dp=NUM_RANKS), ids, in_specs=P("dp")).per_rank
    return max(seconds for seconds, _ in ranks), ranks[0][1]


def _gloo_rank(rank: int, folder: str, ids: Tensor) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=NUM_RANKS)
    mesh, model = init_device_mesh("cpu", (NUM_RANKS,)), WithLoss()
    for block in model.gpt.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    seconds, losses = train(model, ids.chunk(NUM_RANKS)[rank], dist.barrier)
    total = losses[-1] / NUM_RANKS
    dist.all_reduce(total)
    if rank == 0:
        (Path(folder) / "figures").write_text(f"{seconds} {float(total)}")
    dist.destroy_process_group()


def processes(ids: Tensor) -> tuple[float, float]:
    """The same for FSDP2."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_gloo_rank, args=(folder, ids), nprocs=NUM_RANKS)  # type: ignore[attr-defined]
        seconds, loss = (Path(folder) / "figures").read_text().split()
    return float(seconds), float(loss)


def measure() -> list[Row]:
    ids = torch.randint(CONFIG.vocab_size, (BATCH, CONFIG.context + 1), generator=torch.Generator().manual_seed(0))
    ratios, ours, theirs = [], [], []
    for _ in range(ROUNDS):  # in turns, so that a busy moment hits both alike
        (mine, loss), (other, expected) = simulated(ids), processes(ids)
        assert abs(loss - expected) < 1e-4 * expected, (loss, expected)  # a fast wrong answer is no figure; float32
        ratios.append(mine / other)
        ours.append(mine)
        theirs.append(other)
    ratio = median(ratios)
    what = "ZeRO stage-3 step of a GPT (width 256, 4 layers, batch 8 x 128 tokens), 4 simulated ranks / FSDP2 on 4 "
    what += "processes over gloo"
    measured = f"{ratio:.2f} ({median(ours) * 1e3:.0f} ms / {median(theirs) * 1e3:.0f} ms)"
    return [Row(what, "<= 0.8", measured, ratio <= 0.8)]
