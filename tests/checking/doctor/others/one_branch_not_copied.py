"""Two branches work on the same input, and only one of them takes it through a copy, and both end at one line."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from tests.checking.doctor.regions import Copy, Reduce

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        shapes = {"a": (2 * dim, dim), "b": (dim, 2 * dim), "c": (4 * dim, dim), "d": (dim, 4 * dim)}
        for name, (out, given) in shapes.items():
            part = (torch.randn(out, given) / given**0.5).chunk(world, int(out < given))[rank]
            setattr(self, name, nn.Parameter(part.clone()))

    def forward(self, x):
        h = self.norm(x)
        copy = Copy.apply(h)
        first = F.linear(copy, self.a).tanh()
        return x + Reduce.apply(F.linear(first, self.b) + F.linear(F.linear(h, self.c), self.d))


model = nn.Sequential(nn.Linear(5, 8), Block(8), Block(8), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
draw = torch.Generator().manual_seed(3)
for _ in range(3):
    x, y = torch.randn(12, 5, generator=draw), torch.randn(12, 2, generator=draw)
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()
dist.destroy_process_group()
