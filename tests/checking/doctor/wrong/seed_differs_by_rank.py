"""Hand-made data parallelism whose ranks start from different weights: the seed has the rank in it."""

import argparse

import torch
import torch.distributed as dist
from torch import nn


class ResNet(nn.Module):
    def __init__(self, width=10, depth=2):
        super().__init__()
        self.stem = nn.Linear(4, width)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width)) for _ in range(depth))
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


def average_gradients(model):
    size = float(dist.get_world_size())
    for param in model.parameters():
        dist.all_reduce(param.grad.data, op=dist.ReduceOp.SUM)
        param.grad.data /= size


def partition(tensor, rank, size):
    return tensor.chunk(size)[rank]


def run(rank, size, args):
    torch.manual_seed(args.seed + rank)
    model = ResNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    data = torch.Generator().manual_seed(args.seed)
    for step in range(args.steps):
        x = torch.randn(args.batch_size, 4, generator=data)
        y = x.norm(dim=1, keepdim=True)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(partition(x, rank, size)), partition(y, rank, size))
        loss.backward()
        average_gradients(model)
        optimizer.step()
        print(f"Rank {rank}, step {step}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=2)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    run(dist.get_rank(), dist.get_world_size(), arguments)
    dist.destroy_process_group()
