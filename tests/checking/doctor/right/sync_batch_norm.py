"""Batch normalisation over the samples of all ranks, written as an autograd function, in a DDP convolutional net."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.parallel import DistributedDataParallel as DDP


class SyncBatchNorm(nn.Module):
    """Mean and mean square of all ranks' samples; the all-reduce's backward pass sums, as its derivative does."""

    def __init__(self, channels, momentum=0.1):
        super().__init__()
        self.momentum = momentum
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x):
        moments = torch.cat([x.mean((0, 2)), x.square().mean((0, 2))])
        mean, square = (all_reduce(moments) / dist.get_world_size()).chunk(2)
        var = square - mean.square()
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var, self.momentum)
        x = (x - mean[:, None]) * (var[:, None] + 1e-5).rsqrt()
        return x * self.weight[:, None] + self.bias[:, None]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv1d(1, 6, 3, padding=1), SyncBatchNorm(6)
        self.conv2, self.bn2 = nn.Conv1d(6, 6, 3, padding=1), SyncBatchNorm(6)
        self.fc = nn.Linear(6, 3)

    def forward(self, x):
        x = torch.relu(self.bn1(self.conv1(x)))
        x = torch.relu(self.bn2(self.conv2(x)))
        return self.fc(x.mean(2))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--steps", type=int, default=2)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DDP(Net(), broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(args.steps):
        g = torch.Generator().manual_seed(step)
        y = torch.randint(0, 3, (args.batch,), generator=g)
        x = torch.randn(args.batch, 1, 10, generator=g) * (1 + y[:, None, None])
        loss = nn.functional.cross_entropy(model(x.chunk(world)[rank]), y.chunk(world)[rank])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step} loss {mean.item() / world:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
