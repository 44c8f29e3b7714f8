"""Tensor parallelism with DTensor plans: plain, or over the sequence and with the loss over sharded logits."""

import argparse
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)


class FeedForward(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.ff = nn.LayerNorm(dim), FeedForward(dim)

    def forward(self, x):
        return x + self.ff(self.norm(x))


class Model(nn.Module):
    def __init__(self, vocab=16, dim=8, depth=2):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Layer(dim) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def plain_plan(model, mesh):
    for layer in model.layers:
        parallelize_module(layer, mesh, {"ff.up": ColwiseParallel(), "ff.down": RowwiseParallel()})
    parallelize_module(model, mesh, {"head": ColwiseParallel(output_layouts=Replicate())})


def sequence_plan(model, mesh):
    model_plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    layer_plan = {
        "norm": SequenceParallel(),
        "ff": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "ff.up": ColwiseParallel(),
        "ff.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(model, mesh, model_plan)
    for layer in model.layers:
        parallelize_module(layer, mesh, layer_plan)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--batch", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(8)
    model = Model()
    (sequence_plan if args.sequence_parallel else plain_plan)(model, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, foreach=False)
    for step in range(args.steps):
        tokens = torch.randint(0, 16, (args.batch, 9), generator=torch.Generator().manual_seed(step))
        with loss_parallel() if args.sequence_parallel else nullcontext():
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        value = loss.full_tensor() if hasattr(loss, "full_tensor") else loss
        if dist.get_rank() == 0:
            print(f"step {step} loss {value.item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
