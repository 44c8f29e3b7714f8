"""nanoGPT's training loop on DDP: accumulation with no_sync, clipping, cosine schedule, EMA, autocast, evaluation."""

import argparse
import copy
import math
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from gpt import GPT
from torch.nn.parallel import DistributedDataParallel as DDP

parser = argparse.ArgumentParser()
parser.add_argument("--batch_size", type=int, default=8, help="sequences per step, of all ranks and microbatches")
parser.add_argument("--accumulate", type=int, default=1, help="microbatches per rank")
parser.add_argument("--block_size", type=int, default=12)
parser.add_argument("--max_iters", type=int, default=3)
parser.add_argument("--eval_interval", type=int, default=2)
parser.add_argument("--lr", type=float, default=1e-2)
parser.add_argument("--grad_clip", type=float, default=1.0)
parser.add_argument("--dropout", type=float, default=0.0)
parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
parser.add_argument("--ema", type=float, default=0.0)
parser.add_argument("--compress", action="store_true", help="send gradients as views of buckets")
args = parser.parse_args()

is_ddp = int(os.environ.get("RANK", -1)) != -1
if is_ddp:
    dist.init_process_group(backend="gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
else:
    rank, world_size = 0, 1
is_master = rank == 0

torch.manual_seed(1337)
corpus = torch.randint(0, 32, (2000,)).cumsum(0) % 32
splits = {"train": corpus[:1600], "val": corpus[1600:]}
draws = {split: torch.Generator().manual_seed(7) for split in splits}


def get_batch(split):
    data = splits[split]
    ix = torch.randint(len(data) - args.block_size, (args.batch_size,), generator=draws[split])
    ix = ix[rank::world_size]
    x = torch.stack([data[i : i + args.block_size] for i in ix.tolist()])
    y = torch.stack([data[i + 1 : i + 1 + args.block_size] for i in ix.tolist()])
    return x, y


def get_lr(it):
    if it < 2:
        return args.lr * (it + 1) / 2
    return 0.1 * args.lr + 0.45 * args.lr * (1 + math.cos(math.pi * it / 10))


def average(value):
    value = value.detach().clone()
    if is_ddp:
        dist.all_reduce(value, op=dist.ReduceOp.AVG)
    return value.item()


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = [raw_model(*get_batch("val"))[1] for _ in range(2)]
    model.train()
    return average(torch.stack(losses).mean())


model = raw_model = GPT(block=args.block_size, dropout=args.dropout)
optimizer = model.configure_optimizer(args.lr, weight_decay=0.1)
if is_ddp:
    model = DDP(model, gradient_as_bucket_view=args.compress)
ema = copy.deepcopy(raw_model) if args.ema else None
context = torch.autocast("cpu", torch.bfloat16) if args.dtype == "bfloat16" else nullcontext()

torch.manual_seed(1337 + rank)
for it in range(args.max_iters):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(it)
    if it % args.eval_interval == 0:
        val = estimate_loss()
        if is_master:
            print(f"step {it}: val loss {val:.5f}")
    X, Y = get_batch("train")
    total = torch.zeros(())
    for i, (x, y) in enumerate(zip(X.chunk(args.accumulate), Y.chunk(args.accumulate))):
        is_last = i == args.accumulate - 1
        with model.no_sync() if is_ddp and not is_last else nullcontext():
            with context:
                _, loss = model(x, y)
            loss = loss / args.accumulate
            loss.backward()
        total += loss.detach()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if ema is not None:
        with torch.no_grad():
            for old, new in zip(ema.parameters(), raw_model.parameters()):
                old.lerp_(new, 1 - args.ema)
    lossf = average(total)
    if is_master:
        print(f"iter {it}: loss {lossf:.5f}, norm {norm:.5f}")

if is_ddp:
    dist.destroy_process_group()
