"""DTensor tensor parallelism; the replicated residual is taken out with to_local, its gradient meant as partial."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor


class LowRank(nn.Module):
    """Adapters: x A B, with A split by columns and B by rows."""

    def __init__(self, dim, rank_of_adapter, mesh):
        super().__init__()
        self.mesh = mesh
        a, b = torch.randn(dim, rank_of_adapter) / 3, torch.randn(rank_of_adapter, dim) / 3
        self.a = nn.Parameter(distribute_tensor(a, mesh, [Shard(1)]))
        self.b = nn.Parameter(distribute_tensor(b, mesh, [Shard(0)]))

    def forward(self, x):
        local = x.to_local()
        h = torch.tanh(local @ self.a.to_local())
        y = DTensor.from_local(h @ self.b.to_local(), self.mesh, [Partial()])
        return y.redistribute(placements=[Replicate()])


class Net(nn.Module):
    def __init__(self, mesh, dim=8):
        super().__init__()
        self.mesh = mesh
        self.stem = nn.Parameter(distribute_tensor(torch.randn(dim, dim) / 3, mesh, [Replicate()]))
        self.adapters = nn.ModuleList(LowRank(dim, 4, mesh) for _ in range(2))
        self.gain = nn.Parameter(distribute_tensor(torch.ones(dim), mesh, [Replicate()]))

    def forward(self, x):
        x = DTensor.from_local(x, self.mesh, [Replicate()]) @ self.stem
        for adapter in self.adapters:
            x = x + adapter(x * self.gain)
        return x


def train(args):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(4)
    model = Net(mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(args.steps):
        x = torch.randn(args.batch, 8, generator=torch.Generator().manual_seed(step))
        y = model(x).to_local()
        loss = F.mse_loss(y, x.roll(1, 1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step:2d} loss {loss.item():.6f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--batch", type=int, default=6)
    dist.init_process_group("gloo")
    train(parser.parse_args())
    dist.destroy_process_group()
