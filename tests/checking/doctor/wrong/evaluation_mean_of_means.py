"""DDP training with a validation loop; ranks have unequally many validation batches, and their means are averaged."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Data:
    def __init__(self, seed, count):
        g = torch.Generator().manual_seed(seed)
        self.x = torch.randn(count, 8, generator=g)
        self.y = (self.x**2).sum(1, keepdim=True)

    def batches(self, size, rank, world):
        """Every rank has each `world`-th sample; the last ranks may have one fewer."""
        x, y = self.x[rank::world], self.y[rank::world]
        yield from zip(x.split(size), y.split(size))


@torch.no_grad()
def validate(model, data, batch_size, rank, world):
    model.eval()
    losses = []
    for x, y in data.batches(batch_size, rank, world):
        losses.append(nn.functional.mse_loss(model.module(x), y))
    mean = torch.stack(losses).mean()
    dist.all_reduce(mean, op=dist.ReduceOp.SUM)
    model.train()
    return mean / world


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--eval-batch-size", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    train, valid = Data(1, 96), Data(2, 13)

    stream = train.batches(args.batch_size // world, rank, world)
    for step in range(args.steps):
        x, y = next(stream)
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        score = validate(model, valid, args.eval_batch_size, rank, world)
        if rank == 0:
            print(f"step={step} val_loss={score.item():.6f}")
    dist.destroy_process_group()


main()
