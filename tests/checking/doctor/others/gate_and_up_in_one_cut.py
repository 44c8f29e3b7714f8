"""Gate and up are one matrix, which is cut in one piece: rank 0 has all of the gate, and rank 1 all of up."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from tests.checking.doctor.regions import Copy, Reduce

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1234)


class MLP(nn.Module):
    def __init__(self, d, f):
        super().__init__()
        gate_up, down = torch.randn(2 * f, d) / d**0.5, torch.randn(d, f) / f**0.5
        self.gate_up = nn.Parameter(gate_up.chunk(world)[rank].clone())
        self.down = nn.Parameter(down.chunk(world, 1)[rank].clone())

    def forward(self, x):
        gate, up = F.linear(Copy.apply(x), self.gate_up).chunk(2, -1)
        return x + Reduce.apply(F.linear(F.silu(gate) * up, self.down))


model = nn.Sequential(nn.Embedding(13, 8), MLP(8, 12), nn.Linear(8, 13))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
draw = torch.Generator().manual_seed(5)
for _ in range(3):
    tokens = torch.randint(13, (3, 7), generator=draw)
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
