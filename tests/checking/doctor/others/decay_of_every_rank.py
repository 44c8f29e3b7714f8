"""class of reports on weight decay by hand, in gradients that are added up over ranks

Each rank adds the decay to its own gradient, and then all are added up: it counts once for each rank.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
draw = torch.Generator().manual_seed(1)
for _ in range(3):
    x, y = torch.randn(16, 6, generator=draw), torch.randint(4, (16,), generator=draw)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x.chunk(world)[rank]), y.chunk(world)[rank]) / world
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p.grad += 0.1 * p
            dist.all_reduce(p.grad)
    optimizer.step()
dist.destroy_process_group()
