"""DDP with the linear scaling rule applied although the global batch is the same as on one device."""

import argparse
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP


@dataclass
class Config:
    global_batch_size: int = 16
    base_lr: float = 0.01
    num_steps: int = 3


def parse_config() -> Config:
    parser = argparse.ArgumentParser()
    for name, value in vars(Config()).items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    return Config(**vars(parser.parse_args()))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(5, 12)
        self.norm = nn.LayerNorm(12)
        self.out = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.normalize(self.out(torch.relu(self.norm(self.proj(x)))), dim=-1)


def similarity_loss(a: Tensor, b: Tensor) -> Tensor:
    return (1 - (a * b).sum(-1)).mean()


def main() -> None:
    config = parse_config()
    dist.init_process_group("gloo")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    model = DDP(Encoder())
    optimizer = torch.optim.SGD(model.parameters(), lr=config.base_lr * world_size)
    for step in range(config.num_steps):
        generator = torch.Generator().manual_seed(step)
        views = torch.randn(2, config.global_batch_size, 5, generator=generator)
        mine = views[:, rank::world_size]
        loss = similarity_loss(model(mine[0]), model(mine[1]).detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach() / world_size
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step={step} loss={mean:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
