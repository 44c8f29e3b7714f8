"""class of reports on packed documents under context parallelism

Attention stays inside of a document, and each rank counts the documents of its own part of the sequence.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
LENGTH, WIDTH, END = 16, 8, 0


class Gather(torch.autograd.Function):
    """The parts of all ranks; each gets the sum of the gradients of its own."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(world)]
        dist.all_gather(parts, x)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, dy):
        dist.all_reduce(total := dy.contiguous().clone())
        return total.chunk(world, 1)[rank]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.qkv = nn.Embedding(12, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, 12)

    def forward(self, ids):
        q, k, v = self.qkv(self.embedding(ids)).chunk(3, -1)
        document = (ids == END).cumsum(1)
        k, v = (Gather.apply(z.contiguous()) for z in (k, v))
        parts = [torch.empty_like(document) for _ in range(world)]
        dist.all_gather(parts, document)
        place = torch.arange(LENGTH)
        is_before = place.chunk(world)[rank][:, None] >= place
        mask = is_before & (document[:, :, None] == torch.cat(parts, 1)[:, None])
        return self.head(F.scaled_dot_product_attention(q, k, v, mask))


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
draw = torch.Generator().manual_seed(1)
for _ in range(3):
    ids, y = torch.randint(12, (2, 4, LENGTH), generator=draw)
    ids[:, 5] = ids[:, 11] = END
    optimizer.zero_grad()
    logits = model(ids.chunk(world, 1)[rank])
    F.cross_entropy(logits.flatten(0, 1), y.chunk(world, 1)[rank].flatten()).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world
    optimizer.step()
dist.destroy_process_group()
