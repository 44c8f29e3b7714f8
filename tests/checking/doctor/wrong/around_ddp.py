"""The forward pass goes to model.module, past DDP, which therefore never averages the gradients."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class AutoEncoder(nn.Module):
    def __init__(self, width=20, code=4):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(width, 12), nn.ReLU(), nn.Linear(12, code))
        self.decoder = nn.Sequential(nn.Linear(code, 12), nn.ReLU(), nn.Linear(12, width))

    def reconstruction_loss(self, x):
        return F.mse_loss(self.decoder(self.encoder(x)), x)

    def forward(self, x):
        return self.reconstruction_loss(x)


def stream(rank, world, batch):
    generator = torch.Generator().manual_seed(77)
    while True:
        x = torch.randn(batch, 20, generator=generator).cumsum(1)
        yield x[rank::world] / 4


def main(batch, steps, lr):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(9)
    model = DDP(AutoEncoder())
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    data = stream(rank, world, batch)
    history = []
    for step in range(steps):
        optimizer.zero_grad(set_to_none=True)
        loss = model.module.reconstruction_loss(next(data))
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        history.append(mean.item() / world)
        if rank == 0:
            print(f"{step:4d}  {history[-1]:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("-b", "--batch", type=int, default=16)
    parser.add_argument("-s", "--steps", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-3)
    main(**vars(parser.parse_args()))
