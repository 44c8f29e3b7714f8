"""The average of gradients over ranks, of which an embedding's are sparse."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
table, head = nn.Embedding(20, 4, sparse=True), nn.Linear(4, 2)
optimizer = torch.optim.SGD([*table.parameters(), *head.parameters()], lr=0.5)
data = torch.Generator().manual_seed(1)
for _ in range(2):
    ids, y = torch.randint(20, (8,), generator=data), torch.randn(8, 2, generator=data)
    optimizer.zero_grad()
    (head(table(ids.chunk(world)[rank])) - y.chunk(world)[rank]).square().mean().backward()
    for p in (table.weight, *head.parameters()):
        x = p.grad._values() if p.grad.is_sparse else p.grad
        dist.all_reduce(x)
        x /= world
    optimizer.step()
