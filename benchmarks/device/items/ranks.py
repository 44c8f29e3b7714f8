"""Simulated ranks that share the GPU: training over every dimension, memory, real processes with NCCL."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tplab.torch as tt
from benchmarks.device.check import Figures, Place, Task, Wrong
from tplab import Mesh, P
from tplab.data.text import Text
from tplab.models.gpt import GPTConfig
from tplab.schedules import interleaved_1f1b, zb_h1
from tplab.training.recipe import Recipe

CONFIG = GPTConfig(29, 48, 6, 24, 24, norm="rms", activation="swiglu")
"""Sizes that are divisible by 1, 2, 3, 4 and 8 ranks, and a vocabulary that is not."""
TEXT = Text(np.random.default_rng(0).integers(0, 29, 2000).astype(np.uint8).tobytes())
PLANS: dict[str, tuple[Mesh, dict[str, Any]]] = {
    "tp=1": (Mesh(tp=1), {}),
    "tp=2": (Mesh(tp=2), {}),
    "tp=3": (Mesh(tp=3), {"sequence_parallel": True}),
    "tp=4": (Mesh(tp=4), {"checkpoint_every": 1}),
    "tp=8": (Mesh(tp=8), {"sequence_parallel": True}),
    "pp=3, 1F1B": (Mesh(pp=3), {"microbatches": 4}),
    "pp=2, interleaved": (Mesh(pp=2), {"microbatches": 4, "schedule": interleaved_1f1b}),
    "pp=2, ZB-H1": (Mesh(pp=2), {"microbatches": 4, "schedule": zb_h1}),
    "dp=2, ZeRO 0": (Mesh(dp=2), {"zero": 0}),
    "dp=3, ZeRO 1": (Mesh(dp=3), {"zero": 1}),
    "dp=4, ZeRO 2": (Mesh(dp=4), {"zero": 2}),
    "dp=3, ZeRO 3": (Mesh(dp=3), {"zero": 3}),
    "cp=2, ring": (Mesh(cp=2), {}),
    "cp=3, gather": (Mesh(cp=3), {"scheme": "gather", "layout": "striped"}),
    "cp=4, head": (Mesh(cp=4), {"scheme": "head", "layout": "contiguous"}),
    "dp=2 pp=2 tp=2": (Mesh(dp=2, pp=2, tp=2), {"zero": 1}),
}
FEW = ("tp=2", "dp=3, ZeRO 3")


def tasks(place: Place) -> Iterator[Task]:
    for name in FEW if place.quick else PLANS:
        yield Task(f"train, {name}", partial(training, place, *PLANS[name]), 100)
    for size in (1, 3) if place.quick else (1, 2, 3, 4, 8):
        yield Task(f"the same bits as on the CPU, {size} ranks", partial(same_bits, place, size))
    yield Task("DistributedDataParallel and FSDP in run(distributed=True)", partial(distributed, place))
    yield Task("counted memory beside torch's own", partial(memory, place))
    yield Task("measured clock", partial(measured, place))
    yield Task("one process with NCCL", partial(nccl, place), 90)


def training(place: Place, mesh: Mesh, about: dict[str, Any]) -> Figures:
    """Compare losses and parameters of three steps with those of one rank on the CPU, in float32."""
    found, want = _trained(mesh, place.device, **about), _alone()
    off = max(abs(a / b - 1) for a, b in zip(found.losses, want.losses, strict=True))
    moved = max(float(np.abs(found.state[name] - x).max()) for name, x in want.state.items())
    figures = {"losses off by": off, "parameters off by": moved}
    if not off < 2e-5 or not moved < 3e-4:  # AdamW divides by the size of the gradient, so its rounding
        raise Wrong(
            f"losses are {found.losses}, and {want.losses} on one rank of the CPU", figures
        )  # counts; a step is 3e-3 long
    return figures


def _trained(mesh: Mesh, device: str, **about: Any) -> Any:
    recipe = Recipe(3, 24, warmup=1, **about)
    return tt.train(CONFIG, TEXT, mesh, recipe, device=device, show=lambda progress: None)


@cache
def _alone() -> Any:
    return _trained(Mesh(tp=1), "cpu")


def same_bits(place: Place, size: int) -> Figures:
    """Collectives, and a pair of layers forward and backward, in four dtypes."""

    def sent(x: Tensor) -> list[Tensor]:
        return [
            tt.all_reduce(x, "tp"), tt.all_gather(x, "tp"), tt.reduce_scatter(x, "tp"), tt.all_to_all(x, "tp"),
            tt.broadcast(x, "tp", size - 1), tt.ring_shift(x, "tp"), tt.ring_all_reduce(x, "tp"),
            tt.start(tt.all_reduce, x, "tp", op="max").wait(), tt.reduce(x, "tp"), tt.gather(x, "tp"),
            tt.scatter(x, "tp"), tt.all_to_all(x, "tp", sizes=(2,) * size, received=(2,) * size),
        ]  # fmt: skip

    def layers(x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        y = tt.reduce_from((tt.copy_to(x, "tp") @ a).tanh() @ b, "tp")
        y.square().sum().backward()
        assert x.grad is not None and a.grad is not None and b.grad is not None
        return y, x.grad, a.grad, b.grad

    mesh, most = Mesh(tp=size), 0.0
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        x = torch.randn(size * size * 2, 3).to(dtype)
        here, there = (tt.run(sent, mesh, x, in_specs=P("tp"), device=device) for device in ("cpu", place.device))
        for one, other in zip(here.per_rank, there.per_rank, strict=True):
            assert all(torch.equal(a, b.cpu()) for a, b in zip(one, other, strict=True)), f"other bits in {dtype}"
        assert here.trace.bytes_sent() == there.trace.bytes_sent()
    columns, rows = P(None, "tp"), P("tp", None)
    leaves = [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in ((5, 6), (6, 24), (24, 6))]
    specs: dict[str, Any] = {"in_specs": (P(), columns, rows), "out_specs": (P(), P(), columns, rows)}
    want = tt.run(layers, Mesh(tp=1), *leaves, **specs).value
    for a, b in zip(tt.run(layers, mesh, *leaves, **specs, device=place.device).value, want, strict=True):
        most = max(most, float(((a.cpu() - b).abs().max() / b.abs().max()).detach()))
    if not most < 1e-13:
        raise Wrong(f"layers are off by {most} in float64", {"off by": most})
    return {"layers off by": most}


def distributed(place: Place) -> Figures:
    """Compare torch's own wrappers, on three simulated ranks of the device, with one model on the whole batch."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    from torch.nn.parallel import DistributedDataParallel

    data = torch.randn(12, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 6)).double()

    def program(kind: str) -> list[Tensor]:
        mine: Any = model().to(place.device)
        mine = DistributedDataParallel(mine) if kind == "ddp" else fully_shard(mine, mesh=tt.device_mesh())
        mine(data.chunk(dist.get_world_size())[dist.get_rank()].to(place.device)).square().mean().backward()
        grads = [p.grad for p in mine.parameters()]
        return [g.full_tensor() if isinstance(g, DTensor) else g for g in grads]  # type: ignore[union-attr]

    alone = model()
    alone(data).square().mean().backward()
    off: dict[str, float] = {}
    for kind in ("ddp", "fsdp"):
        for grads in tt.run(program, Mesh(dp=3), kind, distributed=True, device=place.device).per_rank:
            for found, p in zip(grads, alone.parameters(), strict=True):
                assert p.grad is not None
                off[kind] = max(off.get(kind, 0.0), float((found.cpu() - p.grad).abs().max() / p.grad.abs().max()))
    if not max(off.values()) < 1e-12:
        raise Wrong(f"gradients are off by {off}", off)
    return off


