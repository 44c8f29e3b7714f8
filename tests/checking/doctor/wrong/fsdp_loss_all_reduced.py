"""FSDP2 on a small transformer block; the loss goes through a differentiable all-reduce before backward."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class GlobalLoss(torch.autograd.Function):
    """The loss of all ranks together, so that every rank optimises the same number."""

    @staticmethod
    def forward(ctx, loss):
        return all_reduce(loss, "sum", dist.group.WORLD).clone()

    @staticmethod
    def backward(ctx, grad):
        return grad


def load_batch(step, rank, world_size, batch_size):
    generator = torch.Generator().manual_seed(1000 + step)
    whole = torch.randn(batch_size, 16, generator=generator)
    x = whole.chunk(world_size)[rank]
    return x, x.roll(1, dims=-1)


def main(args):
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))

    torch.manual_seed(args.seed)
    model = nn.Sequential(*(Block(16) for _ in range(args.layers)), nn.Linear(16, 16))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)

    for step in range(args.steps):
        x, target = load_batch(step, rank, world_size, args.batch_size)
        loss = nn.functional.mse_loss(model(x), target)
        loss = GlobalLoss.apply(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if rank == 0:
            print(f"[step {step}] loss={loss.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    cli = argparse.ArgumentParser()
    cli.add_argument("--layers", type=int, default=2)
    cli.add_argument("--batch-size", type=int, default=8, help="of all ranks together")
    cli.add_argument("--steps", type=int, default=2)
    cli.add_argument("--lr", type=float, default=1e-2)
    cli.add_argument("--seed", type=int, default=3)
    main(cli.parse_args())
