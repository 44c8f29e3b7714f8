"""Batch norm over all ranks, by hand; its running statistics are used for evaluation."""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x / dist.get_world_size()

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        dist.all_reduce(g)
        return g / dist.get_world_size()


class SyncBN(nn.Module):
    def __init__(self, c, momentum=0.1):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(c)), nn.Parameter(torch.zeros(c))
        self.register_buffer("running_mean", torch.zeros(c))
        self.register_buffer("running_var", torch.ones(c))
        self.momentum = momentum

    def forward(self, x):
        if not self.training:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias)
        mean = Mean.apply(x.mean((0, 2, 3)))
        var = Mean.apply(x.square().mean((0, 2, 3))) - mean.square()
        n = x.numel() // x.shape[1]
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var * n / (n - 1), self.momentum)
        y = (x - mean[:, None, None]) * torch.rsqrt(var + 1e-5)[:, None, None]
        return y * self.weight[:, None, None] + self.bias[:, None, None]


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Conv2d(2, 4, 3), SyncBN(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
model = nn.parallel.DistributedDataParallel(net)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.randn(4, 8, 2, 4, 4)
labels = torch.randint(3, (4, 8))
for x, y in zip(data, labels):
    opt.zero_grad()
    F.cross_entropy(model(x.chunk(world)[rank]), y.chunk(world)[rank]).backward()
    opt.step()
