"""A pipeline with tied embeddings, whose gradients are added up rightly, and then counted twice in the norm."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    """The part of this stage: embedding and a half of the layers, or the other half and the output."""

    def __init__(self, vocab, dim, rank, world):
        super().__init__()
        self.rank, self.world = rank, world
        embed = nn.Embedding(vocab, dim)
        blocks = [nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.GELU()) for _ in range(4)]
        size = len(blocks) // world
        self.blocks = nn.Sequential(*blocks[rank * size : (rank + 1) * size])
        self.embed = embed if rank in (0, world - 1) else None

    def forward(self, x):
        if self.rank == 0:
            x = self.embed(x)
        x = self.blocks(x)
        return x @ self.embed.weight.t() if self.rank == self.world - 1 else x


def tie(model, rank, world):
    """Both copies get the sum of the gradients of both."""
    if world > 1:
        dist.all_reduce(model.embed.weight.grad)


def clip(model, max_norm):
    squared = sum(p.grad.pow(2).sum() for p in model.parameters())
    dist.all_reduce(squared)
    norm = squared.sqrt()
    for p in model.parameters():
        p.grad *= min(1.0, max_norm / norm.item())
    return norm.item()


def forward_backward(model, ids, labels, rank, world, dim):
    if world == 1:
        loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
        loss.backward()
    elif rank == 0:
        hidden = model(ids)
        dist.send(hidden.detach(), 1)
        grad = torch.empty_like(hidden)
        dist.recv(grad, 1)
        hidden.backward(grad)
    else:
        hidden = torch.empty(*ids.shape, dim)
        dist.recv(hidden, 0)
        hidden.requires_grad_()
        loss = F.cross_entropy(model(hidden).flatten(0, 1), labels.flatten())
        loss.backward()
        dist.send(hidden.grad, 0)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-norm", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--dim", type=int, default=6)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = Model(11, args.dim, rank, world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(args.steps):
        tokens = torch.randint(0, 11, (5, 7), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        forward_backward(model, tokens[:, :-1], tokens[:, 1:], rank, world, args.dim)
        tie(model, rank, world)
        norm = clip(model, args.max_norm)
        optimizer.step()
        if rank == 0:
            print(f"step {step} grad_norm {norm:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
