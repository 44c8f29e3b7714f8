"""ZeRO-2 by hand: gradients are reduce-scattered, each rank steps a slice of one flat parameter, which all gather."""

import argparse

import torch
import torch.distributed as dist
from torch import nn


class FlatOptimizer:
    def __init__(self, model, lr):
        self.params = list(model.parameters())
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        numel = sum(p.numel() for p in self.params)
        self.slice = -(-numel // self.world)
        self.pad = self.slice * self.world - numel
        flat = self.flat([p.data for p in self.params])
        self.mine = nn.Parameter(flat[self.rank * self.slice :][: self.slice].clone())
        self.inner = torch.optim.AdamW([self.mine], lr=lr)

    def flat(self, tensors):
        return torch.cat([t.flatten() for t in tensors] + [torch.zeros(self.pad)])

    def step(self):
        grads = self.flat([p.grad for p in self.params]) / self.world
        self.mine.grad = torch.empty_like(self.mine)
        dist.reduce_scatter(self.mine.grad, list(grads.chunk(self.world)))
        self.inner.step()
        whole = torch.empty(self.slice * self.world)
        dist.all_gather_into_tensor(whole, self.mine.detach())
        at = 0
        for p in self.params:
            p.data.copy_(whole[at : at + p.numel()].view_as(p))
            p.grad = None
            at += p.numel()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(7, 13), nn.Linear(13, 13), nn.Linear(13, 3)

    def forward(self, x):
        x = torch.tanh(self.a(x))
        return self.c(x + torch.tanh(self.b(x)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)
    model = Net()
    optimizer = FlatOptimizer(model, lr=0.02)
    for step in range(args.steps):
        x = torch.randn(args.batch, 7, generator=torch.Generator().manual_seed(step))
        y = x[:, :3].argmax(1)
        loss = nn.functional.cross_entropy(model(x[rank::world]), y[rank::world])
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step} loss {mean.item() / world:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
