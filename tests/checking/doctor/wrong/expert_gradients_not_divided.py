"""Experts spread over data-parallel ranks by all-to-all; dense gradients are averaged, the experts' stay sums."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, send, receive):
        ctx.send, ctx.receive = send, receive
        out = x.new_empty(sum(receive), x.shape[1])
        dist.all_to_all_single(out, x.contiguous(), receive, send)
        return out

    @staticmethod
    def backward(ctx, grad):
        out = grad.new_empty(sum(ctx.send), grad.shape[1])
        dist.all_to_all_single(out, grad.contiguous(), ctx.send, ctx.receive)
        return out, None, None


class MoE(nn.Module):
    def __init__(self, dim, num_experts):
        super().__init__()
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.local = num_experts // self.world
        self.num_experts = num_experts
        self.router = nn.Linear(dim, num_experts)
        experts = [
            nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim)) for _ in range(num_experts)
        ]
        self.experts = nn.ModuleList(experts[self.rank * self.local : (self.rank + 1) * self.local])

    def forward(self, x):
        weight, chosen = self.router(x).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=self.num_experts)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        send = counts.view(self.world, self.local).sum(1).tolist()
        receive = theirs.view(self.world, self.local).sum(1).tolist()
        tokens = AllToAll.apply(x[order], send, receive)
        which = torch.arange(self.local).repeat(self.world).repeat_interleave(theirs)
        out = torch.zeros_like(tokens)
        for i, expert in enumerate(self.experts):
            at = (which == i).nonzero().squeeze(1)
            out = out.index_add(0, at, expert(tokens[at]))
        back = AllToAll.apply(out, receive, send)
        return x + weight[:, None] * torch.zeros_like(back).index_copy(0, order, back)


class Model(nn.Module):
    def __init__(self, dim=6):
        super().__init__()
        self.stem, self.moe, self.head = nn.Linear(4, dim), MoE(dim, 4), nn.Linear(dim, 3)

    def forward(self, x):
        return self.head(self.moe(torch.tanh(self.stem(x))))


def reduce_gradients(model):
    for name, p in model.named_parameters():
        if "experts" in name:
            continue  # no other rank has this expert
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=48, help="of all ranks")
    parser.add_argument("--steps", type=int, default=2)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(20)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(args.steps):
        g = torch.Generator().manual_seed(step)
        x = torch.randn(args.tokens, 4, generator=g)
        y = x.abs().argmax(1) % 3
        x, y = x[rank::world], y[rank::world]
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        reduce_gradients(model)
        optimizer.step()
        if rank == 0:
            print(f"step {step}/{args.steps}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
