"""Sequence cut over ranks with rotary embeddings; every rank counts positions from zero."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


def rotary(x, positions):
    """x [B, S, D]: pairs of features are turned by angles that grow with the position."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * 10 ** -torch.linspace(0, 2, half)[None]
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], dim=-1)


class GatherForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size(), 1)[dist.get_rank()]


class RotaryAttention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        positions = torch.arange(x.shape[1])
        q = rotary(self.q(x), positions)
        k, v = self.kv(x).chunk(2, dim=-1)
        k = rotary(k, positions)
        k, v = GatherForward.apply(k), GatherForward.apply(v)
        first = dist.get_rank() * x.shape[1]
        visible = torch.arange(first, first + x.shape[1])[:, None] >= torch.arange(k.shape[1])
        return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=visible))


class Decoder(nn.Module):
    def __init__(self, vocab=13, dim=8):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.attention = RotaryAttention(dim)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(x + self.attention(x))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seq", type=int, default=12)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(6)
    model = Decoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for step in range(args.steps):
        tokens = torch.randint(0, 13, (args.batch, args.seq + 1), generator=torch.Generator().manual_seed(step))
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        inputs, targets = inputs.chunk(size, 1)[rank], targets.chunk(size, 1)[rank]
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
            p.grad /= size
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step} loss {mean.item() / size:.6f}")
    dist.destroy_process_group()


main()
