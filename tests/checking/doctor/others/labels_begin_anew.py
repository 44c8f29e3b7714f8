"""class of reports on contrastive losses under data parallelism

Samples are compared with those of the whole batch, and their labels begin at 0 on each rank.
"""

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import nn
from torch.nn import functional as F

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(6, 8), nn.Linear(5, 8)

    def forward(self, a, b):
        return F.normalize(self.image(a), dim=-1), F.normalize(self.text(b), dim=-1)


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
draw = torch.Generator().manual_seed(1)
for _ in range(3):
    images, texts = torch.randn(16, 6, generator=draw), torch.randn(16, 5, generator=draw)
    optimizer.zero_grad()
    a, b = model(images.chunk(world)[rank], texts.chunk(world)[rank])
    all_a, all_b = (torch.cat(dist.nn.functional.all_gather(z)) for z in (a, b))
    first = 0
    labels = torch.arange(len(a)) + first
    loss = F.cross_entropy(10 * a @ all_b.T, labels)
    loss = (loss + F.cross_entropy(10 * b @ all_a.T, labels)) / 2
    loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world
    optimizer.step()
dist.destroy_process_group()
