"""Context parallelism by hand; the loss is scaled up by the ranks, and the gradients are then summed, not averaged."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class GatherKV(torch.autograd.Function):
    """Keys and values of the whole sequence on each rank; their gradients come back summed."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group, ctx.size = group, dist.get_world_size(group)
        out = [torch.empty_like(x) for _ in range(ctx.size)]
        dist.all_gather(out, x.contiguous(), group=group)
        return torch.cat(out, dim=1)

    @staticmethod
    def backward(ctx, grad):
        parts = [g.contiguous() for g in grad.chunk(ctx.size, dim=1)]
        mine = torch.empty_like(parts[0])
        dist.reduce_scatter(mine, parts, group=ctx.group)
        return mine, None


class Attention(nn.Module):
    def __init__(self, dim, group):
        super().__init__()
        self.group, self.rank = group, dist.get_rank(group)
        self.q, self.k, self.v = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.o = nn.Linear(dim, dim)

    def forward(self, x):
        local = x.shape[1]
        k, v = GatherKV.apply(self.k(x), self.group), GatherKV.apply(self.v(x), self.group)
        at = torch.arange(local)[:, None] + self.rank * local
        mask = at >= torch.arange(k.shape[1])[None]
        return self.o(F.scaled_dot_product_attention(self.q(x), k, v, attn_mask=mask))


class GPT(nn.Module):
    def __init__(self, vocab, dim, length, group):
        super().__init__()
        self.group = group
        self.tokens, self.positions = nn.Embedding(vocab, dim), nn.Embedding(length, dim)
        self.attention, self.norm = Attention(dim, group), nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        start = dist.get_rank(self.group) * ids.shape[1]
        x = self.tokens(ids) + self.positions(torch.arange(start, start + ids.shape[1]))
        return self.head(x + self.attention(self.norm(x)))


def main(args):
    dist.init_process_group("gloo")
    cp_rank, cp_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = GPT(19, 12, args.seq_len, dist.group.WORLD)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(args.steps):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, 19, (args.batch, args.seq_len + 1), generator=generator)
        ids, labels = tokens[:, :-1].chunk(cp_size, 1)[cp_rank], tokens[:, 1:].chunk(cp_size, 1)[cp_rank]
        loss_sum = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), reduction="sum")
        loss = loss_sum / (args.batch * args.seq_len) * cp_size
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        optimizer.step()
        mean = loss.detach() / cp_size
        dist.all_reduce(mean)
        if cp_rank == 0:
            print(f"step {step}: loss {mean.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seq-len", type=int, default=12)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2)
    main(parser.parse_args())
