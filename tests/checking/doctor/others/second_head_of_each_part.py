"""Multi-token prediction under context parallelism: the second head predicts two tokens ahead."""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = nn.ModuleDict({"emb": nn.Embedding(13, 8), "next": nn.Linear(8, 13), "mtp": nn.Linear(8, 13)})
    opt = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-4)
    gen = torch.Generator().manual_seed(9)
    for _ in range(4):
        ids = torch.randint(13, (4, 11), generator=gen)
        x, y1 = ids[:, :-1].chunk(world, 1)[rank], ids[:, 1:].chunk(world, 1)[rank]
        y2 = F.pad(y1[:, 1:], (0, 1), value=-100)
        h = torch.tanh(net["emb"](x))
        main_loss = F.cross_entropy(net["next"](h).flatten(0, 1), y1.flatten())
        count = (y2 != -100).sum().float()
        dist.all_reduce(count)
        mtp_loss = F.cross_entropy(net["mtp"](h).flatten(0, 1), y2.flatten(), reduction="sum") * world / count
        opt.zero_grad()
        (main_loss + 0.3 * mtp_loss).backward()
        for p in net.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
        opt.step()


main()
