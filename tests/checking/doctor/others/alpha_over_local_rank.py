"""LoRA's rank is cut over ranks, and alpha is divided by the part of it that a rank has."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tests.checking.doctor.regions import Copy, Reduce

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)


r, alpha = 8, 16


class Lora(nn.Module):
    def __init__(self, d=6):
        super().__init__()
        self.base = nn.Linear(d, d)
        self.base.requires_grad_(False)
        self.a = nn.Parameter((torch.randn(r, d) * 0.3).chunk(world)[rank].clone())
        self.b = nn.Parameter((torch.randn(d, r) * 0.3).chunk(world, 1)[rank].clone())

    def forward(self, x):
        scale = alpha / self.a.shape[0]
        return self.base(x) + Reduce.apply(Copy.apply(x) @ self.a.T @ self.b.T) * scale


model = Lora()
optimizer = torch.optim.SGD([model.a, model.b], lr=0.02)
draw = torch.Generator().manual_seed(1)
for _ in range(3):
    x, y = torch.randn(8, 6, generator=draw), torch.randn(8, 6, generator=draw)
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
