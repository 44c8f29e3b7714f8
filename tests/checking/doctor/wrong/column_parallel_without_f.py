"""Megatron-style MLP blocks; the column-parallel layer lacks the operator f, so nothing sums its input's gradient."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class ReduceFromTensorParallel(torch.autograd.Function):
    """g: all-reduce forward, identity backward."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class ColumnParallelLinear(nn.Module):
    def __init__(self, in_features, out_features, rank, world_size):
        super().__init__()
        whole = nn.Linear(in_features, out_features)
        self.weight = nn.Parameter(whole.weight.detach().chunk(world_size)[rank].clone())
        self.bias = nn.Parameter(whole.bias.detach().chunk(world_size)[rank].clone())

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


class RowParallelLinear(nn.Module):
    def __init__(self, in_features, out_features, rank, world_size):
        super().__init__()
        whole = nn.Linear(in_features, out_features)
        self.weight = nn.Parameter(whole.weight.detach().chunk(world_size, dim=1)[rank].clone())
        self.bias = nn.Parameter(whole.bias.detach().clone())

    def forward(self, x):
        return ReduceFromTensorParallel.apply(F.linear(x, self.weight)) + self.bias


class Block(nn.Module):
    def __init__(self, dim, rank, world_size):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = ColumnParallelLinear(dim, 4 * dim, rank, world_size)
        self.down = RowParallelLinear(4 * dim, dim, rank, world_size)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, vocab, dim, layers, rank, world_size):
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim, rank, world_size) for _ in range(layers))
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dim", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Model(17, args.dim, args.layers, rank, world_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(args.steps):
        tokens = torch.randint(0, 17, (3, 9), generator=torch.Generator().manual_seed(step))
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
