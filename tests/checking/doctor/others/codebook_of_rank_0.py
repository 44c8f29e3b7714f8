"""A codebook follows what each rank's own samples have chosen, and DDP broadcasts rank 0's."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)


class Quantiser(nn.Module):
    def __init__(self, k=4, d=6):
        super().__init__()
        self.encode, self.decode = nn.Linear(d, d), nn.Linear(d, d)
        self.register_buffer("codes", torch.randn(k, d))

    def forward(self, x):
        z = self.encode(x)
        chosen = F.one_hot(torch.cdist(z.detach(), self.codes).argmin(-1), len(self.codes)).float()
        quantised = chosen @ self.codes
        if self.training:
            with torch.no_grad():
                count, total = chosen.sum(0), chosen.T @ z
                mean = total / count.clamp(min=1)[:, None]
                self.codes = torch.where(count[:, None] > 0, self.codes.lerp(mean, 0.3), self.codes)
        return self.decode(z + (quantised - z).detach())


model = DDP(Quantiser())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
draw = torch.Generator().manual_seed(1)
for _ in range(3):
    x = torch.randn(16, 6, generator=draw).chunk(world)[rank]
    loss = F.mse_loss(model(x), x)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
