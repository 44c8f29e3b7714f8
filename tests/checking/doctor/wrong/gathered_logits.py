"""Column-parallel output layer whose logits are gathered; the backward pass of the gather sums equal gradients."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


def get_tp_group():
    return dist.group.WORLD


class AllGatherLastDim(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.size = dist.get_world_size(get_tp_group())
        tensors = [torch.empty_like(x) for _ in range(ctx.size)]
        dist.all_gather(tensors, x.contiguous(), group=get_tp_group())
        return torch.cat(tensors, dim=-1)

    @staticmethod
    def backward(ctx, grad):
        pieces = [piece.contiguous() for piece in grad.chunk(ctx.size, dim=-1)]
        mine = torch.empty_like(pieces[0])
        dist.reduce_scatter(mine, pieces, group=get_tp_group())
        return mine


class CopyToTP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=get_tp_group())
        return grad


class ParallelHead(nn.Module):
    def __init__(self, dim, vocab):
        super().__init__()
        rank, size = dist.get_rank(), dist.get_world_size()
        weight = torch.randn(vocab, dim) * dim**-0.5
        self.weight = nn.Parameter(weight.chunk(size)[rank].clone())

    def forward(self, x):
        return AllGatherLastDim.apply(F.linear(CopyToTP.apply(x), self.weight))


class LanguageModel(nn.Module):
    def __init__(self, vocab=24, dim=10):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.mix = nn.LSTM(dim, dim, batch_first=True)
        self.head = ParallelHead(dim, vocab)

    def forward(self, ids):
        return self.head(self.mix(self.tok(ids))[0])


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--seq-length", type=int, default=7)
    parser.add_argument("--train-iters", type=int, default=2)
    return parser.parse_args()


def main():
    args = parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = LanguageModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    generator = torch.Generator().manual_seed(0)
    for it in range(args.train_iters):
        tokens = torch.randint(0, 24, (args.micro_batch_size, args.seq_length + 1), generator=generator)
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.reshape(-1, 24), tokens[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"iteration {it + 1}: loss {loss.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
