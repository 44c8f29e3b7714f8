"""Experts spread over ranks, with copies; each parameter's gradient is summed over the ranks that hold it."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        return _reduce_scatter(grad, ctx.group), None


class Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return _reduce_scatter(x, group)

    @staticmethod
    def backward(ctx, grad):
        parts = [torch.empty_like(grad) for _ in range(dist.get_world_size(ctx.group))]
        dist.all_gather(parts, grad.contiguous(), group=ctx.group)
        return torch.cat(parts), None


def _reduce_scatter(x, group):
    parts = [p.contiguous() for p in x.chunk(dist.get_world_size(group))]
    out = torch.empty_like(parts[0])
    dist.reduce_scatter(out, parts, group=group)
    return out


class MoE(nn.Module):
    def __init__(self, dim, mesh):
        super().__init__()
        self.group, self.size, self.index = mesh.get_group("ep"), mesh.size(1), mesh.get_local_rank("ep")
        self.router = nn.Linear(dim, 4)
        self.experts = nn.Parameter((torch.randn(4, dim, dim) / dim**0.5).chunk(self.size)[self.index].clone())

    def forward(self, x):
        probabilities = self.router(x).softmax(-1)
        chosen = probabilities.topk(2, dim=-1)
        gates = torch.zeros_like(probabilities).scatter(1, chosen.indices, chosen.values)
        tokens, gates = Gather.apply(x, self.group), Gather.apply(gates, self.group)
        mine = gates.chunk(self.size, dim=1)[self.index]
        return Combine.apply(torch.einsum("td,edf,te->tf", tokens, self.experts, mine), self.group)


class Model(nn.Module):
    def __init__(self, mesh, dim=6):
        super().__init__()
        self.inputs, self.moe, self.outputs = nn.Linear(3, dim), MoE(dim, mesh), nn.Linear(dim, 2)

    def forward(self, x):
        x = torch.tanh(self.inputs(x))
        return self.outputs(x + self.moe(x))


def clip_apart(model, group):
    """The experts by the norm of all experts, and the rest by its own."""
    experts = model.moe.experts
    others = [p for p in model.parameters() if p is not experts]
    square = experts.grad.square().sum()
    dist.all_reduce(square, group=group)
    for parameters, norm in (([experts], square.sqrt()), (others, nn.utils.get_total_norm([p.grad for p in others]))):
        nn.utils.clip_grads_with_norm_(parameters, 0.01, norm)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ep", type=int, default=2)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--clip-apart", action="store_true")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    ep = min(args.ep, world)
    mesh = init_device_mesh("cpu", (world // ep, ep), mesh_dim_names=("edp", "ep"))
    torch.manual_seed(9)
    model = Model(mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(args.steps):
        x = torch.randn(args.batch, 3, generator=torch.Generator().manual_seed(step))
        y = (x.prod(1) > 0).long()
        loss = nn.functional.cross_entropy(model(x.chunk(world)[rank]), y.chunk(world)[rank])
        optimizer.zero_grad()
        loss.backward()
        for name, p in model.named_parameters():
            dist.all_reduce(p.grad, group=mesh.get_group("edp") if "experts" in name else None)
            p.grad /= world
        if args.clip_apart:
            clip_apart(model, mesh.get_group("ep"))
        optimizer.step()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step} loss {mean.item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
