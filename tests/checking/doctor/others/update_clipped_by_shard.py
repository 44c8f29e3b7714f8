"""class of reports on Adafactor and its like under tensor parallelism

An update is divided by its root mean square, if that is large: each rank takes that of its own shard.
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


class Clipped(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                square = self.state[p].setdefault("square", torch.zeros_like(p))
                square.mul_(0.9).addcmul_(p.grad, p.grad, value=0.1)
                update = p.grad / (square.sqrt() + 0.01)
                size = update.square().mean()
                p -= group["lr"] * update / (size.sqrt() / 0.5).clamp(min=1)


model = Net()
optimizer = Clipped(model.parameters(), lr=0.1)
draw = torch.Generator().manual_seed(1)
for _ in range(3):
    x, y = torch.randn(16, 6, generator=draw), torch.randint(4, (16,), generator=draw)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
dist.destroy_process_group()
