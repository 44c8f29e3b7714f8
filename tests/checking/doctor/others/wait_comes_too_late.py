"""OpenNMT/OpenNMT-py#2295, NERSC/sc24-dl-tutorial#1 (review)

The gradients are copied out of the bucket before the asynchronous all_reduce has been waited for.
"""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(300, 500), nn.Tanh(), nn.Linear(500, 300))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
draw = torch.Generator().manual_seed(1)
for _ in range(3):
    x, y = torch.randn(16, 300, generator=draw), torch.randn(16, 300, generator=draw)
    loss = (model(x.chunk(world)[rank]) - y.chunk(world)[rank]).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    parameters = list(model.parameters())
    bucket = torch.cat([p.grad.flatten() for p in parameters]) / world
    work = dist.all_reduce(bucket, async_op=True)
    for p, g in zip(parameters, bucket.split([p.numel() for p in parameters])):
        p.grad.copy_(g.view_as(p))
    work.wait()
    optimizer.step()
dist.destroy_process_group()
