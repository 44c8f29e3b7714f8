"""Data parallelism by hand: gradients in flat buckets that start while backward goes on; dropout on each rank's own."""

import argparse

import torch
import torch.distributed as dist
from torch import nn


class Overlapped:
    """All-reduces each parameter's gradient as soon as it is accumulated."""

    def __init__(self, model):
        self.model, self.works = model, []
        for p in model.parameters():
            dist.broadcast(p.data, src=0)
            p.register_post_accumulate_grad_hook(self.start)

    def start(self, p):
        p.grad /= dist.get_world_size()
        self.works.append(dist.all_reduce(p.grad, async_op=True))

    def finish(self):
        for work in self.works:
            work.wait()
        self.works.clear()


def flat_average(model):
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    at = 0
    for p in model.parameters():
        p.grad.copy_(flat[at : at + p.numel()].view_as(p))
        at += p.numel()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)  # the weights of rank 0 count
    model = nn.Sequential(nn.Linear(6, 15), nn.ReLU(), nn.Linear(15, 2))
    ddp = Overlapped(model)
    if not args.overlap:
        ddp.start = lambda p: None
        for p in model.parameters():
            p._post_accumulate_grad_hooks.clear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    for step in range(args.steps):
        g = torch.Generator().manual_seed(step)
        x, y = torch.randn(args.batch, 6, generator=g), torch.randint(0, 2, (args.batch,), generator=g)
        loss = nn.functional.cross_entropy(model(x[rank::world]), y[rank::world])
        optimizer.zero_grad()
        loss.backward()
        ddp.finish() if args.overlap else flat_average(model)
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step} loss {mean.item() / world:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
