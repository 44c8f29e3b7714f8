"""Gradients travel in half precision: by DDP's own hook, or by hand in bfloat16; what is rounded is no fault."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel as DDP


def average_in_bfloat16(model):
    for p in model.parameters():
        low = (p.grad / dist.get_world_size()).bfloat16()
        dist.all_reduce(low)
        p.grad.copy_(low)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--by-hand", action="store_true")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    if not args.by_hand:
        model = DDP(model)
        model.register_comm_hook(dist.group.WORLD, fp16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(args.steps):
        x = torch.randn(args.batch, 8, generator=torch.Generator().manual_seed(step)).chunk(world)[rank]
        loss = nn.functional.mse_loss(model(x), x.roll(1, 1))
        optimizer.zero_grad()
        loss.backward()
        if args.by_hand:
            average_in_bfloat16(model)
        optimizer.step()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step} loss {mean.item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
