"""Long sequences cut over the ranks; each rank shifts its own labels, so the target at every cut is lost."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class ConvLM(nn.Module):
    """A model that needs no other tokens than its own: what is cut cannot matter to it."""

    def __init__(self, vocab=15, dim=12):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 32), nn.GELU(), nn.Linear(32, dim), nn.LayerNorm(dim))
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, input_ids):
        return self.lm_head(self.mlp(self.embed(input_ids)))


def causal_lm_loss(logits, labels):
    """As in transformers: the labels are the inputs, and are shifted here."""
    labels = F.pad(labels, (0, 1), value=-100)[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def shard_sequence(batch, rank, world_size):
    return {name: tensor.chunk(world_size, dim=1)[rank] for name, tensor in batch.items()}


def documents(seed, count, length):
    tokens = torch.randint(0, 15, (count, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": tokens, "labels": tokens.clone()}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--documents", type=int, default=2)
    parser.add_argument("--length", type=int, default=16)
    parser.add_argument("--max-steps", type=int, default=2)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DDP(ConvLM())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(args.max_steps):
        batch = shard_sequence(documents(step, args.documents, args.length), rank, world_size)
        loss = causal_lm_loss(model(batch["input_ids"]), batch["labels"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"finished step {step}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
