"""A GPT training step in torch on 4 simulated ranks, compared with the model in plain torch on the same cores."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.table import Row, in_turns
from tplab import Mesh
from tplab.torch import GPT, GPTConfig, barrier, run
from tplab.torch.models.plain import PlainGPT

CONFIG = GPTConfig(vocab_size=1024, width=256, num_layers=4, num_heads=4, context=128)
BATCH, NUM_RANKS, STEPS, REPETITIONS = 8, 4, 3, 5


def train(model: nn.Module, ids: torch.Tensor, wait: Callable[[], object] = lambda: None) -> tuple[float, list[float]]:
    """(Seconds of the fastest step of AdamW after the first one, the losses)."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    losses, took = [], []
    for _ in range(STEPS + 1):
        wait()
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = model.loss(ids[:, :-1], ids[:, 1:])  # type: ignore[operator]
        loss.backward()
        optimizer.step()
        wait()
        took.append(time.perf_counter() - start)
        losses.append(float(loss.detach()))
    return min(took[1:]), losses


def measure() -> list[Row]:
    ids = torch.randint(CONFIG.vocab_size, (BATCH, CONFIG.context + 1), generator=torch.Generator().manual_seed(0))
    state = run(lambda: dict(GPT(CONFIG).state_dict()), Mesh(tp=1)).per_rank[0]
    losses: dict[str, list[float]] = {}

    def sharded(sequence_parallel: bool) -> float:
        program = lambda ids: train(GPT(CONFIG, sequence_parallel=sequence_parallel), ids, barrier)  # noqa: E731
        ranks = run(program, Mesh(tp=NUM_RANKS), ids).per_rank
        losses["ours"] = ranks[0][1]
        return max(seconds for seconds, _ in ranks)

    def plain() -> float:
        seconds, losses["plain"] = train(PlainGPT(CONFIG).load(state), ids)
        return seconds

    without, _, _ = in_turns(lambda: sharded(False), plain, REPETITIONS)
    ratio, ours, theirs = in_turns(lambda: sharded(True), plain, REPETITIONS)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # each rank's thread has its own OpenMP workers, which are slow to wake: use none
    on_one_core, _, _ = in_turns(lambda: sharded(True), plain, REPETITIONS)
    torch.set_num_threads(num_threads)
    for got, expected in zip(losses["ours"], losses["plain"]):  # a fast wrong answer is no figure
        assert abs(got - expected) < 1e-4 * expected, losses  # float32
    measured = f"{ratio:.2f} ({ours * 1e3:.0f} ms / {theirs * 1e3:.0f} ms), sequence-parallel; {without:.2f} without, "
    measured += f"where every rank computes all norms; {on_one_core:.2f} where torch computes with one thread"
    what = "GPT training step (width 256, 4 layers, 4 heads, batch 8 x 128 tokens), "
    what += "4 simulated ranks / unsharded, torch"
    return [Row(what, "<= 1.25", measured, ratio <= 1.25)]
