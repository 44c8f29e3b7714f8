"""A script without tplab: DTensor and tensor parallelism (functional collectives)."""
# pyright: reportOptionalMemberAccess=false, reportAttributeAccessIssue=false

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
torch.manual_seed(2)
model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 4))
parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
loss = model(x).square().mean()
loss.backward()
rows = distribute_tensor(torch.arange(12.0).reshape(4, 3), mesh, [Shard(0)])
columns = rows.redistribute(mesh, [Shard(1)])
whole = columns.redistribute(mesh, [Replicate()])

RESULT = [loss.detach(), whole.to_local(), *(parameter.grad.full_tensor() for parameter in model.parameters())]
dist.destroy_process_group()
