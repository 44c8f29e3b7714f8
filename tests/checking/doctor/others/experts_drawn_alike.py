"""(class: one seed on every rank)

Each rank draws its own experts from the seed that all have.
"""

import torch
import torch.distributed as dist
from torch import nn


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(world)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        out = torch.empty_like(grad.chunk(world)[0])
        dist.reduce_scatter(out, [part.contiguous() for part in grad.chunk(world)])
        return out


class Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = torch.empty_like(x.chunk(world)[0])
        dist.reduce_scatter(out, [part.contiguous() for part in x.chunk(world)])
        return out

    @staticmethod
    def backward(ctx, grad):
        return Gather.apply(grad)


class Experts(nn.Module):
    def __init__(self, dim=8, count=4):
        super().__init__()
        self.router = nn.Linear(dim, count, bias=False)
        self.weight = nn.Parameter(torch.randn(count // world, dim, dim) / dim**0.5)

    def forward(self, x):
        gates = self.router(x).softmax(-1)
        best = gates.topk(2, dim=-1)
        gates = torch.zeros_like(gates).scatter(1, best.indices, best.values)
        tokens, mine = Gather.apply(x), Gather.apply(gates).chunk(world, dim=1)[rank]
        return Combine.apply(torch.einsum("td,edf,te->tf", tokens, self.weight, mine))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inputs, self.experts, self.head = nn.Linear(6, 8), Experts(), nn.Linear(8, 3)

    def forward(self, x):
        x = torch.tanh(self.inputs(x))
        return self.head(x + self.experts(x))


def average(model):
    for name, p in model.named_parameters():
        if name != "experts.weight":
            dist.all_reduce(p.grad)
        p.grad /= world


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(3)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
draw = torch.Generator().manual_seed(1)
for _ in range(3):
    x = torch.randn(32, 6, generator=draw)
    y = x.abs().argmax(1) % 3
    loss = nn.functional.cross_entropy(model(x.chunk(world)[rank]), y.chunk(world)[rank])
    optimizer.zero_grad()
    loss.backward()
    average(model)
    optimizer.step()
dist.destroy_process_group()
