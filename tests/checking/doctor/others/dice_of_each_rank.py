"""The Dice loss divides sums over the batch, and each rank takes only its own."""

import torch
import torch.distributed as dist
from torch import nn

from tests.checking.doctor.regions import Reduce  # noqa: F401, for what is repaired

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)


model = nn.Linear(32, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
draw = torch.Generator().manual_seed(1)
for _ in range(3):
    x, y = torch.randn(16, 32, generator=draw), (torch.rand(16, 1, generator=draw) < 0.3).float()
    p = model(x.chunk(world)[rank]).sigmoid()
    y = y.chunk(world)[rank]
    both, all_of_them = (p * y).sum(), (p + y).sum()
    loss = 1 - 2 * both / all_of_them
    optimizer.zero_grad()
    loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world
    optimizer.step()
dist.destroy_process_group()
