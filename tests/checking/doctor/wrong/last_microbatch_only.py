"""DDP with gradient accumulation; the gradients are zeroed at each microbatch, so only the last one counts."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Trainer:
    def __init__(self, model, optimizer, accumulation_steps):
        self.model, self.optimizer = model, optimizer
        self.accumulation_steps = accumulation_steps
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    def forward_backward(self, x, y):
        self.optimizer.zero_grad()
        prediction = self.model(x)
        loss = nn.functional.smooth_l1_loss(prediction, y) / self.accumulation_steps
        loss.backward()
        return loss.detach()

    def train_step(self, x, y):
        micro_xs = x.chunk(self.accumulation_steps)
        micro_ys = y.chunk(self.accumulation_steps)
        total = torch.zeros(())
        for i, (micro_x, micro_y) in enumerate(zip(micro_xs, micro_ys)):
            if i + 1 < self.accumulation_steps:
                with self.model.no_sync():
                    total += self.forward_backward(micro_x, micro_y)
            else:
                total += self.forward_backward(micro_x, micro_y)
        self.optimizer.step()
        dist.all_reduce(total, op=dist.ReduceOp.AVG)
        return total.item()


def build(width=18):
    torch.manual_seed(8)
    return nn.Sequential(nn.Linear(6, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 2))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--accumulation-steps", type=int, default=4)
    parser.add_argument("--num-steps", type=int, default=3)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    model = DistributedDataParallel(build())
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), args.accumulation_steps)
    for step in range(args.num_steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(32, 6, generator=generator)
        y = torch.stack([x.sum(1), x.prod(1)], dim=1)
        share = slice(trainer.rank * 32 // trainer.world_size, (trainer.rank + 1) * 32 // trainer.world_size)
        loss = trainer.train_step(x[share], y[share])
        if trainer.rank == 0:
            print(f"step {step}: loss {loss:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
