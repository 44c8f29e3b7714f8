"""Seconds of a plan that is executed: simulated ranks take what the forecast says, with matmuls and messages.

Kernels that are limited by memory (norms, softmax, AdamW) take no time there. A forecast counts them as a library fuses
them, while tplab's own layers run every one by itself: these seconds cannot agree, and are left out.
"""

from typing import Any

import numpy as np
import pytest

from tests.forecast.executed import Case, case
from tplab.cost import Chip, Cluster, Link
from tplab.forecast.step import step
from tplab.models.gpt import GPTConfig


class Matmuls(Cluster):
    """A cluster on which nothing but matmuls, attention and messages takes time: what has more FLOPs than bytes."""

    def compute_seconds(self, flops: float, bytes: float, *about: Any, **more: Any) -> float:
        return super().compute_seconds(flops, bytes, *about, **more) if flops > bytes else 0.0


CLUSTER = Matmuls("matmuls", Chip("chip", {"float32": 1e12}, 1e30, 1e12), Link("link", 0.0, 1e11))
CONFIG = GPTConfig(132, 96, 4, 12, 24, activation="swiglu", norm="rms", bias=False, hidden=288)


def difference(case: Case) -> float:
    """forecast / executed - 1."""
    ran = case.executed(CLUSTER).trace.makespan
    said = step(case.model, case.plan, CLUSTER, case.recipe.batch_size, case.config.context, "tplab")
    return said.seconds / ran - 1


CASES = {
    "one rank": case(CONFIG),
    "tp": case(CONFIG, tp=3),
    "tp, sequence parallel, recomputed": case(CONFIG, tp=2, checkpoint_every=1, sequence_parallel=True),
    "dp": case(CONFIG, dp=2, zero=0),
    "ZeRO 1": case(CONFIG, dp=3, zero=1),
    "ZeRO 2": case(CONFIG, dp=2, zero=2),
    "ZeRO 3": case(CONFIG, dp=2, zero=3),
    "ZeRO 3, recomputed": case(CONFIG, dp=2, zero=3, checkpoint_every=1),
    "dp, pp, tp": case(CONFIG, dp=2, pp=2, tp=2, zero=1, sequence_parallel=True),
    "dp, cp": case(CONFIG, dp=2, cp=2, zero=1),
    "interleaved": case(CONFIG, "interleaved_1f1b", pp=2, microbatches=4),
    "interleaved, in unequal groups": case(CONFIG, "interleaved_1f1b", pp=2, microbatches=5),
    "zb_h1": case(CONFIG, "zb_h1", pp=2, microbatches=4),
    "a V": case(CONFIG, "zb_v", pp=2, tp=2, microbatches=4),
    "two directions": case(CONFIG, "dualpipe", pp=2, microbatches=4),
}


@pytest.mark.parametrize("name", CASES)
def test_a_step_takes_on_simulated_ranks_what_the_forecast_says(name: str):
    assert abs(difference(CASES[name])) < 0.02


def drawn(seed: int) -> Case:
    """Any plan of up to eight ranks."""
    draw = np.random.default_rng(seed)
    sizes = [(a, b, c) for a in (1, 2, 3) for b in (1, 2, 3) for c in (1, 2, 3) if a * b * c <= 8]
    dp, pp, tp = sizes[int(draw.integers(len(sizes)))]
    return case(
        CONFIG,
        str(draw.choice(["gpipe", "one_f_one_b", "zb_h1"])),
        dp=dp,
        pp=pp,
        tp=tp,
        zero=int(draw.integers(0, 2 if pp > 1 else 4)),
        sequence_parallel=bool(draw.integers(2)),
        checkpoint_every=1 if draw.integers(2) else None,
        microbatches=int(draw.integers(1, 4)) * pp,
    )


@pytest.mark.parametrize("seed", range(8))
def test_so_does_a_step_of_any_plan(seed: int):
    assert abs(difference(drawn(seed))) < 0.02, drawn(seed).plan
