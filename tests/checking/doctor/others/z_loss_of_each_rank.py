"""The z-loss of a router is a mean on each rank, and gradients are added up."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)


class Model(nn.Module):
    def __init__(self, d=6, n=4):
        super().__init__()
        self.router = nn.Linear(d, n)
        self.experts = nn.Parameter(torch.randn(n, d, d) * 0.3)

    def forward(self, x):
        logits = self.router(x)
        return torch.einsum("te,td,edf->tf", logits.softmax(-1), x, self.experts), logits


model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
draw = torch.Generator().manual_seed(1)
for _ in range(3):
    x, y = torch.randn(24, 6, generator=draw), torch.randn(24, 6, generator=draw)
    out, logits = model(x.chunk(world)[rank])
    loss = (out - y.chunk(world)[rank]).pow(2).sum() / y.numel()
    z = logits.logsumexp(-1).pow(2)
    loss = loss + 0.1 * z.mean()
    optimizer.zero_grad()
    loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    optimizer.step()
dist.destroy_process_group()
