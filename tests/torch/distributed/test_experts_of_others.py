"""Expert parallelism under FSDP2, written as its users write it: DTensors along ep, all_to_all_single with split sizes,
`fully_shard` of the experts along the other ranks with a divide factor of their own. It runs unchanged, trains what one
rank trains, and sends what its choices say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.nn import functional as F

from tplab import Mesh
from tplab.torch import run

WIDTH, HIDDEN, EXPERTS, CHOICES, STEPS = 16, 24, 8, 2, 3


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) * WIDTH**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) * HIDDEN**-0.5)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        up, down = (w.to_local() if isinstance(w, DTensor) else w for w in (self.up, self.down))
        return torch.cat([F.silu(rows @ up[e]) @ down[e] for e, rows in enumerate(x.split(counts.tolist()))])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = Experts()

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x)
        weights, chosen = self.router(rows).softmax(-1).topk(CHOICES, -1)
        order = chosen.flatten().argsort(stable=True)
        routed = self.experts(rows[order // CHOICES], chosen.flatten().bincount(minlength=EXPERTS))
        return x.index_add(0, order // CHOICES, routed * weights.flatten()[order, None])


class ExpertParallel(ParallelStyle):
    """Experts along ep; their inputs are sent to them, and their outputs back."""

    def __init__(self, sent: list[int]):
        super().__init__()
        self.rows = sent

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        return distribute_module(module, device_mesh, self._cut, self._dispatch, self._combine)  # type: ignore[arg-type]

    def _cut(self, name: str, module: nn.Module, mesh: Any) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            module.register_parameter(name, nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)])))

    def _dispatch(self, module: nn.Module, inputs: Any, mesh: Any) -> tuple[Tensor, Tensor]:
        x, counts = inputs
        ranks, here = mesh.size(), EXPERTS // mesh.size()
        with torch.no_grad():
            got = torch.ops._c10d_functional.wait_tensor(all_to_all_single(counts, None, None, mesh.get_group()))
        self.sent, self.come = (each.view(ranks, -1).sum(1).tolist() for each in (counts, got))
        self.rows.append(sum(self.sent) - self.sent[mesh.get_local_rank()])
        self.rows.append(sum(self.come) - self.come[mesh.get_local_rank()])
        x = all_to_all_single_autograd(x, self.come, self.sent, mesh.get_group())
        self.order = torch.arange(here).repeat(ranks).repeat_interleave(got).argsort(stable=True)
        return x[self.order], got.view(ranks, here).sum(0)

    def _combine(self, module: nn.Module, rows: Tensor, mesh: Any) -> Tensor:
        back = torch.empty_like(rows).index_copy(0, self.order, rows)
        return all_to_all_single_autograd(back, self.sent, self.come, mesh.get_group())


def train(ep: int) -> tuple[list[float], int]:
    """The losses, and how many rows this rank has sent in the forward passes."""
    dist.init_process_group("gloo")
    rank, world, sent = dist.get_rank(), dist.get_world_size(), list[int]()
    mesh = init_device_mesh("cpu", (world // ep, ep), mesh_dim_names=("efsdp", "ep"))
    everyone = mesh._flatten("dp")
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    for block in model:
        experts: Any = block.experts
        if ep > 1:
            parallelize_module(experts, mesh["ep"], ExpertParallel(sent))
        fully_shard(experts, mesh=mesh["efsdp"])
        experts.set_gradient_divide_factor(world)
        fully_shard(block, mesh=everyone)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    numbers, losses = torch.Generator().manual_seed(1), []
    for _ in range(STEPS):
        x = torch.randn(24, WIDTH, generator=numbers)
        loss = model(x.chunk(world)[rank]).square().mean()
        loss.backward()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        losses.append(mean.item())
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()
    return losses, sum(sent)


@pytest.mark.parametrize("world, ep", [(2, 2), (4, 2), (4, 4), (8, 4)])
def test_fsdp_and_expert_parallelism(world, ep):
    want, _ = run(train, Mesh(world=1), 1, distributed=True).per_rank[0]
    out = run(train, Mesh(world=world), ep, distributed=True)
    for rank, (losses, rows) in enumerate(out.per_rank):
        assert losses == pytest.approx(want, rel=2e-6)  # a few roundings of float32
        exchanged = [event.bytes for event in out.trace.select(kind="collective", op="all_to_all", rank=rank).events]
        # A row forward, and its gradient in the backward pass; and in each of 6 passes a count (8 B) for each expert.
        assert sum(exchanged) == rows * 2 * WIDTH * 4 + 2 * STEPS * 8 * (EXPERTS - EXPERTS // ep)
