"""Megatron-style GPT by hand: tensor parallelism, optionally over the sequence, beside data parallelism."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function


class State:
    """Groups of this rank; tensor-parallel ranks are neighbours."""

    def __init__(self, tp):
        world, rank = dist.get_world_size(), dist.get_rank()
        self.tp_size = min(tp, world)
        self.dp_size = world // self.tp_size
        rows = [list(range(i * self.tp_size, (i + 1) * self.tp_size)) for i in range(self.dp_size)]
        columns = [[row[i] for row in rows] for i in range(self.tp_size)]
        self.tp, _ = dist.new_subgroups_by_enumeration(rows)
        self.dp, _ = dist.new_subgroups_by_enumeration(columns)
        self.dp_rank, self.tp_rank = divmod(rank, self.tp_size)


ps: State


class CopyTo(Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ps.tp)
        return grad


class ReduceFrom(Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x, group=ps.tp)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


def _gather(x):
    parts = [torch.empty_like(x) for _ in range(ps.tp_size)]
    dist.all_gather(parts, x.contiguous(), group=ps.tp)
    return torch.cat(parts, dim=1)


def _reduce_scatter(x):
    parts = [p.contiguous() for p in x.chunk(ps.tp_size, dim=1)]
    out = torch.empty_like(parts[0])
    dist.reduce_scatter(out, parts, group=ps.tp)
    return out


class GatherSequence(Function):
    @staticmethod
    def forward(ctx, x):
        return _gather(x)

    @staticmethod
    def backward(ctx, grad):
        return _reduce_scatter(grad)


class ScatterSum(Function):
    @staticmethod
    def forward(ctx, x):
        return _reduce_scatter(x)

    @staticmethod
    def backward(ctx, grad):
        return _gather(grad)


class CutSequence(Function):
    @staticmethod
    def forward(ctx, x):
        return x.chunk(ps.tp_size, dim=1)[ps.tp_rank].clone()

    @staticmethod
    def backward(ctx, grad):
        return _gather(grad)


def shard(whole, dim):
    return nn.Parameter(whole.chunk(ps.tp_size, dim)[ps.tp_rank].clone())


class Block(nn.Module):
    def __init__(self, width, heads, over_sequence):
        super().__init__()
        self.heads, self.over_sequence = heads // ps.tp_size, over_sequence
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        q, k, v, o = torch.randn(4, width, width) / width**0.5
        self.wq, self.wk, self.wv, self.wo = shard(q, 0), shard(k, 0), shard(v, 0), shard(o, 1)
        self.up = shard(torch.randn(4 * width, width) / width**0.5, 0)
        self.up_bias = shard(torch.randn(4 * width) * 0.1, 0)
        self.down = shard(torch.randn(width, 4 * width) / width**0.5 / 2, 1)
        self.down_bias = nn.Parameter(torch.randn(width) * 0.1)

    def enter(self, x):
        return GatherSequence.apply(x) if self.over_sequence else CopyTo.apply(x)

    def leave(self, x):
        return ScatterSum.apply(x) if self.over_sequence else ReduceFrom.apply(x)

    def forward(self, x):
        h = self.enter(self.norm_1(x))
        q, k, v = (F.linear(h, w).unflatten(-1, (self.heads, -1)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.leave(F.linear(y, self.wo))
        h = F.gelu(F.linear(self.enter(self.norm_2(x)), self.up, self.up_bias))
        return x + self.leave(F.linear(h, self.down)) + self.down_bias


class VocabParallelCrossEntropy(Function):
    """logits [N, V/tp], target [N] -> losses [N]."""

    @staticmethod
    def forward(ctx, logits, target):
        largest = logits.max(dim=1).values
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=ps.tp)
        logits = logits - largest[:, None]
        here = target - ps.tp_rank * logits.shape[1]
        outside = (here < 0) | (here >= logits.shape[1])
        here = here.masked_fill(outside, 0)
        chosen = logits.gather(1, here[:, None]).squeeze(1).masked_fill(outside, 0.0)
        exp = logits.exp()
        total = exp.sum(1)
        dist.all_reduce(chosen, group=ps.tp)
        dist.all_reduce(total, group=ps.tp)
        ctx.save_for_backward(exp / total[:, None], here, outside)
        return total.log() - chosen

    @staticmethod
    def backward(ctx, grad):
        probabilities, here, outside = ctx.saved_tensors
        out = probabilities.clone()
        out[torch.arange(len(here)), here] -= 1.0 - outside.float()
        return out * grad[:, None], None


class GPT(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.over_sequence = args.sequence_parallel
        self.vocab = args.vocab // ps.tp_size
        self.tokens = shard(torch.randn(args.vocab, args.width) * 0.5, 0)
        self.positions = nn.Parameter(torch.randn(args.seq, args.width) * 0.1)
        self.blocks = nn.ModuleList(Block(args.width, 4, self.over_sequence) for _ in range(args.layers))
        self.norm = nn.LayerNorm(args.width)
        self.head = shard(torch.randn(args.vocab, args.width) / args.width**0.5, 0)

    def embed(self, ids):
        here = ids - ps.tp_rank * self.vocab
        outside = (here < 0) | (here >= self.vocab)
        return F.embedding(here.masked_fill(outside, 0), self.tokens).masked_fill(outside[..., None], 0.0)

    def forward(self, ids, targets):
        x = ReduceFrom.apply(self.embed(ids)) + self.positions
        if self.over_sequence:
            x = CutSequence.apply(x)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        x = GatherSequence.apply(x) if self.over_sequence else CopyTo.apply(x)
        logits = F.linear(x, self.head)
        return VocabParallelCrossEntropy.apply(logits.flatten(0, 1), targets.flatten()).mean()


SHARDED = ("wq", "wk", "wv", "wo", "up", "up_bias", "down", "tokens", "head")


def finish_gradients(model, args):
    for name, p in model.named_parameters():
        if args.sequence_parallel and ("norm" in name or "down_bias" in name):
            dist.all_reduce(p.grad, group=ps.tp)
        dist.all_reduce(p.grad, group=ps.dp)
        p.grad /= ps.dp_size


def clip(model, limit):
    squares = {True: torch.zeros(()), False: torch.zeros(())}
    for name, p in model.named_parameters():
        squares[name.rsplit(".", 1)[-1] in SHARDED] += p.grad.square().sum()
    dist.all_reduce(squares[True], group=ps.tp)
    norm = (squares[True] + squares[False]).sqrt()
    for p in model.parameters():
        p.grad *= (limit / (norm + 1e-6)).clamp(max=1)
    return norm


def main():
    global ps
    parser = argparse.ArgumentParser()
    parser.add_argument("--tensor-parallel", type=int, default=2)
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=24)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--clip-grad", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=2)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    ps = State(args.tensor_parallel)
    torch.manual_seed(1234)
    model = GPT(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(args.steps):
        tokens = torch.randint(0, args.vocab, (args.batch, args.seq + 1), generator=torch.Generator().manual_seed(step))
        mine = tokens.chunk(ps.dp_size)[ps.dp_rank]
        optimizer.zero_grad()
        loss = model(mine[:, :-1], mine[:, 1:])
        loss.backward()
        finish_gradients(model, args)
        norm = clip(model, args.clip_grad)
        optimizer.step()
        mean = loss.detach() / ps.dp_size
        dist.all_reduce(mean, group=ps.dp)
        if dist.get_rank() == 0:
            print(f"step {step} loss {mean.item():.5f} grad_norm {norm.item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
