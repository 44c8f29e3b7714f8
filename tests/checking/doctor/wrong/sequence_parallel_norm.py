"""Sequence parallelism by hand: LayerNorm sees a part of the sequence, and nobody sums its gradient over the ranks."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class GatherSequence(torch.autograd.Function):
    """[S/R, B, D] -> [S, B, D]; backward reduce-scatters."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        out = torch.empty_like(grad.chunk(dist.get_world_size())[0])
        dist.reduce_scatter(out, [g.contiguous() for g in grad.chunk(dist.get_world_size())])
        return out


class ReduceScatterSequence(torch.autograd.Function):
    """[S, B, D] -> [S/R, B, D]; backward gathers."""

    @staticmethod
    def forward(ctx, x):
        out = torch.empty_like(x.chunk(dist.get_world_size())[0])
        dist.reduce_scatter(out, [p.contiguous() for p in x.chunk(dist.get_world_size())])
        return out

    @staticmethod
    def backward(ctx, grad):
        parts = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, grad.contiguous())
        return torch.cat(parts)


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        rank, world = dist.get_rank(), dist.get_world_size()
        self.input_norm = nn.LayerNorm(dim)
        self.up = nn.Parameter((torch.randn(dim, 4 * dim) / 4).chunk(world, 1)[rank].clone())
        self.down = nn.Parameter((torch.randn(4 * dim, dim) / 8).chunk(world, 0)[rank].clone())

    def forward(self, x):
        whole = GatherSequence.apply(self.input_norm(x))
        return x + ReduceScatterSequence.apply(F.gelu(whole @ self.up) @ self.down)


class Model(nn.Module):
    def __init__(self, dim, depth):
        super().__init__()
        self.blocks = nn.Sequential(*[Block(dim) for _ in range(depth)])
        self.proj = nn.Parameter(torch.randn(dim, dim) / 4)

    def forward(self, x):
        x = x.chunk(dist.get_world_size())[dist.get_rank()]
        return GatherSequence.apply(self.blocks(x)) @ self.proj


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seq", type=int, default=8)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--dim", type=int, default=8)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(5)
    model = Model(args.dim, args.depth)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    world = dist.get_world_size()
    for step in range(args.steps):
        x = torch.randn(args.seq, args.batch, args.dim, generator=torch.Generator().manual_seed(step))
        loss = F.mse_loss(model(x), x.flip(0))
        optimizer.zero_grad()
        (loss / world).backward()  # the gather's backward pass sums what all ranks computed alike
        for name, p in model.named_parameters():
            if name == "proj":
                dist.all_reduce(p.grad)
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
