"""DDP training that is resumed from a checkpoint: only rank 0 loads the state of the optimizer."""

import argparse
import io

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def build_model():
    return nn.Sequential(nn.Linear(6, 14), nn.Tanh(), nn.Linear(14, 6))


def earlier_run():
    """What an earlier run on one device left behind."""
    torch.manual_seed(30)
    model = build_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for p in model.parameters():
        averages = {"exp_avg": torch.randn_like(p) / 10, "exp_avg_sq": torch.rand_like(p) / 100}
        optimizer.state[p] = {"step": torch.tensor(4.0), **averages}
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 4}, file)
    file.seek(0)
    return file


def load_checkpoint(file, model, optimizer, rank):
    checkpoint = torch.load(file)
    model.load_state_dict(checkpoint["model"])
    if rank == 0:
        optimizer.load_state_dict(checkpoint["optimizer"])
    return checkpoint["step"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--until", type=int, default=7)
    args = parser.parse_args()
    checkpoint = earlier_run()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = build_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    start = load_checkpoint(checkpoint, model, optimizer, rank)
    model = DDP(model)
    for step in range(start, args.until):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(args.batch_size, 6, generator=generator)[rank::world_size]
        loss = nn.functional.mse_loss(model(x), x.flip(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step} done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
