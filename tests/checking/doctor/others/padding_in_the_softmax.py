"""A head whose rows are filled up with zeros, so that all ranks have equally many."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
ROWS = -(-7 // world)


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.clone()
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx, dy):
        return dy


torch.manual_seed(0)
whole = torch.zeros(ROWS * world, 5)
whole[:7] = torch.randn(7, 5)
head = nn.Parameter(whole[rank * ROWS : (rank + 1) * ROWS].clone())
optimizer = torch.optim.SGD([head], lr=0.1)
data, first = torch.Generator().manual_seed(1), rank * ROWS
own = torch.arange(first, first + ROWS)
for _ in range(2):
    x, y = torch.randn(6, 5, generator=data), torch.randint(7, (6,), generator=data)
    scores = x @ head.T
    total = Sum.apply(scores.exp().sum(1))
    right = Sum.apply((scores * (own == y[:, None])).sum(1))
    loss = (total.log() - right).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
