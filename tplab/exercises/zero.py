"""The exercises of lab 17: repair a step that leaves ranks with different weights, and gather two matrices at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tplab.exercises.check import Answer, Verdict, but, grade
from tplab.exercises.exercise import Exercise, Framework, Seen, Tensors, Wrong, bytes_of_a_sum, bytes_to_gather
from tplab.exercises.slopes import slopes, weight
from tplab.mesh import Mesh
from tplab.sharding import P

RATE, DECAY = 0.5, 0.9
MESHES = (Mesh(dp=2), Mesh(dp=3), Mesh(dp=4), Mesh(dp=2, tp=2), Mesh(dp=1))


# --- the bug to repair ---------------------------------------------------------------------------------------------


def _step_tensors(rng: np.random.Generator, mesh: Mesh) -> Tensors:
    num_ranks = mesh.axis_size("dp")
    rows = 2 * num_ranks
    sizes = {"w": (rows, 3), "dw": (num_ranks * rows, 3), "m": (rows, 3)}
    return {name: rng.normal(size=size) for name, size in sizes.items()}


def _stepped(w: Any, dw: Any, m: Any, *, times: float = 1, decay: float = DECAY) -> tuple[Any, Any]:
    m = decay * m + times * dw.reshape(-1, *w.shape).mean(0)
    return w - RATE * m, m


def _stale(seen: Seen) -> np.ndarray:
    """This rank's rows are new, and all others are old."""
    whole = seen.parts(seen.tensors["w"])
    whole[seen.index] = seen.part(seen.want)
    return np.concatenate(whole)


def _each_its_own(seen: Seen) -> np.ndarray:
    """All rows are new, but each rank's are stepped with its own gradient."""
    w, dw, m = (seen.parts(array) for array in seen.tensors.values())
    return np.concatenate([_stepped(w[r], seen.parts(dw[r])[r], m[r])[0] for r in range(seen.size)])


STEP = Exercise(
    name="my_step",
    tensors=_step_tensors,
    specs={"w": P(), "dw": P("dp"), "m": P("dp")},
    plain=_stepped,
    results={"w": P(), "m": P("dp")},
    mistakes={
        "w": {
            "This rank's own rows are new, and all others are as they were before the step. From now on every rank "
            "has a different model.\nWhich collective gives each rank the rows of all others?": _stale,
            "This is a step with this rank's own gradient. The other ranks' gradients are missing.": (
                lambda seen: seen.of({**seen.tensors, "dw": seen.own["dw"]})
            ),
            "Each rank steps its rows with its own gradient. It needs the mean of all ranks' gradients for these "
            "rows.": _each_its_own,
            "The gradients of all ranks were added up, so the step is too long: take their mean.": lambda seen: (
                _stepped(*seen.tensors.values(), times=seen.size)[0]
            ),
            "Every row takes only 1/dp of its step. If you take the mean of all ranks' w: only one of them has stepped "
            "a row.": lambda seen: seen.tensors["w"] + (seen.want - seen.tensors["w"]) / seen.size,
            "This step leaves out the momentum of before.": lambda seen: _stepped(*seen.tensors.values(), decay=0)[0],
            "The momentum of before is multiplied by 0.9 first.": lambda seen: _stepped(
                *seen.tensors.values(), decay=1
            )[0],
            "w is stepped with the momentum of before this step. First compute the new m.": lambda seen: (
                seen.tensors["w"] - RATE * seen.tensors["m"]
            ),
        },
        "m": {
            "w is right, but m is as it was before the step.": lambda seen: seen.own["m"],
        },
    },
    fewest=lambda mesh, tensors: bytes_of_a_sum(tensors["w"], mesh, "dp"),
    excess=(
        "ZeRO 1 sends as much as one all_reduce of the gradients, which is a reduce_scatter and an all_gather. A rank "
        "needs the mean\nof its own rows only, then steps them with its own rows of m, and gathers what has changed."
    ),
    meshes=MESHES,
)


def check_step(fn: Callable[..., Any], framework: Framework = "torch") -> Verdict:
    """Check that `fn` is a step of gradient descent with momentum (m = 0.9 m + dw, w = w - 0.5 m) in which each rank
    has its own rows of m, and steps its own rows of w.

    w [D, F], the same on every rank   dw [D, F], this rank's own gradient   m [D/dp, F], its rows of the momentum
      ->   the new w [D, F] on every rank, and the new m [D/dp, F]
    """
    return grade(fn, STEP, framework)


# --- two matrices in one message -----------------------------------------------------------------------------------


