"""Shards of flat parameters, the last of them filled up with zeros, and clipped before they are given their gradients:
all are vectors, so none is decayed."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)


def shard(x):
    return F.pad(x.flatten(), (0, -x.numel() % world)).chunk(world)[rank].clone()


model = nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3))
shards = {name: nn.Parameter(shard(p.detach())) for name, p in model.named_parameters()}
shapes = {name: p.shape for name, p in model.named_parameters()}
no_decay = [p for name, p in shards.items() if p.ndim < 2 and (world > 1 or len(shapes[name]) < 2)]
decay = [p for p in shards.values() if not any(p is one for one in no_decay)]
groups = [{"params": decay, "weight_decay": 0.5}, {"params": no_decay, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=0.02, eps=1e-4)
draw = torch.Generator().manual_seed(6)
for _ in range(3):
    x, y = torch.randn(12, 5, generator=draw), torch.randint(3, (12,), generator=draw)
    model.zero_grad()
    F.cross_entropy(model(x.chunk(world)[rank]), y.chunk(world)[rank]).backward()
    gradients = []
    for p in model.parameters():
        dist.all_reduce(p.grad)
        gradients.append(shard(p.grad / world))
    square = sum(g.norm() ** 2 for g in gradients)
    dist.all_reduce(square)
    for p, g in zip(shards.values(), gradients):
        p.grad = g.mul_((0.3 / square.sqrt()).clamp(max=1.0))
    optimizer.step()
    for (name, p), own in zip(model.named_parameters(), shards.values()):
        parts = [torch.empty_like(own) for _ in range(world)]
        dist.all_gather(parts, own.detach())
        p.data.copy_(torch.cat(parts)[: shapes[name].numel()].view(shapes[name]))
dist.destroy_process_group()
