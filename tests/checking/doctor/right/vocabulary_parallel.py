"""Megatron by hand: embedding and cross entropy over an uneven cut of the vocabulary, and q, k, v in one weight."""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

dist.init_process_group("gloo")
RANK, WORLD = dist.get_rank(), dist.get_world_size()


class f(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous()
        dist.all_reduce(g)
        return g


class g(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g


def part(w, dim):
    return nn.Parameter(w.tensor_split(WORLD, dim)[RANK].clone())


class VocabEmbedding(nn.Module):
    def __init__(self, v, d):
        super().__init__()
        bounds = [t[0].item() for t in torch.arange(v).tensor_split(WORLD)] + [v]
        self.lo, self.hi = bounds[RANK], bounds[RANK + 1]
        self.weight = part(torch.randn(v, d) * 0.1, 0)

    def forward(self, ids):
        outside = (ids < self.lo) | (ids >= self.hi)
        out = F.embedding((ids - self.lo).masked_fill(outside, 0), self.weight)
        return g.apply(out.masked_fill(outside[..., None], 0.0))

    def logits(self, x):
        return F.linear(f.apply(x), self.weight)


def vocab_cross_entropy(logits, target, lo, hi):
    top = logits.detach().max(-1).values
    dist.all_reduce(top, op=dist.ReduceOp.MAX)
    z = logits - top[..., None]
    denominator = g.apply(z.exp().sum(-1))
    outside = (target < lo) | (target >= hi)
    picked = z.gather(-1, (target - lo).masked_fill(outside, 0)[..., None]).squeeze(-1)
    return (denominator.log() - g.apply(picked.masked_fill(outside, 0.0))).mean()


class Attention(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads, self.d = heads // WORLD, d
        qkv = torch.randn(3, d, d) / d**0.5
        self.qkv = nn.Parameter(qkv.chunk(WORLD, 1)[RANK].clone().flatten(0, 1))
        self.out = part(torch.randn(d, d) / d**0.5, 1)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = F.linear(f.apply(x), self.qkv).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return g.apply(F.linear(y.transpose(1, 2).flatten(2), self.out))


class Model(nn.Module):
    def __init__(self, v=31, d=16):
        super().__init__()
        self.emb, self.n1, self.attn, self.nf = VocabEmbedding(v, d), nn.LayerNorm(d), Attention(d, 4), nn.LayerNorm(d)

    def forward(self, ids, target):
        x = self.emb(ids)
        x = x + self.attn(self.n1(x))
        return vocab_cross_entropy(self.emb.logits(self.nf(x)), target, self.emb.lo, self.emb.hi)


def grad_norm(model):
    shards = sum(p.grad.pow(2).sum() for n, p in model.named_parameters() if not n.startswith("n"))
    dist.all_reduce(shards)
    return (shards + sum(p.grad.pow(2).sum() for n, p in model.named_parameters() if n.startswith("n"))).sqrt()


torch.manual_seed(0)
m = Model()
opt = torch.optim.AdamW(m.parameters(), 1e-3)
data = torch.Generator().manual_seed(9)
for i in range(3):
    ids = torch.randint(0, 31, (3, 9), generator=data)
    loss = m(ids[:, :-1], ids[:, 1:])
    loss.backward()
    scale = (0.5 / grad_norm(m)).clamp(max=1.0)
    for p in m.parameters():
        p.grad *= scale
    opt.step()
    opt.zero_grad()
    if RANK == 0:
        print(f"step {i} | loss {loss.item():.5f}")
