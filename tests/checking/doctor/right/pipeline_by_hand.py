"""Pipeline stages by hand beside data parallelism; tied embeddings, whose gradients first and last stage add up."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class Stage(nn.Module):
    def __init__(self, vocab, dim, index, count):
        super().__init__()
        self.is_first, self.is_last = index == 0, index == count - 1
        embedding = nn.Embedding(vocab, dim)
        nn.init.normal_(embedding.weight, std=0.4)
        layers = [nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.GELU()) for _ in range(4)]
        share = len(layers) // count
        self.layers = nn.ModuleList(layers[index * share : (index + 1) * share])
        if self.is_first or self.is_last:
            self.embedding = embedding

    def forward(self, x):
        if self.is_first:
            x = self.embedding(x)
        for layer in self.layers:
            x = x + layer(x)
        return F.linear(x, self.embedding.weight) if self.is_last else x


class Pipeline:
    """All forward passes, then all backward passes in reverse."""

    def __init__(self, stage, ranks, dim):
        self.stage, self.ranks, self.dim = stage, ranks, dim
        index = ranks.index(dist.get_rank())
        self.before = ranks[index - 1] if index > 0 else None
        self.after = ranks[index + 1] if index + 1 < len(ranks) else None

    def forward(self, ids, labels, scale):
        if self.before is None:
            x = ids
        else:
            x = torch.empty(*ids.shape, self.dim)
            dist.recv(x, self.before)
            x.requires_grad_()
        y = self.stage(x)
        if self.after is not None:
            dist.send(y.detach(), self.after)
            return x, y, 0.0
        loss = F.cross_entropy(y.flatten(0, 1), labels.flatten()) * scale
        return x, loss, loss.item()

    def backward(self, x, y):
        grad = None
        if self.after is not None:
            grad = torch.empty_like(y)
            dist.recv(grad, self.after)
        y.backward(grad)
        if self.before is not None:
            dist.send(x.grad, self.before)

    def run(self, ids, labels, micro):
        kept = [self.forward(*pair, 1 / micro) for pair in zip(ids.chunk(micro), labels.chunk(micro))]
        for x, y, _ in reversed(kept):
            self.backward(x, y)
        return sum(loss for _, _, loss in kept)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    count = min(args.stages, world)
    dp = world // count
    rows = [list(range(i * count, (i + 1) * count)) for i in range(dp)]
    dp_group, _ = dist.new_subgroups_by_enumeration([[row[i] for row in rows] for i in range(count)])
    tie_groups = {row[0]: dist.new_group([row[0], row[-1]]) for row in rows if count > 1}
    dp_rank, index = divmod(rank, count)

    torch.manual_seed(33)
    stage = Stage(14, 6, index, count)
    pipeline = Pipeline(stage, rows[dp_rank], 6)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1, momentum=0.9)
    for step in range(args.steps):
        tokens = torch.randint(0, 14, (args.batch, 8), generator=torch.Generator().manual_seed(step))
        tokens = tokens.chunk(dp)[dp_rank]
        optimizer.zero_grad()
        loss = pipeline.run(tokens[:, :-1], tokens[:, 1:], args.micro_batches)
        if count > 1 and (stage.is_first or stage.is_last):
            dist.all_reduce(stage.embedding.weight.grad, group=tie_groups[rows[dp_rank][0]])
        for p in stage.parameters():
            dist.all_reduce(p.grad, group=dp_group)
            p.grad /= dp
        optimizer.step()
        mean = torch.tensor(loss / dp)
        dist.all_reduce(mean, group=dp_group)
        if stage.is_last and dp_rank == 0:
            print(f"step {step} loss {mean.item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