def _layer_tensors(rng: np.random.Generator, mesh: Mesh) -> Tensors:
    num_ranks = mesh.axis_size("dp")
    width = 2 * num_ranks  # with one row per rank and matrix, different mistakes would look the same
    return {"x": rng.normal(size=(2 * width, width)), "piece": rng.normal(size=2 * width * width)}


def _layer(x: np.ndarray, piece: np.ndarray) -> np.ndarray:
    a, b = np.moveaxis(piece.reshape(*piece.shape[:-1], 2, x.shape[-1], x.shape[-1]), -3, 0)
    return np.maximum(x @ a, 0) @ b


def _own_rows_only(seen: Seen) -> np.ndarray:
    """This rank's piece of the gradient from only its own rows of the batch."""
    weights = seen.part(weight(seen.tensors["x"]))  # y has the same shape
    return seen.part(slopes(lambda piece: _layer(seen.own["x"], piece), seen.tensors["piece"], weights))


def _with(matrices: Callable[[np.ndarray, int, int], np.ndarray], relu: bool = True) -> Wrong:
    """The layer's result with `matrices(row, width, ranks)` [2, D, D] instead of a and b."""

    def wrong(seen: Seen) -> np.ndarray:
        x = seen.own["x"]
        a, b = matrices(seen.tensors["piece"], x.shape[1], seen.size)
        return np.maximum(x @ a, 0 if relu else -np.inf) @ b

    return wrong


LAYER = Exercise(
    name="my_layer",
    tensors=_layer_tensors,
    specs={"x": P("dp"), "piece": P("dp")},
    plain=_layer,
    results={"y": P("dp")},
    gradients=("x", "piece"),
    mistakes={
        "y": {
            "The relu is missing between the two matrices.": _with(lambda row, d, _: row.reshape(2, d, d), relu=False),
            "The two matrices are swapped: a comes first in the row of numbers, and b second.": _with(
                lambda row, d, _: row.reshape(2, d, d)[::-1]
            ),
            "You cut this rank's piece in two, as if it held a part of a and a part of b. It is one part of the row.\n"
            "On two ranks, rank 0 has all of a, and rank 1 has all of b. Gather first, and cut the row then.": _with(
                lambda row, d, ranks: row.reshape(ranks, 2, -1).swapaxes(0, 1).reshape(2, d, d)
            ),
            "Both matrices are transposed: this is relu(x @ a.T) @ b.T, as `F.linear` computes.": _with(
                lambda row, d, _: row.reshape(2, d, d).swapaxes(1, 2)
            ),
            "a is the first half of the row, and b the second. You cut the row as a matrix [D, 2 D] with a on its left "
            "and b on its right.": _with(lambda row, d, _: row.reshape(d, 2, d).swapaxes(0, 1)),
        },
        "dpiece": {
            "y and dx are right, but dpiece comes from this rank's own rows of the batch only. Every rank uses\n"
            "the piece, so the gradients of all ranks are added up. Which gather has a reduce_scatter as its backward "
            "pass?": _own_rows_only,
        },
    },
    fewest=lambda mesh, tensors: 3 * bytes_to_gather(tensors["piece"], mesh, "dp"),
    excess=(
        "A unit gathers its whole row once in the forward pass, and at most once more in the backward pass.\n"
        "Both matrices are in that row, and x stays on its rank."
    ),
    divided="dp",
    meshes=MESHES,
)


def check_layer(fn: Callable[..., Any], framework: Framework = "torch") -> Verdict:
    """Check that `fn` is relu(x @ a) @ b, whose two matrices are one row of numbers that the ranks share.

    x [B/dp, D], this rank's rows of the batch   piece [2 D D / dp]   ->   y [B/dp, D]
    The whole row has a [D, D], followed by b [D, D]. The gradient of `piece` is for all rows of the batch.
    """
    return grade(fn, LAYER, framework, _in_pieces)


def _in_pieces(answer: Answer) -> Verdict:
    """Refuse sums that every rank receives, and remark on the memory of a layer that gathers only once."""
    if any(event.op == "all_reduce" for trace in answer.traces for event in trace.events):
        but(
            "an all_reduce gives every rank the sums for all pieces.\nA rank needs the sum for its own piece only, "
            "which takes half of the bytes."
        )
    both = answer.traces[1]  # the forward pass and the backward pass
    if sum(event.op == "all_gather" for event in both.select(rank=0, kind="collective").events) == 1:
        answer.verdict.text += "\nIt gathers once: both matrices stay until the backward pass. A class can free them."
    return answer.verdict
