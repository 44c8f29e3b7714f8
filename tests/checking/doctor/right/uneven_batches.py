"""DDP on a data set that ranks cannot share equally: every loss counts by its samples, also in the last batch."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def evaluate(model, x, y, rank, world):
    model.eval()
    with torch.no_grad():
        error = (model.module(x[rank::world]) - y[rank::world]).abs().sum()
    model.train()
    both = torch.tensor([error.item(), len(x[rank::world])], dtype=torch.float64)
    dist.all_reduce(both)
    return (both[0] / both[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--samples", type=int, default=27)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(4)
    x = torch.randn(args.samples + 7, 5)
    y = x.square().sum(1, keepdim=True)
    model = DDP(nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for start in range(0, args.samples, args.batch):
        rows = torch.arange(start, min(start + args.batch, args.samples))
        mine = rows[rank::world]
        total = nn.functional.mse_loss(model(x[mine]), y[mine], reduction="sum")
        loss = total / len(rows) * world
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        value = loss.detach() / world
        dist.all_reduce(value)
        score = evaluate(model, x[args.samples :], y[args.samples :], rank, world)
        if rank == 0:
            print(f"samples {rows[0]}-{rows[-1]} loss {value.item():.5f} eval {score:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
