"""huggingface/transformers num_items_in_batch gathered over all ranks (PR #35207 and its followers; tensor-parallel
ranks counted too)

The number of valid tokens is added up over all ranks, though two tensor-parallel ranks read the same tokens.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=mesh.get_group("tp"))
        return grad


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x, group=mesh.get_group("tp"))
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class Model(nn.Module):
    def __init__(self, d=8, f=16, vocab=11):
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab, d), nn.Linear(d, vocab, bias=False)
        self.up, self.down = nn.Linear(d, f, bias=False), nn.Linear(f, d, bias=False)
        self.up.weight = nn.Parameter(self.up.weight.detach().chunk(tp, 0)[t].clone())
        self.down.weight = nn.Parameter(self.down.weight.detach().chunk(tp, 1)[t].clone())

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(x + Sum.apply(self.down(self.up(Copy.apply(x)).tanh())))


dist.init_process_group("gloo")
world = dist.get_world_size()
tp = min(2, world)
mesh = init_device_mesh("cpu", (world // tp, tp), mesh_dim_names=("dp", "tp"))
d, t = mesh.get_local_rank("dp"), mesh.get_local_rank("tp")
torch.manual_seed(0)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
draw = torch.Generator().manual_seed(1)
for _ in range(3):
    tokens, labels = torch.randint(11, (2, 8, 6), generator=draw)
    labels[torch.arange(6) >= torch.randint(2, 7, (8, 1), generator=draw)] = -100
    tokens, labels = tokens.chunk(world // tp)[d], labels.chunk(world // tp)[d]
    count = (labels != -100).sum()
    dist.all_reduce(count)
    loss = cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum") / count
    optimizer.zero_grad()
    loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, group=mesh.get_group("dp"))
    optimizer.step()
dist.destroy_process_group()
