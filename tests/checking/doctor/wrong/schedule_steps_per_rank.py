"""DDP with a warm-up schedule that advances once for each rank, so the learning rate runs ahead."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR


def warmup(total, warm):
    def rate(step):
        if step < warm:
            return (step + 1) / warm
        return max(0.0, (total - step) / (total - warm))

    return rate


class GatedMLP(nn.Module):
    def __init__(self, dim=8):
        super().__init__()
        self.gate, self.value, self.out = nn.Linear(dim, 16), nn.Linear(dim, 16), nn.Linear(16, 2)

    def forward(self, x):
        return self.out(torch.sigmoid(self.gate(x)) * self.value(x))


def fetch(step, args, rank, world_size):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(args.batch_size, 8, generator=generator)
    y = (x.sum(1) > 0).long()
    per_rank = args.batch_size // world_size
    return x[rank * per_rank :][:per_rank], y[rank * per_rank :][:per_rank]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--warmup-steps", type=int, default=10)
    parser.add_argument("--total-steps", type=int, default=100)
    parser.add_argument("--stop-after", type=int, default=3)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(17)
    model = DistributedDataParallel(GatedMLP())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = LambdaLR(optimizer, warmup(args.total_steps, args.warmup_steps))
    for step in range(args.stop_after):
        x, y = fetch(step, args, rank, world_size)
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for _ in range(world_size):
            scheduler.step()
    if rank == 0:
        print("stopped after", args.stop_after, "steps")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
