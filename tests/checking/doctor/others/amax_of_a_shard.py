"""A quantised weight is scaled by the largest number of each rank's shard."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tests.checking.doctor.regions import Copy, Reduce

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)


def quantised(w):
    """To 4 bits, with one scale for the whole tensor; gradients pass straight through."""
    amax = w.detach().abs().max()
    q = (w.detach() / amax * 7).round() * amax / 7
    return w + (q - w).detach()


class Mlp(nn.Module):
    def __init__(self, d=6, f=16):
        super().__init__()
        self.up = nn.Parameter((torch.randn(d, f) * 0.3).chunk(world, 1)[rank].clone())
        self.down = nn.Parameter((torch.randn(f, d) * 0.3).chunk(world)[rank].clone())

    def forward(self, x):
        return Reduce.apply((Copy.apply(x) @ quantised(self.up)).tanh() @ quantised(self.down))


model = Mlp()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
draw = torch.Generator().manual_seed(1)
for _ in range(3):
    x, y = torch.randn(8, 6, generator=draw), torch.randn(8, 6, generator=draw)
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()
dist.destroy_process_group()
