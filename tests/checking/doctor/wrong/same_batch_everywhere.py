"""DDP with a shuffling DataLoader and no DistributedSampler: all ranks draw the same samples."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset


class Sines(Dataset):
    def __init__(self, n=128):
        self.phase = torch.linspace(0, 6.28, n)
        self.t = torch.linspace(0, 1, 12)

    def __len__(self):
        return len(self.phase)

    def __getitem__(self, i):
        return torch.sin(6 * self.t + self.phase[i]), self.phase[i].cos()[None]


def get_loader(dataset, batch_size, seed):
    generator = torch.Generator()
    generator.manual_seed(seed)
    return DataLoader(dataset, batch_size=batch_size, shuffle=True, generator=generator, drop_last=True)


def train(rank, args):
    torch.manual_seed(args.seed)
    model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 1))
    model = DDP(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    loader = get_loader(Sines(), args.batch_size, args.seed)
    for epoch in range(args.epochs):
        for step, (x, y) in enumerate(loader):
            if step == args.max_steps:
                break
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            if rank == 0 and step % args.log_interval == 0:
                print(f"Train epoch {epoch} [{step * args.batch_size}/{len(loader.dataset)}]")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--max-steps", type=int, default=3)
    parser.add_argument("--log-interval", type=int, default=1)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    try:
        train(dist.get_rank(), args)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
