"""A critic whose observations are normalised by running statistics, as in Baselines."""

import torch
import torch.distributed as dist
import torch.nn as nn


class RunningMeanStd(nn.Module):
    def __init__(self, dim):
        super().__init__()
        for name, value in (("total", torch.zeros(dim)), ("square", torch.ones(dim)), ("count", torch.tensor(1e-2))):
            self.register_buffer(name, value)

    def update(self, x):
        total, square, count = x.sum(0), x.square().sum(0), torch.tensor(float(len(x)))
        self.total += total
        self.square += square
        self.count += count

    def forward(self, x):
        mean = self.total / self.count
        std = (self.square / self.count - mean.square()).clamp(min=1e-2).sqrt()
        return ((x - mean) / std).clamp(-5, 5)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    norm, net = RunningMeanStd(5), nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 1))
    opt = torch.optim.Adam(net.parameters(), lr=1e-2, eps=1e-4)
    gen = torch.Generator().manual_seed(2)
    for _ in range(4):
        obs = torch.randn(16, 5, generator=gen) * torch.linspace(0.5, 3, 16)[:, None] + 1
        ret = obs.sum(1, keepdim=True)
        obs, ret = obs.chunk(world)[rank], ret.chunk(world)[rank]
        norm.update(obs)
        loss = (net(norm(obs)) - ret).square().mean()
        opt.zero_grad()
        loss.backward()
        flat = torch.cat([p.grad.flatten() for p in net.parameters()])
        dist.all_reduce(flat)
        flat /= world
        at = 0
        for p in net.parameters():
            p.grad.copy_(flat[at : at + p.numel()].view_as(p))
            at += p.numel()
        opt.step()


main()
