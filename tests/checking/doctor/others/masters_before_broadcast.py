"""class of main-parameter reports (apex, Megatron: main params copied before the weights were broadcast; no one
thread)

The high-precision main copies are made before DDP broadcasts rank 0's weights, so the other ranks' copies are of
their own initial weights.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
masters = [p.detach().double().clone() for p in net.parameters()]
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(masters, lr=0.3, momentum=0.9)
draw = torch.Generator().manual_seed(1)
for _ in range(3):
    x, y = torch.randn(16, 6, generator=draw), torch.randint(3, (16,), generator=draw)
    loss = nn.functional.cross_entropy(model(x.chunk(world)[rank]), y.chunk(world)[rank])
    model.zero_grad()
    loss.backward()
    for master, p in zip(masters, net.parameters()):
        master.grad = p.grad.double()
    optimizer.step()
    with torch.no_grad():
        for master, p in zip(masters, net.parameters()):
            p.copy_(master)
dist.destroy_process_group()
