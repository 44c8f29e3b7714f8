"""An MLP step in torch, split over 8 simulated ranks, compared with the dense one on the same cores."""

from __future__ import annotations

import time

import torch

from benchmarks.table import Row, in_turns, seconds
from tplab import Mesh, P
from tplab.torch import all_reduce, barrier, copy_to, run

D, F, B, NUM_RANKS, REPETITIONS = 1024, 4096, 512, 8, 9
SPECS = (P(), P(None, "tp"), P("tp", None))


def step(x, a, b, enter=lambda t: t, leave=lambda t: t):
    """Forward and backward: the loss, and the gradients of x, a and b."""
    x, a, b = (tensor.detach().requires_grad_() for tensor in (x, a, b))
    loss = leave(torch.tanh(enter(x) @ a) @ b).square().mean()
    loss.backward()
    return loss.detach(), x.grad, a.grad, b.grad


def split_step(x, a, b):
    return step(x, a, b, lambda t: copy_to(t, "tp"), lambda t: all_reduce(t, "tp"))


def timed_split_step(x, a, b):
    """Seconds of the second of two steps, with the weights placed where they are used, as in training."""
    split_step(x, a, b)
    barrier()
    start = time.perf_counter()
    split_step(x, a, b)
    barrier()
    return time.perf_counter() - start


def measure() -> list[Row]:
    torch.manual_seed(0)
    whole = torch.randn(B, D), torch.randn(D, F) / D**0.5, torch.randn(F, D) / F**0.5
    mesh = Mesh(tp=NUM_RANKS)

    def call():
        return run(split_step, mesh, *whole, in_specs=SPECS, out_specs=(P(), *SPECS)).value

    for got, expected in zip(call(), step(*whole)):  # a fast wrong answer is no figure
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)  # float32, sums in another order

    def ours() -> float:
        return max(run(timed_split_step, mesh, *whole, in_specs=SPECS).per_rank)

    def dense() -> float:
        return seconds(lambda: step(*whole))

    ratio, split_seconds, dense_seconds = in_turns(ours, dense, REPETITIONS)
    ratio_of_calls, _, _ = in_turns(lambda: seconds(call), dense, REPETITIONS)
    measured = f"{ratio:.2f} ({split_seconds * 1e3:.0f} ms / {dense_seconds * 1e3:.0f} ms); "
    measured += f"with the call of run, which splits 35 MB and joins as much: {ratio_of_calls:.2f}"
    what = f"MLP step (D {D}, F {F}, B {B}, forward + backward), 8 simulated ranks / dense, torch"
    return [Row(what, "<= 1.05", measured, ratio <= 1.05)]
