"""DDP training that is right; the log shows the loss of rank 0's samples as the loss of the step."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class AverageMeter:
    def __init__(self):
        self.sum, self.count = 0.0, 0

    def update(self, value):
        self.sum += value
        self.count += 1

    @property
    def average(self):
        return self.sum / self.count


class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(9, 16), nn.ReLU(), nn.Linear(16, 5))

    def forward(self, a, b):
        return (self.embed(a) - self.embed(b)).pow(2).sum(1)


def pairs(n=120):
    torch.manual_seed(5)
    a, b = torch.randn(n, 9), torch.randn(n, 9)
    return TensorDataset(a, b, (a[:, 0] * b[:, 0] > 0).float())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=6)
    parser.add_argument("--margin", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    data = pairs()
    loader = DataLoader(data, args.batch_size, sampler=DistributedSampler(data, shuffle=False))
    model = DDP(Siamese())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, nesterov=True, momentum=0.9)
    meter = AverageMeter()
    for step, (a, b, same) in enumerate(loader):
        if step == args.steps:
            break
        distance = model(a, b)
        loss = (same * distance + (1 - same) * F.relu(args.margin - distance)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        meter.update(loss.item())
        if dist.get_rank() == 0:
            print(f"step {step + 1}/{args.steps}  loss {loss.item():.6f}  (average {meter.average:.6f})")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
