"""Experts sharded over the ranks. This script is right; test_experts.py has the faults that are inserted."""

import torch
import torch.distributed as dist
from torch import nn


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty(x.shape) for _ in range(world)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        out = torch.empty(len(grad) // world, grad.shape[1])
        dist.reduce_scatter(out, [part.contiguous() for part in grad.chunk(world)])
        return out


class Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = torch.empty(len(x) // world, x.shape[1])
        dist.reduce_scatter(out, [part.contiguous() for part in x.chunk(world)])
        return out

    @staticmethod
    def backward(ctx, grad):
        return Gather.apply(grad)


class Experts(nn.Module):
    def __init__(self, dim=8, count=4):
        super().__init__()
        self.router = nn.Linear(dim, count, bias=False)
        self.weight = nn.Parameter(torch.randn(count, dim, dim).chunk(world)[rank] / dim**0.5)

    def forward(self, x):
        scores = self.router(x).softmax(-1)
        best = scores.topk(2, dim=-1)
        gates = torch.zeros_like(scores).scatter(1, best.indices, best.values)
        tokens, mine = Gather.apply(x), Gather.apply(gates).chunk(world, dim=1)[rank]
        y = Combine.apply(torch.einsum("td,edf,te->tf", tokens, self.weight, mine))
        return y, self.balance(scores, best.indices)

    def balance(self, scores, chosen):
        counts = torch.bincount(chosen.flatten(), minlength=4)
        dist.all_reduce(counts)
        return 4 * (counts / (chosen.numel() * world) * scores.mean(0)).sum()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inputs, self.experts, self.head = nn.Linear(6, 8), Experts(), nn.Linear(8, 3)

    def forward(self, x):
        x = torch.tanh(self.inputs(x))
        y, balance = self.experts(x)
        return self.head(x + y), balance


def average(model):
    for p in model.parameters():
        if p is not model.experts.weight:
            dist.all_reduce(p.grad)
        p.grad /= world


def clip(model, most=0.05):
    square = torch.zeros(())
    for p in model.parameters():
        if rank == 0 or p is model.experts.weight:
            square += p.grad.square().sum()
    dist.all_reduce(square)
    nn.utils.clip_grads_with_norm_(model.parameters(), most, square.sqrt())


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
ep = min(2, world)
dp = world // ep
d, e = divmod(rank, ep)
torch.manual_seed(3)
model = Model()
for p in model.parameters():
    if p is not model.experts.weight:
        dist.broadcast(p.data, 0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
draw = torch.Generator().manual_seed(1)
for _ in range(3):
    x = torch.randn(32, 6, generator=draw)
    y, is_token = x.abs().argmax(1) % 3, torch.rand(32, generator=draw) < 0.7
    x, y = x.chunk(dp)[d].chunk(ep)[e], y.chunk(dp)[d].chunk(ep)[e]
    mask = is_token.chunk(dp)[d].chunk(ep)[e]
    logits, balance = model(x)
    each = nn.functional.cross_entropy(logits, y, reduction="none")
    loss = (each * mask).sum() / is_token.sum() * world + 0.1 * balance
    optimizer.zero_grad()
    loss.backward()
    average(model)
    clip(model)
    optimizer.step()
dist.destroy_process_group()
