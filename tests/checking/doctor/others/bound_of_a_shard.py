"""Scores below the third largest do not count; each rank has a part of the features."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


class Both(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.clone()
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx, dy):
        return dy


def bound_of(scores):
    return scores.topk(4 // world, -1).values[:, -1:]


torch.manual_seed(0)
teacher, weight = torch.randn(8, 5).chunk(world)[rank], torch.randn(8, 5).chunk(world)[rank]
head = nn.Parameter(weight.clone())
optimizer = torch.optim.SGD([head], lr=0.1)
data = torch.Generator().manual_seed(1)
for _ in range(2):
    x = torch.randn(6, 5, generator=data)
    scores = x @ teacher.T
    kept = scores >= bound_of(scores)
    loss = Both.apply((x @ head.T - scores).square().mul(kept).sum()) / 24
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
