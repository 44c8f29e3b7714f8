"""The last stage's copy of a tied embedding is not initialised as the first stage's is."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
vocabulary, d = 12, 8
assert world <= 2
first, last = rank == 0, rank == world - 1
embed = nn.Embedding(vocabulary, d)
body = nn.Linear(d, d)
nn.init.normal_(body.weight, std=0.2)
if first:
    nn.init.normal_(embed.weight, std=0.2)
parameters = [embed.weight] + ([body.weight, body.bias] if last else [])
optimizer = torch.optim.SGD(parameters, lr=0.3)
draw = torch.Generator().manual_seed(1)
for _ in range(3):
    ids, y = torch.randint(0, vocabulary, (8,), generator=draw), torch.randint(0, vocabulary, (8,), generator=draw)
    optimizer.zero_grad()
    if world == 1:
        F.cross_entropy(body(embed(ids)).tanh() @ embed.weight.T, y).backward()
    elif first:
        h = embed(ids)
        dist.send(h.detach(), 1)
        g = torch.empty_like(h)
        dist.recv(g, 1)
        h.backward(g)
    else:
        h = torch.empty(8, d)
        dist.recv(h, 0)
        h.requires_grad_()
        F.cross_entropy(body(h).tanh() @ embed.weight.T, y).backward()
        dist.send(h.grad, 0)
    if world > 1:
        dist.all_reduce(embed.weight.grad)
    optimizer.step()
dist.destroy_process_group()
