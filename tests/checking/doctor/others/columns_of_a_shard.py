"""Adafactor for weights that are sharded by rows (ZeRO-3 by hand)."""

import torch
import torch.distributed as dist
import torch.nn as nn


class Adafactor(torch.optim.Optimizer):
    def __init__(self, params, lr=0.05, beta=0.8):
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                sq = p.grad.square() + 1e-8
                row, col = sq.mean(1), sq.mean(0)
                if not state:
                    state["row"], state["col"] = torch.zeros_like(row), torch.zeros_like(col)
                state["row"].lerp_(row, 1 - group["beta"])
                state["col"].lerp_(col, 1 - group["beta"])
                scale = state["row"].mean()
                v = state["row"][:, None] * state["col"][None] / scale
                p.sub_(group["lr"] * p.grad / (v.sqrt() + 1e-3))


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard):
        out = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
        dist.all_gather(out, shard.contiguous())
        return torch.cat(out)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous()
        dist.all_reduce(g)
        return g.chunk(dist.get_world_size())[dist.get_rank()] / dist.get_world_size()


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
w1, w2 = (nn.Parameter((torch.randn(n, m) / m**0.5).chunk(world)[rank].clone()) for n, m in ((10, 6), (4, 10)))
opt = Adafactor([w1, w2])
gen = torch.Generator().manual_seed(1)
for _ in range(4):
    x, y = torch.randn(12, 6, generator=gen), torch.randint(4, (12,), generator=gen)
    h = torch.relu(x.chunk(world)[rank] @ Gather.apply(w1).T)
    loss = nn.functional.cross_entropy(h @ Gather.apply(w2).T, y.chunk(world)[rank])
    opt.zero_grad()
    loss.backward()
    opt.step()
