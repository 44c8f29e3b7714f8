"""Autocast to bfloat16, a gradient scaler, a frozen layer, and an optimizer for each of the other two."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(4)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
    net[0].requires_grad_(False)
    optimizers = [
        torch.optim.AdamW(net[2].parameters(), lr=1e-3),
        torch.optim.SGD(net[4].parameters(), lr=0.1, momentum=0.9),
    ]
    model = DistributedDataParallel(net)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        x, y = torch.randn(32, 8, generator=generator), torch.randint(0, 3, (32,), generator=generator)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x[rank::world]), y[rank::world])
        for optimizer in optimizers:
            optimizer.zero_grad()
        scaler.scale(loss).backward()
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_([p for p in net.parameters() if p.grad is not None], 0.1)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0:
            print(f"loss {total.item() / world:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
