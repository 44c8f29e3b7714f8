"""Two models and two optimizers that take turns, each under DDP; a frozen feature extractor; unused parameters."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 12), nn.ReLU(), nn.Linear(12, 5))
        self.extra = nn.Linear(5, 5)  # not used in training

    def forward(self, z):
        return self.net(z)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Linear(5, 8).requires_grad_(False)
        self.score = nn.Sequential(nn.LeakyReLU(0.1), nn.Linear(8, 8), nn.LeakyReLU(0.1), nn.Linear(8, 1))

    def forward(self, x):
        return self.score(self.features(x))


def report(step, rank, world, *losses):
    means = torch.stack([loss.detach() for loss in losses]) / world
    dist.all_reduce(means)
    if rank == 0:
        print(f"step {step} loss_d {means[0].item():.5f} loss_g {means[1].item():.5f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(15)
    generator = DDP(Generator(), find_unused_parameters=True)
    discriminator = DDP(Discriminator(), broadcast_buffers=False)
    opt_g = torch.optim.SGD(generator.parameters(), lr=0.1)
    opt_d = torch.optim.SGD([p for p in discriminator.parameters() if p.requires_grad], lr=0.1)
    bce = nn.BCEWithLogitsLoss()
    for step in range(args.steps):
        g = torch.Generator().manual_seed(step)
        real, z = torch.randn(args.batch, 5, generator=g) + 1, torch.randn(args.batch, 3, generator=g)
        real, z = real[rank::world], z[rank::world]
        with torch.no_grad():
            fake = generator.module(z)
        scores = discriminator(torch.cat([real, fake]))
        loss_d = bce(scores, torch.cat([torch.ones(len(real), 1), torch.zeros(len(fake), 1)]))
        opt_d.zero_grad()
        loss_d.backward()
        opt_d.step()
        for p in discriminator.parameters():
            p.requires_grad_(False)
        loss_g = bce(discriminator.module(generator(z)), torch.ones(len(z), 1))
        opt_g.zero_grad()
        loss_g.backward()
        opt_g.step()
        for p in discriminator.module.score.parameters():
            p.requires_grad_(True)
        report(step, rank, world, loss_d, loss_g)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
