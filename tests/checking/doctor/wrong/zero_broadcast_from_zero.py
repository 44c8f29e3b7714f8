"""ZeRO-1 by hand: each rank updates its own parameters, and then all are broadcast from rank 0."""

import argparse

import torch
import torch.distributed as dist
from torch import nn


class ZeroOptimizer:
    """Each rank keeps Adam's states for every `world_size`-th parameter."""

    def __init__(self, params, **options):
        self.params = list(params)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.owner = {p: i % self.world_size for i, p in enumerate(self.params)}
        self.inner = torch.optim.Adam([p for p in self.params if self.owner[p] == self.rank], **options)

    def reduce_gradients(self):
        for p in self.params:
            dist.all_reduce(p.grad)
            p.grad /= self.world_size

    def step(self):
        self.reduce_gradients()
        self.inner.step()
        for p in self.params:
            dist.broadcast(p.data, src=0)

    def zero_grad(self):
        for p in self.params:
            p.grad = None


class Mixer(nn.Module):
    def __init__(self, tokens=6, dim=8):
        super().__init__()
        self.tokens = nn.Linear(tokens, tokens)
        self.channels = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.head = nn.Linear(dim, 3)

    def forward(self, x):
        x = x + self.tokens(x.transpose(1, 2)).transpose(1, 2)
        x = x + self.channels(x)
        return self.head(x.mean(1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(12)
    model = Mixer()
    optimizer = ZeroOptimizer(model.parameters(), lr=1e-2)
    for step in range(args.steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(args.batch, 6, 8, generator=generator)
        y = x.mean(1).argmax(1) % 3
        x, y = x.chunk(world_size)[rank], y.chunk(world_size)[rank]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if rank == 0:
            print("step", step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
