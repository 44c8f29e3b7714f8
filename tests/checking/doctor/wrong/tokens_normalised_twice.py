"""Language model with DDP; the loss is divided by the tokens of all ranks, and DDP averages once more."""

import argparse
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

IGNORE = -100


class TinyLM(nn.Module):
    def __init__(self, vocab, dim):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        return self.head(self.rnn(self.embed(ids))[0])


def pack(rows, pad):
    """Pad rows of tokens; padding is not a target."""
    length = max(map(len, rows)) - 1
    ids = torch.full((len(rows), length), pad)
    labels = torch.full((len(rows), length), IGNORE)
    for i, row in enumerate(rows):
        ids[i, : len(row) - 1] = row[:-1]
        labels[i, : len(row) - 1] = row[1:]
    return ids, labels


def corpus(vocab, num_rows):
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(4, 13, (num_rows,), generator=generator)
    return [torch.randint(1, vocab, (int(n),), generator=generator) for n in lengths]


def train(args):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(TinyLM(args.vocab, args.dim))
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    rows = corpus(args.vocab, 96)
    per_step = args.micro_batch * world

    for it in range(args.iters):
        started = time.perf_counter()
        mine = rows[it * per_step : (it + 1) * per_step][rank::world]
        ids, labels = pack(mine, pad=0)
        num_tokens = (labels != IGNORE).sum()
        dist.all_reduce(num_tokens)

        logits = model(ids)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")
        loss = loss / num_tokens
        optimizer.zero_grad()
        loss.backward()
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()

        logged = loss.detach().clone()
        dist.all_reduce(logged)
        if rank == 0:
            elapsed = time.perf_counter() - started
            print(f"iter {it}: loss {logged:.6f}, grad_norm {grad_norm:.6f}, time {elapsed * 1000:.0f}ms")
    dist.destroy_process_group()


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--micro-batch", type=int, default=4)
    p.add_argument("--iters", type=int, default=2)
    p.add_argument("--vocab", type=int, default=31)
    p.add_argument("--dim", type=int, default=12)
    p.add_argument("--lr", type=float, default=3e-3)
    train(p.parse_args())
