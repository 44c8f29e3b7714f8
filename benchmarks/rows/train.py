"""Training in float64 on 2 x 2 x 2 ranks compared with one device, on the same cores, in both frameworks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import pairwise

import torch

import tplab.jax  # before JAX is used
import tplab.torch
from benchmarks.table import Row
from tplab import Mesh
from tplab.data.text import Text, python_source
from tplab.jax.private import in_float64
from tplab.models.gpt import GPTConfig
from tplab.training.progress import Progress, Trained
from tplab.training.recipe import Recipe

CONFIG = GPTConfig(vocab_size=256, width=128, num_layers=4, num_heads=4, context=128)
RECIPE = Recipe(steps=50, batch_size=16)
MESH = Mesh(dp=2, pp=2, tp=2)


def seconds_per_step(train: Callable[..., Trained], text: Text, mesh: Mesh) -> tuple[float, list[float]]:
    """(The median of the steps after the first five, which compile and warm up; the losses)."""
    ends: list[float] = []

    def note(progress: Progress) -> None:
        ends.append(time.perf_counter())

    losses = train(CONFIG, text, mesh, RECIPE, show=note).losses
    took = [after - before for before, after in pairwise(ends[4:])]
    return statistics.median(took), losses


def measure() -> list[Row]:
    torch.set_default_dtype(torch.float64)
    with in_float64():
        return both(Text(python_source()))


def both(text: Text) -> list[Row]:
    rows = []
    for name, train, most in (("torch", tplab.torch.train, 3.0), ("JAX", tplab.jax.train, 2.0)):
        theirs, expected = seconds_per_step(train, text, Mesh(tp=1))
        ours, losses = seconds_per_step(train, text, MESH)
        for got, want in zip(losses, expected):  # a fast wrong answer is no figure
            assert abs(got - want) < 1e-6, (got, want)
        what = f"50 steps of train (width 128, 4 layers, 16 x 128 bytes), 2 x 2 x 2 ranks / one device, float64, {name}"
        measured = f"{ours / theirs:.2f} ({ours * 1e3:.0f} ms / {theirs * 1e3:.0f} ms per step)"
        rows.append(Row(what, f"<= {most:g}", measured, ours / theirs <= most))
    return rows
