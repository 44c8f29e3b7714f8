"""class of reports on grouped-query attention under tensor parallelism

Four ranks have a head of queries each, and two of them share a head of keys and values: the wrong two.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from tests.checking.doctor.regions import Copy, Reduce

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
HEADS, KV, SIZE, WIDTH = 4, 2, 4, 8
parts = min(world, KV)


def part_of(rank):
    return rank % parts


groups = [dist.new_group([other for other in range(world) if part_of(other) == part]) for part in range(parts)]


def cut(heads, parts, part):
    weight = nn.Linear(WIDTH, heads * SIZE).weight.detach()
    return nn.Parameter(weight.chunk(parts)[part].clone())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(12, WIDTH), nn.Linear(WIDTH, 12)
        self.q, self.out = cut(HEADS, world, rank), cut(HEADS, world, rank)
        self.k, self.v = cut(KV, parts, part_of(rank)), cut(KV, parts, part_of(rank))

    def forward(self, ids):
        x = self.embedding(ids)
        y = Copy.apply(x)
        q, k, v = ((y @ w.T).unflatten(-1, (-1, SIZE)).transpose(1, 2) for w in (self.q, self.k, self.v))
        k, v = (z.repeat_interleave(q.shape[1] // z.shape[1], 1) for z in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(x + Reduce.apply(y.transpose(1, 2).flatten(2) @ self.out))


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
draw = torch.Generator().manual_seed(1)
for _ in range(3):
    ids, y = torch.randint(12, (2, 4, 10), generator=draw)
    optimizer.zero_grad()
    logits = model(ids)
    F.cross_entropy(logits.flatten(0, 1), y.flatten()).backward()
    for p in (model.k, model.v):
        dist.all_reduce(p.grad, group=groups[part_of(rank)])
    optimizer.step()
dist.destroy_process_group()
