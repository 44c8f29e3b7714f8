"""FSDP2: blocks sharded one by one, mixed precision, accumulation, clipping by the norm of the whole gradient."""

import argparse

import torch
import torch.distributed as dist
from gpt import GPT
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint


class Checkpointed(torch.nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False)


def build(args, mesh):
    torch.manual_seed(0)
    model = GPT()
    options = {"mesh": mesh, "reshard_after_forward": not args.keep}
    if args.bfloat16:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for i, block in enumerate(model.blocks):
        if args.checkpoint:
            model.blocks[i] = block = Checkpointed(block)
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--bfloat16", action="store_true")
    parser.add_argument("--checkpoint", action="store_true")
    parser.add_argument("--keep", action="store_true", help="keep whole parameters between forward and backward")
    parser.add_argument("--hybrid", type=int, default=1, help="copies of the sharded model")
    parser.add_argument("--max-norm", type=float, default=0.5)
    parser.add_argument("--steps", type=int, default=2)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    copies = min(args.hybrid, world)
    shape, names = ((copies, world // copies), ("replicate", "shard")) if copies > 1 else ((world,), ("shard",))
    model = build(args, init_device_mesh("cpu", shape, mesh_dim_names=names))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for step in range(args.steps):
        ids = torch.randint(0, 32, (args.batch, 11), generator=torch.Generator().manual_seed(step)).chunk(world)[rank]
        total = torch.zeros(())
        micros = ids.chunk(args.accumulate)
        for i, micro in enumerate(micros):
            model.set_requires_gradient_sync(i == len(micros) - 1)
            _, loss = model(micro[:, :-1], micro[:, 1:])
            (loss / len(micros)).backward()
            total += loss.detach().float() / len(micros)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_norm).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {step}: loss {total.item() / world:.5f} norm {norm.item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
