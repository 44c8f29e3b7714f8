"""Each rank's sampler shuffles by a seed with its rank in it, and takes its part of that order."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Sampler, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(5)


class Part(Sampler):
    def __iter__(self):
        draw = torch.Generator().manual_seed(7 + rank)
        yield from torch.randperm(32, generator=draw).tolist()[rank::world]


draw = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(32, 4, generator=draw), torch.randint(3, (32,), generator=draw))
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
for x, y in DataLoader(data, batch_size=8 // world, sampler=Part()):
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
