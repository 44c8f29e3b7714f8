"""nanoGPT-like loop with gradient accumulation under DDP; the loss of a microbatch is not divided by their number."""

import argparse
import math
import os
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

parser = argparse.ArgumentParser()
parser.add_argument("--batch_size", type=int, default=4)
parser.add_argument("--gradient_accumulation_steps", type=int, default=4, help="of all ranks together")
parser.add_argument("--max_iters", type=int, default=2)
parser.add_argument("--block_size", type=int, default=8)
config = parser.parse_args()

ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    init_process_group(backend="gloo")
    ddp_rank = int(os.environ["RANK"])
    ddp_world_size = int(os.environ["WORLD_SIZE"])
    master_process = ddp_rank == 0
    assert config.gradient_accumulation_steps % ddp_world_size == 0 or ddp_world_size == 1
    accumulate = max(1, config.gradient_accumulation_steps // ddp_world_size)
else:
    ddp_rank, ddp_world_size, master_process = 0, 1, True
    accumulate = config.gradient_accumulation_steps


class CausalSelfAttention(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.n_head = n_head

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in self.c_attn(x).split(C, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class GPT(nn.Module):
    def __init__(self, vocab_size=20, n_embd=16, n_head=2):
        super().__init__()
        self.wte = nn.Embedding(vocab_size, n_embd)
        self.wpe = nn.Embedding(config.block_size, n_embd)
        self.ln = nn.LayerNorm(n_embd)
        self.attn = CausalSelfAttention(n_embd, n_head)
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        x = x + self.attn(self.ln(x))
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1))


data = torch.randint(0, 20, (4000,), generator=torch.Generator().manual_seed(1337))


def get_batch(number):
    """Microbatch `number` of the whole training, counted over ranks and steps."""
    at = number * config.batch_size * config.block_size
    rows = [data[at + i * config.block_size :][: config.block_size + 1] for i in range(config.batch_size)]
    rows = torch.stack(rows)
    return rows[:, :-1], rows[:, 1:]


torch.manual_seed(1337)
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
if ddp:
    model = DDP(model)

for iter_num in range(config.max_iters):
    total = 0.0
    for micro_step in range(accumulate):
        X, Y = get_batch((iter_num * accumulate + micro_step) * ddp_world_size + ddp_rank)
        syncs = not ddp or micro_step == accumulate - 1
        with nullcontext() if syncs else model.no_sync():
            logits, loss = model(X, Y)
            total += loss.item() / accumulate
            loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if master_process:
        print(f"iter {iter_num}: grad norm {norm:.6f}")

if ddp:
    destroy_process_group()
