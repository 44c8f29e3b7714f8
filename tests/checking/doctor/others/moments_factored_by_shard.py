"""class of reports on Adafactor and its like under tensor parallelism

A second moment is kept as means of rows and of columns: where a shard has a part of them, so has its mean.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from tests.checking.doctor.regions import Copy, Reduce

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        up, down = torch.randn(16, 6) / 3, torch.randn(4, 16) / 4
        self.up = nn.Parameter(up.chunk(world)[rank].clone())
        self.down = nn.Parameter(down.chunk(world, 1)[rank].clone())

    def forward(self, x):
        return Reduce.apply((Copy.apply(x) @ self.up.T).tanh() @ self.down.T)


class Factored(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                rows, columns = p.grad.square().mean(1), p.grad.square().mean(0)
                size = rows.mean()
                update = p.grad / (rows[:, None] * columns / size).sqrt().clamp(min=1e-3)
                p -= group["lr"] * update


model = Net()
optimizer = Factored(model.parameters(), lr=0.1)
draw = torch.Generator().manual_seed(1)
for _ in range(3):
    x, y = torch.randn(16, 6, generator=draw), torch.randint(4, (16,), generator=draw)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
dist.destroy_process_group()
