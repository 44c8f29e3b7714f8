"""Gradient accumulation over microbatches of unequal numbers of tokens, each averaged on its own."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--accum", type=int, default=4)
    parser.add_argument("--batch", type=int, default=16, help="sequences per step, of all ranks")
    parser.add_argument("--steps", type=int, default=2)
    return parser.parse_args()


class Tagger(nn.Module):
    def __init__(self, words=40, tags=6, width=14):
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.left = nn.Linear(width, width)
        self.right = nn.Linear(width, width)
        self.out = nn.Linear(width, tags)

    def forward(self, ids):
        h = self.words(ids)
        h = torch.tanh(self.left(h) + self.right(h.roll(1, dims=1)))
        return self.out(h)


def sentences(step, count):
    generator = torch.Generator().manual_seed(100 + step)
    ids = torch.randint(0, 40, (count, 10), generator=generator)
    tags = torch.randint(0, 6, (count, 10), generator=generator)
    lengths = torch.randint(2, 11, (count, 1), generator=generator)
    tags[torch.arange(10)[None] >= lengths] = -1
    return ids, tags


def average(model, world_size):
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    dist.all_reduce(flat)
    flat /= world_size
    for p, piece in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()])):
        p.grad.copy_(piece.view_as(p))


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(2)
    model = Tagger()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for step in range(args.steps):
        ids, tags = sentences(step, args.batch)
        ids, tags = ids.chunk(world_size)[rank], tags.chunk(world_size)[rank]
        share = (tags >= 0).sum()
        total = share.clone()
        dist.all_reduce(total)
        optimizer.zero_grad()
        for micro_ids, micro_tags in zip(ids.chunk(args.accum), tags.chunk(args.accum)):
            loss = F.cross_entropy(model(micro_ids).flatten(0, 1), micro_tags.flatten(), ignore_index=-1)
            loss = loss * (share / total * world_size) / args.accum  # ranks weighted by their tokens
            loss.backward()
        average(model, world_size)
        optimizer.step()
        if rank == 0:
            print("step", step, "of", args.steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
