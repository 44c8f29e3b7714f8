"""Megatron-LM's and Qwen's global-batch balance loss (class: aux loss over the micro- or local batch);
pytorch/torchtitan#2061 is a neighbour

The auxiliary balance loss multiplies the fractions of tokens per expert and the mean probabilities of the rank's
own tokens; a mean of products is not the product of means.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Moe(nn.Module):
    def __init__(self, dim=8, n=4):
        super().__init__()
        self.router = nn.Linear(dim, n, bias=False)
        self.w = nn.Parameter(torch.randn(n, dim, dim) * 0.3)

    def forward(self, x):
        gate = self.router(x).softmax(-1)
        top, choice = gate.max(-1)
        share = torch.bincount(choice, minlength=len(self.w)) / len(x)
        aux = len(self.w) * (share * gate.mean(0)).sum()
        return x + top[:, None] * torch.einsum("bd,bde->be", x, self.w[choice]), aux


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(Moe())
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
draw = torch.Generator().manual_seed(1)
for _ in range(3):
    x, y = torch.randn(32, 8, generator=draw), torch.randn(32, 8, generator=draw)
    out, aux = model(x.chunk(world)[rank])
    loss = (out - y.chunk(world)[rank]).pow(2).mean() + 0.5 * aux
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
