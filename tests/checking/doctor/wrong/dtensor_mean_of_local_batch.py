"""Data parallelism with DTensor parameters that are replicated; the mean is taken over the local batch only."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_module


def make_model():
    return nn.Sequential(nn.Linear(6, 20), nn.Mish(), nn.Linear(20, 20), nn.Mish(), nn.Linear(20, 2))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--global-batch-size", type=int, default=12)
    parser.add_argument("--num-iterations", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.02)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))

    torch.manual_seed(100)
    model = distribute_module(make_model(), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, foreach=False)
    data = torch.Generator().manual_seed(200)
    for iteration in range(args.num_iterations):
        x = torch.randn(args.global_batch_size, 6, generator=data)
        y = torch.stack([x.sum(1), x.square().sum(1)], 1)
        x, y = x.chunk(world_size)[rank], y.chunk(world_size)[rank]
        output = model(DTensor.from_local(x, mesh, [Shard(0)]))
        loss = (output.to_local() - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        reported = loss.detach() / world_size
        dist.all_reduce(reported)
        if rank == 0:
            print(f"iteration {iteration} loss {reported.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
