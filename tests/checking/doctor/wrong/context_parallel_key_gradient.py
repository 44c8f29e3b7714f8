"""Context parallelism whose gather of keys and values gives each rank back only its own part of the gradient."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class AllGatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, local):
        world = dist.get_world_size()
        gathered = [torch.zeros_like(local) for _ in range(world)]
        dist.all_gather(gathered, local.contiguous())
        return torch.cat(gathered, dim=2)

    @staticmethod
    def backward(ctx, grad):
        return grad.chunk(dist.get_world_size(), dim=2)[dist.get_rank()]


class SelfAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        b, s, d = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        k, v = AllGatherSequence.apply(k), AllGatherSequence.apply(v)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.proj(y.transpose(1, 2).reshape(b, s, d))


class Encoder(nn.Module):
    def __init__(self, dim=12, heads=3, depth=2):
        super().__init__()
        self.embed = nn.Linear(4, dim)
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(depth))
        self.attentions = nn.ModuleList(SelfAttention(dim, heads) for _ in range(depth))
        self.head = nn.Linear(dim, 1)

    def forward(self, x):
        x = self.embed(x)
        for norm, attention in zip(self.norms, self.attentions):
            x = x + attention(norm(x))
        return self.head(x).squeeze(-1)


def series(step, batch, length):
    x = torch.randn(batch, length, 4, generator=torch.Generator().manual_seed(step))
    return x, x.sum(2) + x.mean((1, 2))[:, None]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--length", type=int, default=8)
    parser.add_argument("--batch", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(11)
    model = DDP(Encoder())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(args.steps):
        x, y = series(step, args.batch, args.length)
        loss = F.mse_loss(model(x.chunk(world, 1)[rank]), y.chunk(world, 1)[rank])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print("step", step, "done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
