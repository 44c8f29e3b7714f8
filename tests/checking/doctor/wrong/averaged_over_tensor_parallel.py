"""Data and tensor parallelism by hand, two by two; gradients are averaged over all ranks, tensor-parallel ones too."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class ProcessGroups:
    def __init__(self, tp_size):
        rank, world = dist.get_rank(), dist.get_world_size()
        self.tp_size = min(tp_size, world)
        self.dp_size = world // self.tp_size
        for i in range(self.dp_size):
            ranks = list(range(i * self.tp_size, (i + 1) * self.tp_size))
            group = dist.new_group(ranks)
            if rank in ranks:
                self.tp_group, self.tp_rank = group, ranks.index(rank)
        for i in range(self.tp_size):
            ranks = list(range(i, world, self.tp_size))
            group = dist.new_group(ranks)
            if rank in ranks:
                self.dp_group, self.dp_rank = group, ranks.index(rank)


class F_(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class G_(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class ParallelMLP(nn.Module):
    def __init__(self, dim, hidden, groups):
        super().__init__()
        self.group = groups.tp_group
        w1, w2 = torch.randn(hidden, dim) * 0.3, torch.randn(dim, hidden) * 0.2
        self.w1 = nn.Parameter(w1.chunk(groups.tp_size, 0)[groups.tp_rank].clone())
        self.w2 = nn.Parameter(w2.chunk(groups.tp_size, 1)[groups.tp_rank].clone())

    def forward(self, x):
        h = F.relu(F.linear(F_.apply(x, self.group), self.w1))
        return G_.apply(F.linear(h, self.w2), self.group)


class Net(nn.Module):
    def __init__(self, groups, dim=6):
        super().__init__()
        self.inp = nn.Linear(dim, dim)
        self.mlps = nn.ModuleList(ParallelMLP(dim, 12, groups) for _ in range(2))
        self.out = nn.Linear(dim, 2)

    def forward(self, x):
        x = self.inp(x)
        for mlp in self.mlps:
            x = x + mlp(x)
        return self.out(x)


def sync(model, groups):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tensor-parallel", type=int, default=2)
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--steps", type=int, default=2)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    groups = ProcessGroups(args.tensor_parallel)
    torch.manual_seed(3)
    model = Net(groups)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(args.steps):
        g = torch.Generator().manual_seed(step)
        x, y = torch.randn(args.batch, 6, generator=g), torch.randint(0, 2, (args.batch,), generator=g)
        x, y = x.chunk(groups.dp_size)[groups.dp_rank], y.chunk(groups.dp_size)[groups.dp_rank]
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        sync(model, groups)
        optimizer.step()
        if dist.get_rank() == 0:
            print("done with step", step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
