"""ZeRO by hand: the norms of partitions are added up, and not their squares."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
flat = torch.cat([p.detach().flatten() for p in model.parameters()])
size = len(flat) // world
mine = nn.Parameter(flat[rank * size : (rank + 1) * size].clone())
optimizer = torch.optim.SGD([mine], lr=0.5)
draw = torch.Generator().manual_seed(1)
for _ in range(3):
    x, y = torch.randn(8, 6, generator=draw) * 3, torch.randn(8, 4, generator=draw) * 3
    loss = F.mse_loss(model(x.chunk(world)[rank]), y.chunk(world)[rank])
    model.zero_grad()
    loss.backward()
    grad = torch.cat([p.grad.flatten() for p in model.parameters()])
    dist.all_reduce(grad)
    mine.grad = grad[rank * size : (rank + 1) * size] / world
    norm = mine.grad.norm()
    dist.all_reduce(norm)
    mine.grad *= min(1.0, 1.0 / (norm.item() + 1e-6))
    optimizer.step()
    parts = [torch.empty(size) for _ in range(world)]
    dist.all_gather(parts, mine.detach())
    torch.nn.utils.vector_to_parameters(torch.cat(parts), model.parameters())
dist.destroy_process_group()
