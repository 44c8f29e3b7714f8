"""Hand-made data parallelism: squared norms are added over ranks that all hold the same averaged gradients."""

import argparse
import math

import torch
import torch.distributed as dist
from torch import nn


def all_reduce_gradients(params):
    world = dist.get_world_size()
    for p in params:
        p.grad.div_(world)
        dist.all_reduce(p.grad)


def global_grad_norm(params):
    squared = torch.zeros(1)
    for p in params:
        squared += p.grad.norm() ** 2
    dist.all_reduce(squared)
    return math.sqrt(squared.item())


def clip(params, norm, limit):
    if norm > limit:
        for p in params:
            p.grad.mul_(limit / norm)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(7, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
        self.value, self.advantage = nn.Linear(16, 1), nn.Linear(16, 3)

    def forward(self, state):
        h = self.trunk(state)
        advantage = self.advantage(h)
        return self.value(h) + advantage - advantage.mean(1, keepdim=True)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--clip", type=float, default=0.05)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--updates", type=int, default=3)
    opt = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    critic = Critic()
    params = list(critic.parameters())
    optimizer = torch.optim.RMSprop(params, lr=1e-3)
    for update in range(opt.updates):
        gen = torch.Generator().manual_seed(900 + update)
        states = torch.randn(opt.batch, 7, generator=gen)
        returns = torch.randn(opt.batch, 3, generator=gen)
        mine = torch.arange(rank, opt.batch, world)
        loss = (critic(states[mine]) - returns[mine]).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        all_reduce_gradients(params)
        norm = global_grad_norm(params)
        clip(params, norm, opt.clip)
        optimizer.step()
        if rank == 0:
            print(f"update {update} norm {norm:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
