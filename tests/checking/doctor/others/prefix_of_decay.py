"""class of reports on parameter groups by name under DDP's prefix "module." (neighbour: verl-project/verl#5070)

Parameters without weight decay are picked by name; under DDP all names begin with "module.", so none is picked.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

NO_DECAY = {"0.bias", "2.bias"}


def groups(named):
    named = list(named)
    return [
        {"params": [p for n, p in named if n not in NO_DECAY], "weight_decay": 0.5},
        {"params": [p for n, p in named if n in NO_DECAY], "weight_decay": 0.0},
    ]


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
model = DistributedDataParallel(net) if world > 1 else net
optimizer = torch.optim.AdamW(groups(model.named_parameters()), lr=0.05, eps=1e-3)
draw = torch.Generator().manual_seed(1)
for _ in range(3):
    x, y = torch.randn(16, 6, generator=draw), torch.randint(3, (16,), generator=draw)
    loss = nn.functional.cross_entropy(model(x.chunk(world)[rank]), y.chunk(world)[rank])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
