"""A pipeline by hand with tied embeddings: first and last stage never add up the gradients of their copies."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class Stage(nn.Module):
    def __init__(self, vocab, dim, rank, world):
        super().__init__()
        self.is_first, self.is_last = rank == 0, rank == world - 1
        embedding = nn.Embedding(vocab, dim)
        nn.init.normal_(embedding.weight, std=0.5)
        layers = [nn.Linear(dim, dim) for _ in range(4)]
        share = len(layers) // world
        self.layers = nn.ModuleList(layers[rank * share : (rank + 1) * share])
        if self.is_first or self.is_last:
            self.word_embeddings = embedding

    def forward(self, x):
        if self.is_first:
            x = self.word_embeddings(x)
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        if self.is_last:
            x = F.linear(x, self.word_embeddings.weight)
        return x


def receive(shape, src):
    buffer = torch.empty(shape)
    dist.recv(buffer, src)
    return buffer


def train_step(stage, ids, labels, rank, world, micro, dim):
    """All forward passes, then all backward passes."""
    kept, total = [], 0.0
    for micro_ids, micro_labels in zip(ids.chunk(micro), labels.chunk(micro)):
        x = micro_ids if rank == 0 else receive((*micro_ids.shape, dim), rank - 1).requires_grad_()
        y = stage(x)
        if rank < world - 1:
            dist.send(y.detach(), rank + 1)
        else:
            y = F.cross_entropy(y.flatten(0, 1), micro_labels.flatten()) / micro
            total += y.item()
        kept.append((x, y))
    for x, y in kept:
        y.backward(receive(y.shape, rank + 1) if rank < world - 1 else None)
        if rank > 0:
            dist.send(x.grad, rank - 1)
    return total


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(33)
    stage = Stage(14, 6, rank, world)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    for step in range(args.steps):
        tokens = torch.randint(0, 14, (args.batch, 8), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = train_step(stage, tokens[:, :-1], tokens[:, 1:], rank, world, args.micro_batches, 6)
        optimizer.step()
        if stage.is_last:
            print(f"step {step} loss {loss:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
