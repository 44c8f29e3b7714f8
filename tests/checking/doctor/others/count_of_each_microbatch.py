"""The tokens of each microbatch are counted over ranks, and unequal microbatches count alike."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
accum = 4 // world
model = DDP(nn.Linear(6, 5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
draw = torch.Generator().manual_seed(1)
for _ in range(3):
    x, y = torch.randn(16, 6, generator=draw), torch.randint(0, 5, (16,), generator=draw)
    y[torch.rand(16, generator=draw) < 0.5] = -100
    xs, ys = x.chunk(world)[rank].chunk(accum), y.chunk(world)[rank].chunk(accum)
    optimizer.zero_grad()
    for x, y in zip(xs, ys):
        total = (y != -100).sum()
        dist.all_reduce(total)
        loss = F.cross_entropy(model(x), y, ignore_index=-100, reduction="sum") * world / total
        loss = loss / accum
        loss.backward()
    optimizer.step()
dist.destroy_process_group()
