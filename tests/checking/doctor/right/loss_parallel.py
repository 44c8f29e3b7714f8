"""FSDP2 x DTensor with sequence parallelism and a loss over a cut vocabulary; an average of the weights per shard."""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class LM(nn.Module):
    def __init__(self, v=24, d=8):
        super().__init__()
        self.emb = nn.Embedding(v, d)
        self.blocks = nn.ModuleList([Block(d), Block(d)])
        self.norm, self.out = nn.LayerNorm(d), nn.Linear(d, v, bias=False)

    def forward(self, ids):
        x = self.emb(ids)
        for b in self.blocks:
            x = b(x)
        return self.out(self.norm(x))


dist.init_process_group("gloo")
world = dist.get_world_size()
tp = 2 if world > 1 else 1
mesh = init_device_mesh("cpu", (world // tp, tp), mesh_dim_names=("dp", "tp"))
torch.manual_seed(17)
model = LM()
parallelize_module(
    model,
    mesh["tp"],
    {
        "emb": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "out": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    },
)
for b in model.blocks:
    parallelize_module(
        b,
        mesh["tp"],
        {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        },
    )
    fully_shard(b, mesh=mesh["dp"])
fully_shard(model, mesh=mesh["dp"])
opt = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
average = [p.detach().clone() for p in model.parameters()]
g = torch.Generator().manual_seed(0)
d = mesh.get_local_rank("dp")
for step in range(3):
    text = torch.randint(0, 24, (4, 9), generator=g).chunk(world // tp)[d]
    with loss_parallel():
        loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
    opt.step()
    opt.zero_grad()
    shown = loss.detach()
    shown = shown.full_tensor() if hasattr(shown, "full_tensor") else shown.clone()
    dist.all_reduce(shown, op=dist.ReduceOp.AVG)
    if dist.get_rank() == 0:
        print(f"step {step} loss {shown.item():.6f}")
    with torch.no_grad():
        for a, p in zip(average, model.parameters()):
            a.mul_(0.9).add_(p.detach(), alpha=0.1)
