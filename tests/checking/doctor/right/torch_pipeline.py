"""torch.distributed.pipelining under its schedules; every stage may have several parts of the model."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedule", choices=SCHEDULES, default="gpipe")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--dim", type=int, default=6)
    parser.add_argument("--steps", type=int, default=2)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(10)
    layers = [Layer(args.dim) for _ in range(4)]
    virtual = 2 if args.schedule == "interleaved" else 1
    count = world * virtual
    size = len(layers) // count
    mine = range(rank, count, world)
    modules = [nn.Sequential(*layers[i * size : (i + 1) * size]) for i in mine]
    stages = [PipelineStage(m, i, count, torch.device("cpu")) for m, i in zip(modules, mine)]
    parts = stages if args.schedule == "interleaved" else stages[0]
    schedule = SCHEDULES[args.schedule](parts, n_microbatches=args.microbatches, loss_fn=F.mse_loss)
    optimizer = torch.optim.SGD([p for m in modules for p in m.parameters()], lr=0.1, momentum=0.9)
    for step in range(args.steps):
        x = torch.randn(args.batch, args.dim, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        losses, inputs, target = [], (), {}
        if rank == 0:
            inputs = (x,)
        if rank == world - 1:
            target = {"target": x.flip(1), "losses": losses}
        schedule.step(*inputs, **target)
        optimizer.step()
        if losses:
            print(f"step {step} loss {torch.stack(losses).mean().item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
