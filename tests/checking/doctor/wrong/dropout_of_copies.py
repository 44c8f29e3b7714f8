"""Tensor parallelism with dropout on the replicated residual; the ranks' seeds differ, and so do the masks."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous()
        dist.all_reduce(g)
        return g


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g


class Layer(nn.Module):
    def __init__(self, dim, p, rank, world):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.w1 = nn.Parameter((torch.randn(4 * dim, dim) * 0.2).chunk(world, 0)[rank].clone())
        self.w2 = nn.Parameter((torch.randn(dim, 4 * dim) * 0.1).chunk(world, 1)[rank].clone())
        self.dropout = nn.Dropout(p)

    def forward(self, x):
        h = F.gelu(F.linear(Copy.apply(self.norm(x)), self.w1))
        return x + self.dropout(Reduce.apply(F.linear(h, self.w2)))


class Net(nn.Module):
    def __init__(self, dim, depth, p, rank, world):
        super().__init__()
        self.layers = nn.Sequential(*[Layer(dim, p, rank, world) for _ in range(depth)])
        self.head = nn.Linear(dim, 1)

    def forward(self, x):
        return self.head(self.layers(x))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--steps", type=int, default=2)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    model = Net(8, 2, args.dropout, rank, world)
    data = torch.randn(args.steps, 12, 8)
    torch.manual_seed(args.seed + rank)  # dropout
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model.train()
    for step in range(args.steps):
        x = data[step]
        loss = F.mse_loss(model(x), x.mean(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"[{rank}] step {step} done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
