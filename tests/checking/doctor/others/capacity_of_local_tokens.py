"""class of reports on capacities of experts under data parallelism

Each expert takes so many tokens of the batch, the first ones that choose it: counted on each rank alone.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.head = nn.Linear(6, 4, bias=False), nn.Linear(6, 4)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x):
        weight, choice = self.gate(x).softmax(-1).max(-1)
        chosen = F.one_hot(choice, 4)
        before = chosen.cumsum(0) - chosen
        capacity = len(x) // 4
        kept = ((before < capacity) & (chosen > 0)).any(-1)
        out = x
        for number, expert in enumerate(self.experts):
            out = out + (((choice == number) & kept) * weight)[:, None] * expert(x)
        return self.head(out)


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
draw = torch.Generator().manual_seed(1)
for _ in range(3):
    x, y = torch.randn(32, 6, generator=draw), torch.randint(4, (32,), generator=draw)
    optimizer.zero_grad()
    F.cross_entropy(model(x.chunk(world)[rank]), y.chunk(world)[rank]).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world
    optimizer.step()
dist.destroy_process_group()
