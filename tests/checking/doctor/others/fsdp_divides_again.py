"""pytorch/torchtitan (loss normalised by the global number of tokens while FSDP averages), pytorch/pytorch#155903

The loss is a sum divided by the number of valid tokens of all ranks; FSDP divides by the number of ranks once more.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 11))
for layer in (model[1], model[3], model):
    fully_shard(layer, mesh=init_device_mesh("cpu", (world,)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
draw = torch.Generator().manual_seed(1)
for _ in range(3):
    tokens, labels = torch.randint(11, (2, 8, 6), generator=draw)
    labels[torch.arange(6) >= torch.randint(2, 7, (8, 1), generator=draw)] = -100
    tokens, labels = tokens.chunk(world)[rank], labels.chunk(world)[rank]
    valid = (labels != -100).sum()
    dist.all_reduce(valid)
    loss = cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum") / valid
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
