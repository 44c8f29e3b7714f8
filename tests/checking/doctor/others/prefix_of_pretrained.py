"""class of "module." prefix reports with strict=False (no one thread)

Pretrained weights are loaded with strict=False after the model was wrapped in DDP: all keys miss their prefix
"module.", and nothing is loaded.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def build(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
pretrained = build(7).state_dict()
model = build(0)
if world > 1:
    model = DistributedDataParallel(model)
model.load_state_dict(pretrained, strict=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
draw = torch.Generator().manual_seed(1)
for _ in range(3):
    x, y = torch.randn(16, 6, generator=draw), torch.randint(3, (16,), generator=draw)
    loss = nn.functional.cross_entropy(model(x.chunk(world)[rank]), y.chunk(world)[rank])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