def memory(place: Place) -> Figures:
    """Compare the peak of a training step in `count_memory` with that of torch's allocator."""
    sizes = (8, 16, 64) if place.quick else (32, 512, 1024)

    def step(x: Tensor) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(sizes[2], sizes[2]), nn.GELU()) for _ in range(8)))
        model.to(x.device)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), x)
            loss.backward()
            optimizer.step()

    x = torch.randn(sizes, device=place.device)
    counted = tt.run(step, Mesh(dp=1), x, count_memory=True, device=place.device).peaks
    assert counted is not None
    bare = tt.run(step, Mesh(dp=1), x, count_memory=True, device="meta").peaks
    figures: dict[str, Any] = {"counted": counted[0], "counted on meta": bare and bare[0]}
    if place.device != "cuda":
        return figures
    step(x)  # libraries keep their work space from now on
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step(x)
    peak = torch.cuda.max_memory_allocated() - before + x.nbytes
    figures |= {"allocated": peak, "off by": counted[0] / peak - 1}
    if not abs(counted[0] / peak - 1) < 0.05:
        raise Wrong(f"counted {counted[0]:,} B, and torch's allocator had {peak:,} B", figures)
    return figures


def measured(place: Place) -> Figures:
    """clock="measured" waits for the device: two ranks take twice as long as one, together."""
    size = 64 if place.quick else 8192

    def program(x: Tensor) -> None:
        for _ in range(10):
            x = x @ x * 1e-4
        tt.ring_shift(x[:1], "tp")

    x = torch.randn(size, size, device=place.device)
    busy = {
        ranks: tt.run(program, Mesh(tp=ranks), x, clock="measured", device=place.device).trace.busy().tolist()
        for ranks in (1, 2)
    }
    return {"busy seconds": busy}


def nccl(place: Place) -> Figures:
    """run(on="processes") with as many GPUs as ranks uses NCCL."""
    place.need_gpu()

    def program(x: Tensor) -> tuple[str, float, float]:
        x.requires_grad_()
        y = tt.start(tt.all_reduce, tt.ring_shift(x, "tp") @ x, "tp").wait()
        y.sum().backward()
        assert x.grad is not None
        return str(y.device), float(y.detach().sum()), float(x.grad.sum())

    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (where, total, grad), = tt.run(program, Mesh(tp=1), x, on="processes").per_rank  # fmt: skip
    (_, want, want_grad), = tt.run(program, Mesh(tp=1), x).per_rank  # fmt: skip
    assert where.startswith("cuda"), where
    assert abs(total / want - 1) < 1e-10 and abs(grad / want_grad - 1) < 1e-10, (total, want, grad, want_grad)
    two = tt.run(lambda: str(torch.ones(1).device), Mesh(tp=2), on="processes").per_rank
    return {"one rank is on": where, "two ranks on one GPU": two}
