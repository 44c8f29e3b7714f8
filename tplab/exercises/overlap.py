"""The exercises of lab 08: products that must be right, and whose communication must be hidden."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tplab.exercises.check import Exercise, Mistake, Seen, Tensors, Verdict, grade, raised
from tplab.mesh import Mesh
from tplab.sharding import P
from tplab.trace.overlap import Overlap, overlap

FEATURES, ROWS, COLUMNS = P(None, "tp"), P("tp"), P(None, "tp")
MESHES = (Mesh(tp=2), Mesh(tp=3), Mesh(tp=4), Mesh(dp=2, tp=2), Mesh(tp=1))
TOKENS, WIDTH, NUM_RANKS = 8192, 8192, 8
ENOUGH = 0.9
"""The share of what can be hidden that is asked for, on eight ranks of a modelled H100 node."""


def _tensors(rng: np.random.Generator, mesh: Mesh) -> Tensors:
    size = 2 * mesh.axis_size("tp")
    return {"x": rng.integers(-3, 4, (3, size)).astype(float), "w": rng.integers(-3, 4, (2 * size, size)).astype(float)}


def _plain(tensors: Tensors) -> Tensors:
    return {"y": tensors["x"] @ tensors["w"].T}


def _in_order(seen: Seen) -> np.ndarray:
    """The k-th piece to arrive, multiplied with the columns of rank k."""
    num_ranks, index = seen.mesh.axis_size("tp"), seen.mesh.index(seen.rank, "tp")
    pieces = np.split(seen.tensors["x"], num_ranks, 1)
    columns = np.split(seen.own["w"], num_ranks, 1)
    return np.sum([pieces[(index - k) % num_ranks] @ columns[k].T for k in range(num_ranks)], 0)


def _own_piece(seen: Seen) -> np.ndarray:
    num_ranks, index = seen.mesh.axis_size("tp"), seen.mesh.index(seen.rank, "tp")
    return seen.own["x"] @ np.split(seen.own["w"], num_ranks, 1)[index].T


def _own_part(seen: Seen) -> np.ndarray:
    """What this rank alone adds to its own part of the sum."""
    num_ranks, index = seen.mesh.axis_size("tp"), seen.mesh.index(seen.rank, "tp")
    return np.split(seen.own["x"] @ seen.own["w"].T, num_ranks, 1)[index]


def _next_part(seen: Seen) -> np.ndarray:
    """The sum that belongs to the rank before or after."""
    num_ranks, index = seen.mesh.axis_size("tp"), seen.mesh.index(seen.rank, "tp")
    return np.split(_plain(seen.tensors)["y"], num_ranks, 1)[(index + 1) % num_ranks]


GATHER = Exercise(
    name="gather_product",
    tensors=_tensors,
    specs={"x": FEATURES, "w": ROWS},
    plain=_plain,
    results={"y": FEATURES},
    mistakes=(
        Mistake("y", "The k-th piece to arrive is that of rank i - k: multiply it with *its* columns of w.", _in_order),
        Mistake("y", "It is the product of this rank's own piece; nothing that arrives is added.", _own_piece),
    ),
    meshes=MESHES,
)

SCATTER = Exercise(
    name="product_scatter",
    tensors=_tensors,
    specs={"x": FEATURES, "w": COLUMNS},
    plain=_plain,
    results={"y": FEATURES},
    mistakes=(
        Mistake("y", "It is what this rank alone adds to its part: the sum that travels must be added to.", _own_part),
        Mistake("y", "It is the sum of the next rank's part: which part must be the last one to add?", _next_part),
    ),
    meshes=MESHES,
)


def check_gather_product(fn: Callable[..., Any]) -> Verdict:
    """Whether `fn` is all_gather(x) @ w.T, and hides what it sends.

    x [T, D/tp]   w [F/tp, D]   ->   y [T, F/tp]
    """
    return _graded(fn, GATHER)


def check_product_scatter(fn: Callable[..., Any]) -> Verdict:
    """Whether `fn` is reduce_scatter(x @ w.T), and hides what it sends.

    x [T, D/tp]   w [F, D/tp]   ->   y [T, F/tp]
    """
    return _graded(fn, SCATTER)


def _graded(fn: Callable[..., Any], exercise: Exercise) -> Verdict:
    verdict = grade(fn, exercise)
    if not verdict.passed:
        return verdict
    try:
        found = hidden(fn, exercise)
    except Exception as error:
        return Verdict(False, raised(error, fn, exercise.name, Mesh(tp=NUM_RANKS)))
    share = f"{100 * found.share_of_possible:.0f} %"
    if found.share_of_possible < ENOUGH:
        return Verdict(
            False,
            f"{exercise.name}: the numbers are right, and {share} of the communication that could be hidden is: on the "
            f"modelled H100 node, with {TOKENS} tokens, from width {WIDTH} to {4 * WIDTH} or back.\n"
            "What stands between `start` and `wait`?",
        )
    return Verdict(True, f"{verdict.text}\nAnd {share} of the communication that can be hidden is hidden.")


def hidden(fn: Callable[..., Any], exercise: Exercise) -> Overlap:
    """How much of what `fn` sends is hidden at a real size: on meta tensors, of which only the sizes are real."""
    import torch

    from tplab.torch import run

    inputs, outputs = (WIDTH, 4 * WIDTH) if exercise is GATHER else (4 * WIDTH, WIDTH)  # the two layers of an MLP
    x = torch.empty(TOKENS, inputs, dtype=torch.bfloat16, device="meta")
    w = torch.empty(outputs, inputs, dtype=torch.bfloat16, device="meta")
    specs = tuple(exercise.specs.values())
    return overlap(run(fn, Mesh(tp=NUM_RANKS), x, w, in_specs=specs, cluster="h100").trace)
