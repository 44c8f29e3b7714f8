"""torch's GPipe schedule scales gradients by the number of microbatches, and the loss function does it too."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(dim), nn.Linear(dim, dim)

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))


def whole_model(layers, dim):
    torch.manual_seed(10)
    return [Layer(dim) for _ in range(layers)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dim", type=int, default=6)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    per_stage = args.layers // world
    module = nn.Sequential(*whole_model(args.layers, args.dim)[rank * per_stage : (rank + 1) * per_stage])
    stage = PipelineStage(module, rank, world, torch.device("cpu"))

    def loss_fn(output, target):
        return F.mse_loss(output, target) / args.microbatches

    schedule = ScheduleGPipe(stage, n_microbatches=args.microbatches, loss_fn=loss_fn)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(args.steps):
        x = torch.randn(args.batch, args.dim, generator=torch.Generator().manual_seed(step))
        target = x.flip(1)
        optimizer.zero_grad()
        losses = []
        if world == 1:
            schedule.step(x, target=target, losses=losses)
        elif rank == 0:
            schedule.step(x)
        elif rank == world - 1:
            schedule.step(target=target, losses=losses)
        else:
            schedule.step()
        optimizer.step()
        if losses:
            print(f"step {step} loss {torch.stack(losses).sum().item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
