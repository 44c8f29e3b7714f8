"""DDP with no_sync on the wrong microbatch: the last backward pass, which should average, does not."""

import argparse
import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def prepare(rank, world_size, batch_size):
    torch.manual_seed(21)
    x = torch.rand(64, 5)
    dataset = TensorDataset(x, (x * torch.tensor([1.0, -2.0, 3.0, -4.0, 5.0])).sum(1))
    sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank, shuffle=False)
    return DataLoader(dataset, batch_size=batch_size, sampler=sampler)


def train(model, loader, optimizer, grad_accum, max_updates):
    updates = 0
    for i, (x, y) in enumerate(loader):
        is_boundary = i % grad_accum == 0
        context = contextlib.nullcontext() if is_boundary else model.no_sync()
        with context:
            loss = nn.functional.mse_loss(model(x).squeeze(1), y) / grad_accum
            loss.backward()
        if (i + 1) % grad_accum == 0:
            optimizer.step()
            optimizer.zero_grad()
            updates += 1
            if updates == max_updates:
                break


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--grad-accum", type=int, default=2)
    parser.add_argument("--max-updates", type=int, default=3)
    args = parser.parse_args()
    dist.init_process_group("gloo", init_method="env://")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    loader = prepare(rank, world_size, args.batch_size)
    model = DDP(nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    train(model, loader, optimizer, args.grad_accum, args.max_updates)
    if rank == 0:
        print("finished", args.max_updates, "updates")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
