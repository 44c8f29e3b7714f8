"""DDP with ZeroRedundancyOptimizer: every rank steps a part of the parameters and sends it to the others."""

import argparse

import torch
import torch.distributed as dist
from gpt import GPT
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(2)
    model = DDP(GPT(layers=1))
    options = {"lr": 0.2, "momentum": 0.9, "weight_decay": 0.01}
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.SGD, **options)
    for step in range(args.steps):
        tokens = torch.randint(0, 32, (args.batch, 10), generator=torch.Generator().manual_seed(step))
        mine = tokens[rank::world]
        _, loss = model(mine[:, :-1], mine[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss.detach_())
        if rank == 0:
            print(f"step {step} loss {loss.item() / world:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
