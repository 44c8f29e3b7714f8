"""The exercise of lab 12: a pipeline as one loop, which takes the outputs of the wrong ticks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tplab.exercises.check import Exercise, Mistake, Seen, Tensors, Verdict, grade, weight
from tplab.mesh import Mesh
from tplab.sharding import P

MICROBATCHES, ROWS, WIDTH = 5, 1, 3


def _plain(tensors: Tensors) -> Tensors:
    """ys = tanh(... tanh(tanh(xs @ w[0]) @ w[1]) ...), and the gradient of sum(ys * weight)."""
    w, xs = tensors["w"], tensors["xs"]
    kept = [xs]
    for one in w:
        kept.append(np.tanh(kept[-1] @ one))
    dw, dy = np.zeros_like(w), weight(kept[-1])
    for place in reversed(range(len(w))):
        du = dy * (1 - kept[place + 1] ** 2)
        dw[place] = np.tensordot(kept[place], du, ([0, 1], [0, 1]))
        dy = du @ w[place].T
    return {"ys": kept[-1], "dw": dw}


def _whole(seen: Seen, num_stages: int) -> np.ndarray:
    """What the first so many stages give."""
    x = seen.tensors["xs"]
    for one in seen.tensors["w"][:num_stages]:
        x = np.tanh(x @ one)
    return x


def _too_early(seen: Seen) -> np.ndarray:
    """The last rank's outputs of the first ticks: zeros go through the stages before the first microbatch comes."""
    last = seen.mesh.axis_size("pp") - 1
    return np.concatenate([np.zeros_like(seen.want)[:last], seen.want])[:MICROBATCHES]


def _of_all_ranks(seen: Seen) -> np.ndarray:
    """Of the same ticks, from every rank: rank r is `last - r` microbatches ahead, and then repeats the last one."""
    ranks = seen.mesh.axis_size("pp")
    total = np.zeros_like(seen.want)
    for rank in range(ranks):
        outputs = _whole(seen, rank + 1)
        total += outputs[np.minimum(np.arange(MICROBATCHES) + ranks - 1 - rank, MICROBATCHES - 1)]
    return total


def _once_too_late(seen: Seen) -> np.ndarray:
    return np.concatenate([seen.want[1:], seen.want[-1:]])


PIPELINE = Exercise(
    name="my_pipeline",
    tensors=lambda rng, mesh: {
        "w": rng.integers(-3, 4, (mesh.axis_size("pp"), WIDTH, WIDTH)) / 4,
        "xs": rng.integers(-2, 3, (MICROBATCHES, ROWS, WIDTH)).astype(float),
    },
    specs={"w": P("pp"), "xs": P()},
    plain=_plain,
    results={"ys": P()},
    gradients=("w",),
    mistakes=(
        Mistake(
            "ys",
            "These are the last rank's outputs from tick 0 on. In its first ticks no microbatch has reached it yet,\n"
            "so it computes with zeros. In which tick does microbatch 0 reach the last rank?",
            _too_early,
        ),
        Mistake("ys", "It begins one tick too late: microbatch 0 is missing.", _once_too_late),
        Mistake("ys", "Every rank has added its own output. Only those of the last rank are wanted.", _of_all_ranks),
        Mistake("ys", "All outputs are zero: do you take them from the rank that has them?", lambda s: 0 * s.want),
    ),
    meshes=(Mesh(pp=2), Mesh(pp=3), Mesh(pp=4), Mesh(pp=1)),
)


def check_pipeline(fn: Callable[..., Any]) -> Verdict:
    """Whether `fn(w, xs)`, a program of JAX, sends microbatches through the stages tanh(x @ w[0]) of all ranks.

    w [1, D, D], this rank's own   xs [m, B, D]   ->   [m, B, D], the same on every rank of "pp"
    """
    return grade(fn, PIPELINE, "jax")
