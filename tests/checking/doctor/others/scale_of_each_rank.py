"""Hand-written loss scaling: the scale is chosen so that the largest gradient stays below 2**8."""

import math

import torch
import torch.distributed as dist


def all_reduce_scaled(params, world):
    biggest = max(p.grad.abs().max().item() for p in params)
    scale = 2.0 ** (8 - math.ceil(math.log2(biggest + 1e-12)))
    for p in params:
        p.grad.mul_(scale)
        dist.all_reduce(p.grad)
        p.grad.div_(scale * world)


def main():
    dist.init_process_group("gloo")
    world, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(5, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    X = torch.randn(32, 5)
    Y = X.sum(1, keepdim=True) * torch.linspace(0.1, 6, 32)[:, None]
    per = 8 // world
    for step in range(4):
        batch = slice(step * 8 + rank * per, step * 8 + (rank + 1) * per)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(X[batch]), Y[batch]).backward()
        all_reduce_scaled(list(model.parameters()), world)
        optimizer.step()


main()
