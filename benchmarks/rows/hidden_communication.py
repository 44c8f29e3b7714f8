"""Communication that the overlapped layers hide on a modelled H100 node: width 8192, 8192 tokens, tp 8, bfloat16.

The program runs on meta tensors, which have sizes but no numbers, and the modelled clock times messages and computing.
All communication can be hidden, or as much as there is computing, if that takes less time.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.table import Row
from tplab import Mesh, P
from tplab.torch import AsyncLinear, ParallelMLPBlock, run
from tplab.torch.layers.overlap import BlockingLinear
from tplab.trace import Overlap, overlap

WIDTH, TOKENS, NUM_RANKS = 8192, 8192, 8
FEATURES = P(None, "tp")


def layers(linear: type[AsyncLinear] | type[BlockingLinear], hidden: int) -> nn.Module:
    """The two layers that communicate, and nothing else."""
    return nn.Sequential(linear(WIDTH, hidden, "tp", mode="gather"), linear(hidden, WIDTH, "tp", mode="scatter"))


def block(overlapped: bool, hidden: int) -> nn.Module:
    return ParallelMLPBlock(WIDTH, hidden, "tp", overlap=overlapped)


def step(x: Tensor, make, *args) -> None:
    """Forward and backward."""
    with torch.device("meta"):
        model = make(*args).to(x.dtype)
    model(x.requires_grad_()).sum().backward()


def found(make, *args) -> tuple[Overlap, float]:
    """(The hidden communication, the modelled seconds)."""
    x = torch.empty(TOKENS, WIDTH, dtype=torch.bfloat16, device="meta")
    trace = run(lambda x: step(x, make, *args), Mesh(tp=NUM_RANKS), x, in_specs=(FEATURES,), cluster="h100").trace
    return overlap(trace), trace.makespan


def measure() -> list[Row]:
    hidden = 4 * WIDTH
    bare, seconds = found(layers, AsyncLinear, hidden)
    _, blocking = found(layers, BlockingLinear, hidden)
    whole, block_seconds = found(block, True, hidden)
    _, blocking_block = found(block, False, hidden)
    narrow, _ = found(layers, AsyncLinear, WIDTH)
    measured = (
        f"{bare.share_of_possible:.1%}, step {seconds * 1e3:.2f} ms, blocking {blocking * 1e3:.2f} ms; "
        f"with norm, activation and residual {whole.share_of_possible:.1%}, {block_seconds * 1e3:.2f} ms, blocking "
        f"{blocking_block * 1e3:.2f} ms; at expansion 1, where a hop is longer than its product, {narrow.share:.1%}"
    )
    what = f"communication hidden by the overlapped layers, {WIDTH} -> {hidden} -> {WIDTH}, {TOKENS} tokens, tp "
    what += f"{NUM_RANKS}, modelled H100 node"
    ok = min(bare.share_of_possible, whole.share_of_possible) >= 0.9
    return [Row(what, ">= 90% of what can be hidden", measured, ok)]
