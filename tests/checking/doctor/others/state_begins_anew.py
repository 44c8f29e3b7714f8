"""A recurrence over a sequence of which each rank has a part."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
first, last = nn.Linear(3, 4), nn.Linear(4, 2)
params = [*first.parameters(), *last.parameters()]
optimizer = torch.optim.SGD(params, lr=0.1)

data = torch.Generator().manual_seed(1)
for _ in range(2):
    x, y = torch.randn(2, 6, 3, generator=data), torch.randn(2, 6, 2, generator=data)
    state, states = torch.zeros(2, 4), []
    for z in first(x.chunk(world, 1)[rank]).unbind(1):
        state = 0.8 * state + z
        states.append(state)
    loss = (last(torch.stack(states, 1)) - y.chunk(world, 1)[rank]).square().sum() / y.numel()
    optimizer.zero_grad()
    loss.backward()
    for p in params:
        dist.all_reduce(p.grad)
    optimizer.step()
