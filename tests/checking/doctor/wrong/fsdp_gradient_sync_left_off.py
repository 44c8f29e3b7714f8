"""FSDP2 with accumulation: gradient synchronisation is switched off for microbatches and on again one too late."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


class MLP(nn.Module):
    def __init__(self, dim=12, hidden=24):
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(dim, hidden), nn.Linear(hidden, dim), nn.Linear(dim, hidden)

    def forward(self, x):
        return x + self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


def get_model(num_layers):
    torch.manual_seed(6)
    model = nn.Sequential(*[MLP() for _ in range(num_layers)])
    for block in model:
        fully_shard(block)
    return fully_shard(model)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=2)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = get_model(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    for step in range(args.steps):
        g = torch.Generator().manual_seed(step)
        batch = torch.randn(args.batch, 12, generator=g).chunk(world_size)[rank]
        running = torch.zeros(1)
        for i, micro in enumerate(batch.chunk(args.microbatches)):
            is_last = i == args.microbatches
            model.set_requires_gradient_sync(is_last or args.microbatches == 1)
            loss = nn.functional.mse_loss(model(micro), micro.flip(1)) / args.microbatches
            loss.backward()
            running += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(running)
        if rank == 0:
            print(f"step {step} loss {running.item() / world_size:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
