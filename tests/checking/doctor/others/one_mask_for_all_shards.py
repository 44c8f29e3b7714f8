"""Tensor parallelism whose ranks drop with one seed: all shards of the hidden features lose the same places."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tests.checking.doctor.regions import Copy, Reduce

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)


hidden = 16


class Mlp(nn.Module):
    def __init__(self, d=8):
        super().__init__()
        self.up = nn.Parameter((torch.randn(d, hidden) * 0.3).chunk(world, 1)[rank].clone())
        self.down = nn.Parameter((torch.randn(hidden, d) * 0.3).chunk(world)[rank].clone())

    def forward(self, x):
        h = (Copy.apply(x) @ self.up).relu()
        return Reduce.apply(F.dropout(h, 0.5) @ self.down)


model = Mlp()
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
draw = torch.Generator().manual_seed(1)
torch.manual_seed(7)
for _ in range(3):
    x, y = torch.randn(6, 8, generator=draw), torch.randn(6, 8, generator=draw)
    loss = (model(x) - y).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
