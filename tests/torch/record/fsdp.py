"""A script without tplab: FSDP2."""
# pyright: reportOptionalMemberAccess=false, reportAttributeAccessIssue=false

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 4))
for layer in (model[0], model[2], model[4]):
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
x = torch.randn(8, 6, generator=torch.Generator().manual_seed(dist.get_rank()))
for _ in range(2):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()

RESULT = [parameter.full_tensor() for parameter in model.parameters()]
dist.destroy_process_group()
