"""DDP with broadcast_buffers=False and a running mean in the model, which drifts apart on the ranks."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class RunningCentre(nn.Module):
    """Follows the mean of its inputs; used to centre them when the model is evaluated."""

    def __init__(self, features, momentum=0.2):
        super().__init__()
        self.momentum = momentum
        self.register_buffer("centre", torch.zeros(features))
        self.register_buffer("num_batches", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        if not self.training:
            return x - self.centre
        with torch.no_grad():
            self.centre.lerp_(x.mean(0), self.momentum)
            self.num_batches += 1
        return x


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.inputs = RunningCentre(6)
        self.body = nn.Sequential(nn.Linear(6, 16), nn.ELU(), nn.Linear(16, 1))

    def forward(self, x):
        return self.body(self.inputs(x))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    x = torch.randn(96, 6) + 1
    dataset = TensorDataset(x, x.abs().sum(1, keepdim=True))
    sampler = DistributedSampler(dataset, shuffle=False)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)
    model = DDP(Regressor(), broadcast_buffers=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step, (features, target) in enumerate(loader):
        if step >= args.steps:
            break
        loss = nn.functional.mse_loss(model(features), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rank == 0:
        torch.save(model.module.state_dict(), "/dev/null")
        print("saved the model after", args.steps, "steps")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
