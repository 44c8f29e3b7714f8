"""Answers of unequal length are the targets, and each microbatch averages over its own. On another number of ranks,
other answers share a microbatch."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

IGNORED, VOCABULARY, BATCH, MICROBATCH = -100, 30, 16, 2


class Model(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.embedding, self.mix = nn.Embedding(VOCABULARY, width), nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens):
        return self.head(self.mix(self.embedding(tokens))[0])


def rows(step):
    """Tokens, and those of them that are targets."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCABULARY, (BATCH, 12), generator=generator)
    lengths = torch.randint(1, 12, (BATCH, 1), generator=generator)
    return tokens, tokens.masked_fill(torch.arange(12)[None] < 12 - lengths, IGNORED)


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(3)
model = DistributedDataParallel(Model())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(3):
    tokens, labels = rows(step)
    count = int((labels[:, 1:] != IGNORED).sum())
    mine, wanted = tokens[rank::world].split(MICROBATCH), labels[rank::world].split(MICROBATCH)
    total = torch.zeros(())
    for number, (own, target) in enumerate(zip(mine, wanted)):
        model.require_backward_grad_sync = number == len(mine) - 1
        logits, target = model(own)[:, :-1].flatten(0, 1), target[:, 1:].flatten()
        loss = nn.functional.cross_entropy(logits, target, ignore_index=IGNORED) / len(mine)
        loss.backward()
        total += loss.detach() / world
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(total)
    if rank == 0:
        print(f"loss {total.item():.5f}")
