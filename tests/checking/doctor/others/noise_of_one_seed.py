"""DDPM with DDP. The noise of an image comes from a generator of its own, so that runs can be repeated."""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

T = 50


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Embedding(T, 6)
        self.down, self.up = nn.Conv2d(1, 6, 3, padding=1), nn.Conv2d(6, 1, 3, padding=1)

    def forward(self, x, t):
        return self.up(F.silu(self.down(x) + self.time(t)[:, :, None, None]))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(UNet())
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
    alphas = torch.cumprod(1 - torch.linspace(1e-3, 0.2, T), 0)
    images = torch.rand(32, 1, 5, 5, generator=torch.Generator().manual_seed(77))
    noise_gen = torch.Generator().manual_seed(123)
    per = 8 // world
    for step in range(4):
        x0 = images[step * 8 + rank * per : step * 8 + (rank + 1) * per]
        noise = torch.randn(x0.shape, generator=noise_gen)
        t = torch.randint(T, (len(x0),), generator=noise_gen)
        a = alphas[t].view(-1, 1, 1, 1)
        loss = F.mse_loss(model(a.sqrt() * x0 + (1 - a).sqrt() * noise, t), noise)
        opt.zero_grad()
        loss.backward()
        opt.step()


main()
