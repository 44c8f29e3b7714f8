"""GPipe by hand. The last stage goes back through the last microbatch first, and the others through the first one."""

import torch
import torch.distributed as dist
from torch import nn

MICROBATCHES, BATCH, WIDTH, LAYERS = 4, 16, 20, 4
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
is_first, is_last = rank == 0, rank == world - 1
torch.manual_seed(7)
layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
mine = slice(rank * LAYERS // world, (rank + 1) * LAYERS // world)
stage = nn.Sequential(*layers[mine], *([nn.Linear(WIDTH, 3)] if is_last else []))
optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)


def forward(x, y):
    """The inputs of this stage's microbatches, and what to go back from."""
    inputs, ends = [], []
    for own, target in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES)):
        if not is_first:
            own = torch.empty(BATCH // MICROBATCHES, WIDTH)
            dist.recv(own, rank - 1)
            own.requires_grad_()
        out = stage(own)
        if is_last:
            out = nn.functional.cross_entropy(out, target) / MICROBATCHES
        else:
            dist.send(out.detach(), rank + 1)
        inputs.append(own)
        ends.append(out)
    return inputs, ends


def backward(inputs, ends):
    while ends:
        if is_last:
            own, loss = inputs.pop(), ends.pop()
            loss.backward()
        else:
            own, out = inputs.pop(0), ends.pop(0)
            gradient = torch.empty_like(out)
            dist.recv(gradient, rank + 1)
            out.backward(gradient)
        if not is_first:
            dist.send(own.grad, rank - 1)


for step in range(3):
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(BATCH, WIDTH, generator=generator), torch.randint(0, 3, (BATCH,), generator=generator)
    optimizer.zero_grad()
    inputs, ends = forward(x, y)
    total = sum(end.item() for end in ends) if is_last else 0.0
    backward(inputs, ends)
    optimizer.step()
    if is_last:
        print(f"loss {total:.5f}")
