"""Collectives over the groups of a DeviceMesh with named dims."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
x = torch.arange(6.0) + dist.get_rank()
dist.all_reduce(x, group=mesh.get_group("dp"))
y = torch.empty(12)
dist.all_gather_into_tensor(y, x, group=mesh.get_group("tp"))
dist.all_reduce(y)
dist.destroy_process_group()
