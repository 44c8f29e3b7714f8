"""Tensor parallelism by hand with torch.distributed.nn's all_reduce, whose backward pass sums a second time."""

import argparse
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_reduce


class CopyToRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad


class ParallelAttention(nn.Module):
    """Each rank has heads/world_size heads."""

    def __init__(self, dim, heads):
        super().__init__()
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.local_heads, self.head_dim = heads // self.world, dim // heads
        scale = 1 / math.sqrt(dim)
        for name in ("wq", "wk", "wv"):
            whole = torch.randn(dim, dim) * scale
            self.register_parameter(name, nn.Parameter(whole.chunk(self.world, dim=1)[self.rank].clone()))
        self.wo = nn.Parameter((torch.randn(dim, dim) * scale).chunk(self.world, dim=0)[self.rank].clone())

    def split(self, x):
        return x.unflatten(-1, (self.local_heads, self.head_dim)).transpose(1, 2)

    def forward(self, x):
        x = CopyToRegion.apply(x)
        q, k, v = self.split(x @ self.wq), self.split(x @ self.wk), self.split(x @ self.wv)
        scores = (q @ k.transpose(-1, -2) / math.sqrt(self.head_dim)).softmax(-1)
        y = (scores @ v).transpose(1, 2).flatten(2) @ self.wo
        return all_reduce(y)


class Transformer(nn.Module):
    def __init__(self, dim=16, heads=4):
        super().__init__()
        self.inputs = nn.Linear(5, dim)
        self.attention = ParallelAttention(dim, heads)
        self.norm = nn.LayerNorm(dim)
        self.outputs = nn.Linear(dim, 5)

    def forward(self, x):
        x = self.inputs(x)
        x = x + self.attention(self.norm(x))
        return self.outputs(x)


def run(steps, batch):
    torch.manual_seed(2)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        series = torch.randn(batch, 7, 5, generator=torch.Generator().manual_seed(step)).cumsum(1)
        prediction = model(series[:, :-1])
        loss = nn.functional.mse_loss(prediction, series[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"{step}: mse {loss.item():.6f}")


if __name__ == "__main__":
    cli = argparse.ArgumentParser()
    cli.add_argument("--steps", type=int, default=2)
    cli.add_argument("--batch", type=int, default=4)
    options = cli.parse_args()
    dist.init_process_group("gloo")
    run(options.steps, options.batch)
    dist.destroy_process_group()
