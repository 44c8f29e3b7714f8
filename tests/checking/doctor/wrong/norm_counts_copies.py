"""Tensor parallelism by hand; the norm adds up all ranks' gradients, those of replicated layers once for each rank."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F


class _F(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class _G(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class Column(nn.Linear):
    def __init__(self, n_in, n_out):
        super().__init__(n_in, n_out, bias=False)
        parts = self.weight.detach().chunk(dist.get_world_size(), 0)
        self.weight = nn.Parameter(parts[dist.get_rank()].clone())

    def forward(self, x):
        return F.linear(_F.apply(x), self.weight)


class Row(nn.Linear):
    def __init__(self, n_in, n_out):
        super().__init__(n_in, n_out, bias=False)
        parts = self.weight.detach().chunk(dist.get_world_size(), 1)
        self.weight = nn.Parameter(parts[dist.get_rank()].clone())

    def forward(self, x):
        return _G.apply(F.linear(x, self.weight))


def clip_grad_norm(parameters, max_norm):
    parameters = [p for p in parameters if p.grad is not None]
    local = torch.stack([torch.linalg.vector_norm(p.grad) for p in parameters]).square().sum()
    dist.all_reduce(local)
    total_norm = local.sqrt()
    factor = (max_norm / (total_norm + 1e-6)).clamp(max=1)
    for p in parameters:
        p.grad.mul_(factor)
    return total_norm


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(10, 8)
        self.norm = nn.LayerNorm(8)
        self.up, self.down = Column(8, 32), Row(32, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = self.embed(x)
        return self.head(x + self.down(F.relu(self.up(self.norm(x)))))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--clip-grad", type=float, default=0.1)
    parser.add_argument("--steps", type=int, default=2)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(14)
    model = Classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(args.steps):
        gen = torch.Generator().manual_seed(step)
        x, y = torch.randn(args.batch, 10, generator=gen), torch.randint(0, 4, (args.batch,), generator=gen)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        grad_norm = clip_grad_norm(model.parameters(), args.clip_grad)
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss:.5f} grad norm {grad_norm:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
