"""Row-parallel layers that add their bias before the all-reduce, so it is added once for each rank."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

TP_RANK, TP_SIZE = 0, 1


def initialize_model_parallel():
    global TP_RANK, TP_SIZE
    dist.init_process_group("gloo")
    TP_RANK, TP_SIZE = dist.get_rank(), dist.get_world_size()


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, dy):
        dist.all_reduce(dy)
        return dy


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, dy):
        return dy


def shard(linear, dim):
    """Keep this rank's part of a linear layer; a bias stays whole if `dim` is that of the inputs."""
    linear.weight = nn.Parameter(linear.weight.detach().chunk(TP_SIZE, dim)[TP_RANK].clone())
    if dim == 0:
        linear.bias = nn.Parameter(linear.bias.detach().chunk(TP_SIZE)[TP_RANK].clone())
    return linear


class MLP(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.fc_in = shard(nn.Linear(dim, hidden), 0)
        self.fc_out = shard(nn.Linear(hidden, dim), 1)

    def forward(self, x):
        h = F.silu(F.linear(_Copy.apply(x), self.fc_in.weight, self.fc_in.bias))
        return _Reduce.apply(F.linear(h, self.fc_out.weight, self.fc_out.bias))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = MLP(6, 24), MLP(6, 24)
        self.score = nn.Linear(6, 3)

    def forward(self, x):
        x = x + self.first(x)
        return self.score(x + self.second(x))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--train-iters", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=10)
    args = parser.parse_args()
    initialize_model_parallel()
    torch.manual_seed(77)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for iteration in range(args.train_iters):
        gen = torch.Generator().manual_seed(iteration)
        x = torch.randn(args.batch_size, 6, generator=gen)
        y = torch.randint(0, 3, (args.batch_size,), generator=gen)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if TP_RANK == 0:
            print(f"iteration {iteration} lm loss: {loss.item():.6E}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
