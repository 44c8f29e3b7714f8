"""FSDP2 with hand-written clipping: every rank clips by the norm of its own shards."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


def clip_by_norm(parameters, max_norm):
    """Scale gradients so that their norm is at most `max_norm`."""
    grads = [p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for p in parameters if p.grad is not None]
    total_norm = torch.sqrt(sum((g.float() ** 2).sum() for g in grads))
    scale = (max_norm / (total_norm + 1e-6)).clamp(max=1.0)
    for grad in grads:
        grad.mul_(scale)
    return total_norm


class Net(nn.Module):
    def __init__(self, features=16, classes=7):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(features, features) for _ in range(3))
        self.head = nn.Linear(features, classes)

    def forward(self, x):
        for block in self.blocks:
            x = x + torch.relu(block(x))
        return self.head(x)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-norm", type=float, default=0.3)
    parser.add_argument("--batch", type=int, default=24)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(13)
    model = Net()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    for step in range(args.steps):
        g = torch.Generator().manual_seed(50 + step)
        x = torch.randn(args.batch, 16, generator=g)
        y = x[:, :7].argmax(1)
        x, y = x.chunk(size)[rank], y.chunk(size)[rank]
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        norm = clip_by_norm(model.parameters(), args.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step} grad_norm {norm.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
