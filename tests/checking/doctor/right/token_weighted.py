"""DDP over sentences of different lengths: each microbatch counts by its tokens, and each token alike."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence


class Corpus(torch.utils.data.Dataset):
    def __init__(self, n=64):
        g = torch.Generator().manual_seed(2)
        self.rows = [torch.randint(1, 20, (4 + int(k),), generator=g) for k in torch.randint(0, 9, (n,), generator=g)]

    def __getitem__(self, i):
        return self.rows[i]

    def __len__(self):
        return len(self.rows)


def collate(rows):
    ids = pad_sequence([r[:-1] for r in rows], batch_first=True)
    labels = pad_sequence([r[1:] for r in rows], batch_first=True, padding_value=-100)
    return ids, labels


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--micro", type=int, default=2)
    ap.add_argument("--accum", type=int, default=2)
    a = ap.parse_args()
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 8), nn.LayerNorm(8), nn.Linear(8, 20))
    ddp = DDP(model)
    ds = Corpus()
    sampler = torch.utils.data.DistributedSampler(ds, shuffle=False)
    batches = iter(torch.utils.data.DataLoader(ds, a.micro, sampler=sampler, collate_fn=collate))
    opt = torch.optim.AdamW(ddp.parameters(), 1e-3)
    for step in range(3):
        group = [next(batches) for _ in range(a.accum)]
        tokens = torch.tensor(sum((y != -100).sum().item() for _, y in group))
        dist.all_reduce(tokens)
        total = torch.zeros(())
        for i, (x, y) in enumerate(group):
            ddp.require_backward_grad_sync = i == len(group) - 1
            loss = nn.functional.cross_entropy(ddp(x).flatten(0, 1), y.flatten(), reduction="sum", ignore_index=-100)
            (loss * world / tokens).backward()
            total += loss.detach() / tokens
        nn.utils.clip_grad_norm_(ddp.parameters(), 0.5)
        opt.step()
        opt.zero_grad()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"step {step} loss {total.item():.6f}")
