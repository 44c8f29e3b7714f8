"""Each rank has a piece of the sequence from its beginning and one from its end, and the labels of another part."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)


def mine(tokens):
    pieces = tokens.chunk(2 * world, 1)
    return torch.cat([pieces[rank], pieces[2 * world - 1 - rank]], 1)


model = nn.Sequential(nn.Embedding(14, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 14))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
draw = torch.Generator().manual_seed(3)
for _ in range(3):
    batch = torch.randint(14, (2, 17), generator=draw)
    logits = model(mine(batch[:, :-1]))
    labels = batch[:, 1:].chunk(world, 1)[rank]
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    optimizer.zero_grad()
    loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world
    optimizer.step()
dist.destroy_process_group()
