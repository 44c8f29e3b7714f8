"""Causal attention over a sequence that is cut over ranks, in order or in a zigzag, beside data parallelism."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh


def places(length, rank, size, zigzag):
    """Which positions of the sequence a rank has."""
    at = torch.arange(length)
    if not zigzag:
        return at.chunk(size)[rank]
    parts = at.chunk(2 * size)
    return torch.cat([parts[rank], parts[2 * size - 1 - rank]])


class GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx, grad):
        parts = [p.contiguous() for p in grad.chunk(dist.get_world_size(ctx.group), dim=1)]
        out = torch.empty_like(parts[0])
        dist.reduce_scatter(out, parts, group=ctx.group)
        return out, None


class Attention(nn.Module):
    def __init__(self, dim, heads, group):
        super().__init__()
        self.heads, self.group = heads, group
        self.q, self.kv, self.o = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)

    def forward(self, x, mine, everyones):
        k, v = GatherSequence.apply(self.kv(x), self.group).chunk(2, dim=-1)
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (self.q(x), k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mine[:, None] >= everyones)
        return self.o(y.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, vocab, dim, length, group):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, dim), nn.Embedding(length, dim)
        self.norm, self.attention = nn.LayerNorm(dim), Attention(dim, 2, group)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids, mine, everyones):
        x = self.tokens(ids) + self.positions(mine)
        return self.head(x + self.attention(self.norm(x), mine, everyones))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--context-parallel", type=int, default=2)
    parser.add_argument("--zigzag", action="store_true")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=16)
    parser.add_argument("--steps", type=int, default=2)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    cp = min(args.context_parallel, world)
    mesh = init_device_mesh("cpu", (world // cp, cp), mesh_dim_names=("dp", "cp"))
    cp_rank, dp_rank = mesh.get_local_rank("cp"), mesh.get_local_rank("dp")
    mine = places(args.length, cp_rank, cp, args.zigzag)
    everyones = torch.cat([places(args.length, r, cp, args.zigzag) for r in range(cp)])

    torch.manual_seed(0)
    model = Model(13, 8, args.length, mesh.get_group("cp"))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(args.steps):
        tokens = torch.randint(0, 13, (args.batch, args.length + 1), generator=torch.Generator().manual_seed(step))
        tokens = tokens.chunk(world // cp)[dp_rank]
        ids, labels = tokens[:, :-1][:, mine], tokens[:, 1:][:, mine]
        loss = F.cross_entropy(model(ids, mine, everyones).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
        optimizer.step()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(f"step {step} loss {mean.item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
