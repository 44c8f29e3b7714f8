"""modelscope/mcore-bridge#173

The replicated LoRA factor of a column-parallel layer sees only the rank's part of the sequence, and its gradient is
not summed over the tensor-parallel ranks.
"""

import torch
import torch.distributed as dist
from torch import nn


class Gather(torch.autograd.Function):
    """All tokens from each rank's; backward: reduce-scatter."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(world)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad.chunk(world)[rank]


class Scatter(torch.autograd.Function):
    """The sum over ranks, of which each rank keeps its tokens; backward: all-gather."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x.chunk(world)[rank].clone()

    @staticmethod
    def backward(ctx, grad):
        parts = [torch.empty_like(grad) for _ in range(world)]
        dist.all_gather(parts, grad.contiguous())
        return torch.cat(parts)


class Block(nn.Module):
    def __init__(self, d=8, f=16, r=2):
        super().__init__()
        self.base, self.lora_a = nn.Linear(d, f, bias=False), nn.Linear(d, r, bias=False)
        self.lora_b, self.down = nn.Linear(r, f, bias=False), nn.Linear(f, d, bias=False)
        for layer, dim in ((self.base, 0), (self.lora_b, 0), (self.down, 1)):
            layer.weight = nn.Parameter(layer.weight.detach().chunk(world, dim)[rank].clone())
        self.base.weight.requires_grad_(False)

    def forward(self, x):
        h = self.base(Gather.apply(x)) + self.lora_b(Gather.apply(self.lora_a(x)))
        return Scatter.apply(self.down(h.tanh()))


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = Block()
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
draw = torch.Generator().manual_seed(1)
for _ in range(3):
    x, y = torch.randn(16, 8, generator=draw), torch.randn(16, 8, generator=draw)
    loss = (model(x.chunk(world)[rank]) - y.chunk(world)[rank]).pow(2).sum() / y.numel()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
