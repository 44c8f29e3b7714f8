"""Data-parallel regression; the loss is divided by the world size before backward, and DDP divides again."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def get_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=4, help="per rank")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.05)
    return parser.parse_args()


def setup():
    dist.init_process_group(backend="gloo")
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def cleanup():
    dist.destroy_process_group()


def make_dataset(num_samples=64):
    generator = torch.Generator().manual_seed(1234)
    x = torch.randn(num_samples, 10, generator=generator)
    y = x[:, :3].sum(1, keepdim=True).sin()
    return TensorDataset(x, y)


def main():
    args = get_args()
    rank, world_size = setup()
    torch.manual_seed(42)

    dataset = make_dataset()
    sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank, shuffle=True, seed=7)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)

    model = DDP(nn.Sequential(nn.Linear(10, 24), nn.GELU(), nn.Linear(24, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    loss_fn = nn.MSELoss()

    sampler.set_epoch(0)
    for step, (x, y) in enumerate(loader):
        if step == args.steps:
            break
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss = loss / world_size  # average over ranks
        loss.backward()
        optimizer.step()

        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {step} | loss {total.item():.6f}")
    cleanup()


if __name__ == "__main__":
    main()
