"""Four ranks, experts in pairs: expert gradients are averaged over the expert-parallel group, where experts differ."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh


class GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        parts = [p.contiguous() for p in grad.chunk(dist.get_world_size(ctx.group))]
        out = torch.empty_like(parts[0])
        dist.reduce_scatter(out, parts, group=ctx.group)
        return out, None


class CombineTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [p.contiguous() for p in x.chunk(dist.get_world_size(group))]
        out = torch.empty_like(parts[0])
        dist.reduce_scatter(out, parts, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        parts = [torch.empty_like(grad) for _ in range(dist.get_world_size(ctx.group))]
        dist.all_gather(parts, grad.contiguous(), group=ctx.group)
        return torch.cat(parts), None


class MixtureOfExperts(nn.Module):
    def __init__(self, dim, mesh):
        super().__init__()
        self.group = mesh.get_group("ep")
        self.size, self.index = mesh.size(1), mesh.get_local_rank("ep")
        self.gate = nn.Linear(dim, 4, bias=False)
        whole = torch.randn(4, dim, dim) / dim**0.5
        self.experts = nn.Parameter(whole.chunk(self.size)[self.index].clone())

    def forward(self, x):
        gates = self.gate(x).softmax(-1)
        tokens, gates = GatherTokens.apply(x, self.group), GatherTokens.apply(gates, self.group)
        mine = gates.chunk(self.size, dim=1)[self.index]
        y = torch.einsum("td,edf,te->tf", tokens, self.experts, mine)
        return CombineTokens.apply(y, self.group)


class Model(nn.Module):
    def __init__(self, mesh, dim=6):
        super().__init__()
        self.inputs, self.moe, self.outputs = nn.Linear(3, dim), MixtureOfExperts(dim, mesh), nn.Linear(dim, 1)

    def forward(self, x):
        x = torch.tanh(self.inputs(x))
        return self.outputs(x + self.moe(x))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--expert-parallel", type=int, default=2)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=2)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    ep = min(args.expert_parallel, world)
    mesh = init_device_mesh("cpu", (world // ep, ep), mesh_dim_names=("edp", "ep"))
    torch.manual_seed(9)
    model = Model(mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(args.steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(args.batch, 3, generator=generator)
        y = x.prod(1, keepdim=True)
        loss = nn.functional.mse_loss(model(x.chunk(world)[rank]), y.chunk(world)[rank])
        optimizer.zero_grad()
        loss.backward()
        for name, p in model.named_parameters():
            group = mesh.get_group("ep") if "experts" in name else None
            dist.all_reduce(p.grad, group=group)
            p.grad /= world
        optimizer.step()
        if rank == 0:
            print("step", step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
