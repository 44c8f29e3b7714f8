"""A training script as people write them for torchrun. It knows nothing of tplab."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WIDTH, BATCH = 1024, 2048

dist.init_process_group()
torch.manual_seed(dist.get_rank())
layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)]
model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

for _ in range(2):
    x = torch.randn(BATCH, WIDTH)
    loss = (model(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
