"""Logits of a router are cut over ranks; those of other ranks' experts are gathered without their gradient."""

import torch
import torch.distributed as dist
from torch import nn

from tests.checking.doctor.regions import Copy, Reduce

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)


class Moe(nn.Module):
    def __init__(self, d=8, f=8, n=4):
        super().__init__()
        self.router = nn.Parameter(torch.randn(n, d).chunk(world)[rank].clone())
        self.up = nn.Parameter((torch.randn(n, d, f) * 0.3).chunk(world)[rank].clone())
        self.down = nn.Parameter((torch.randn(n, f, d) * 0.3).chunk(world)[rank].clone())

    def forward(self, x):
        x = Copy.apply(x)
        own = x @ self.router.T
        parts = [torch.empty_like(own) for _ in range(world)]
        dist.all_gather(parts, own.detach().contiguous())
        parts[rank] = own
        gates = torch.cat(parts, -1).softmax(-1).chunk(world, -1)[rank]
        y = torch.einsum("tef,efd->ted", torch.einsum("td,edf->tef", x, self.up).relu(), self.down)
        return Reduce.apply((gates[..., None] * y).sum(1))


model = Moe()
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
draw = torch.Generator().manual_seed(1)
for _ in range(3):
    x, y = torch.randn(8, 8, generator=draw), torch.randn(8, 8, generator=draw)
    loss = (model(x) - y).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
