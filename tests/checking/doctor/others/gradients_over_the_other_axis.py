"""class of "wrong process group" reports (neighbours: NVIDIA-NeMo/Automodel#1260, Megatron-LM#7452)

Gradients are averaged over the tensor-parallel group instead of the data-parallel one.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=mesh.get_group("tp"))
        return grad


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x, group=mesh.get_group("tp"))
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class Mlp(nn.Module):
    def __init__(self, d=8, f=16):
        super().__init__()
        self.up, self.down = nn.Linear(d, f, bias=False), nn.Linear(f, d, bias=False)
        self.up.weight = nn.Parameter(self.up.weight.detach().chunk(tp, 0)[t].clone())
        self.down.weight = nn.Parameter(self.down.weight.detach().chunk(tp, 1)[t].clone())
        self.bias = nn.Parameter(torch.zeros(d))

    def forward(self, x):
        return Sum.apply(self.down(self.up(Copy.apply(x)).tanh())) + self.bias


dist.init_process_group("gloo")
world = dist.get_world_size()
tp = min(2, world)
mesh = init_device_mesh("cpu", (world // tp, tp), mesh_dim_names=("dp", "tp"))
d, t = mesh.get_local_rank("dp"), mesh.get_local_rank("tp")
torch.manual_seed(0)
model = Mlp()
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
draw = torch.Generator().manual_seed(1)
for _ in range(3):
    x, y = torch.randn(16, 8, generator=draw), torch.randn(16, 8, generator=draw)
    loss = (model(x.chunk(world // tp)[d]) - y.chunk(world // tp)[d]).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    group = mesh.get_group("tp")
    for p in model.parameters():
        dist.all_reduce(p.grad, group=group)
        p.grad /= dist.get_world_size(group)
    optimizer.step()
dist.destroy_process_group()
