"""DDP with ordinary batch normalisation on small local batches: each rank normalises by its own statistics."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.optim as optim
from torch.nn.parallel import DistributedDataParallel as DDP


class ConvNet(nn.Module):
    def __init__(self, channels=6):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
        )
        self.classifier = nn.Linear(channels * 4, 3)

    def forward(self, x):
        return self.classifier(self.features(x).flatten(1))


def images(step, rank, world_size, batch_size):
    g = torch.Generator().manual_seed(31 + step)
    label = torch.randint(0, 3, (batch_size,), generator=g)
    x = torch.randn(batch_size, 1, 6, 6, generator=g) + label.view(-1, 1, 1, 1)
    return x[rank::world_size], label[rank::world_size]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--iterations", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.1)
    args = parser.parse_args()
    dist.init_process_group(backend="gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DDP(ConvNet())
    criterion = nn.CrossEntropyLoss()
    optimizer = optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    for it in range(args.iterations):
        x, label = images(it, rank, world_size, args.batch_size)
        optimizer.zero_grad()
        loss = criterion(model(x), label)
        loss.backward()
        optimizer.step()
        if rank == 0:
            print("iteration", it, "finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
