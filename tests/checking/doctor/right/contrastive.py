"""CLIP's loss over the samples of all ranks: each rank scores its own against everyone's, gathered with gradients."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel as DDP


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(6, 8), nn.Linear(4, 8)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, image, text):
        return F.normalize(self.image(image), dim=1), F.normalize(self.text(text), dim=1), self.scale.exp()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = DDP(TwoTowers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    local = args.batch // world
    labels = torch.arange(local) + rank * local
    for step in range(args.steps):
        g = torch.Generator().manual_seed(step)
        images, texts = torch.randn(args.batch, 6, generator=g), torch.randn(args.batch, 4, generator=g)
        image, text, scale = model(images.chunk(world)[rank], texts.chunk(world)[rank])
        all_images, all_texts = torch.cat(all_gather(image)), torch.cat(all_gather(text))
        loss = F.cross_entropy(scale * image @ all_texts.T, labels) + F.cross_entropy(
            scale * text @ all_images.T, labels
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step} loss {mean.item() / world:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
