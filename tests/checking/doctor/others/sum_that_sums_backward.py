"""pytorch's torch.distributed.nn.functional.all_reduce in row-parallel layers (class: its backward pass is an
all_reduce too)

A row-parallel layer uses torch.distributed.nn.functional.all_reduce, whose backward pass adds up the (equal)
gradients of all ranks.
"""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from torch import nn


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class Mlp(nn.Module):
    def __init__(self, d=8, f=32):
        super().__init__()
        self.inp, self.up, self.down = nn.Linear(d, d), nn.Linear(d, f, bias=False), nn.Linear(f, d, bias=False)
        self.up.weight = nn.Parameter(self.up.weight.detach().chunk(world, 0)[rank].clone())
        self.down.weight = nn.Parameter(self.down.weight.detach().chunk(world, 1)[rank].clone())
        self.bias = nn.Parameter(torch.zeros(d))

    def forward(self, x):
        h = self.down(self.up(Copy.apply(self.inp(x))).tanh())
        return dist.nn.functional.all_reduce(h) + self.bias


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = Mlp()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
draw = torch.Generator().manual_seed(1)
for _ in range(3):
    x, y = torch.randn(16, 8, generator=draw), torch.randn(16, 8, generator=draw)
    loss = (model(x) - y).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
