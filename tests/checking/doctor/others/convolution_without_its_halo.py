"""A causal convolution over a sequence of which each rank has a part."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
first, conv, last = nn.Linear(3, 4), nn.Conv1d(4, 4, 3), nn.Linear(4, 2)
params = [*first.parameters(), *conv.parameters(), *last.parameters()]
optimizer = torch.optim.SGD(params, lr=0.1)
data = torch.Generator().manual_seed(1)
for _ in range(2):
    x, y = torch.randn(2, 8, 3, generator=data), torch.randn(2, 8, 2, generator=data)
    h = first(x.chunk(world, 1)[rank]).transpose(1, 2)
    h = conv(F.pad(h, (2, 0))).transpose(1, 2)
    loss = (last(torch.tanh(h)) - y.chunk(world, 1)[rank]).square().sum() / y.numel()
    optimizer.zero_grad()
    loss.backward()
    for p in params:
        dist.all_reduce(p.grad)
    optimizer.step()
