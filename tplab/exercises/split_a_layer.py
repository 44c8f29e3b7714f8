"""The exercises of lab 01: repair a backward pass, add a bias once, split a gated layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tplab.exercises.check import Verdict, grade
from tplab.exercises.exercise import (
    Exercise,
    Framework,
    Mistakes,
    Seen,
    Tensors,
    added_over,
    added_up_again,
    bytes_of_a_sum,
    own_part,
)
from tplab.exercises.slopes import slopes
from tplab.mesh import Mesh
from tplab.sharding import P

COLUMNS, ROWS = P(None, "tp"), P("tp", None)


def finite_differences(loss: Callable[[np.ndarray], float], x: np.ndarray, step: float = 1e-5) -> np.ndarray:
    """The slope of `loss` along each entry of x, from its values alone: (loss(x + step) - loss(x - step)) / (2 step).

    x [...], float64   ->   the gradient [...], accurate to about step^2
    """
    slopes = np.zeros_like(x)
    for place in np.ndindex(x.shape):
        up, down = x.copy(), x.copy()
        up[place] += step
        down[place] -= step
        slopes[place] = (loss(up) - loss(down)) / (2 * step)
    return slopes


# --- the bug to repair ---------------------------------------------------------------------------------------------


def _slopes(x: np.ndarray, a: np.ndarray, b: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, ...]:
    """da, db and dx from finite differences, since a formula could share the learner's mistake."""

    def loss(x: np.ndarray, a: np.ndarray, b: np.ndarray) -> float:
        return float(((np.tanh(x @ a) @ b - target) ** 2).sum())

    return (
        finite_differences(lambda one: loss(x, one, b), a),
        finite_differences(lambda one: loss(x, a, one), b),
        finite_differences(lambda one: loss(one, a, b), x),
    )


def _formulas(seen: Seen, dz: Callable[[np.ndarray, np.ndarray], np.ndarray], whole: bool = True) -> Tensors:
    """This rank's da, db and term of dx, from a formula for dz, of z and the whole y.

    `whole` = False: z is this rank's term alone.
    """
    x, a, b = seen.own["x"], seen.own["a"], seen.own["b"]
    y, whole_y = np.tanh(x @ a), np.tanh(x @ seen.tensors["a"])
    error = dz(whole_y @ seen.tensors["b"] if whole else y @ b, whole_y)
    du = (error @ b.T) * (1 - y**2)
    return {"da": x.T @ du, "db": y.T @ error, "dx": du @ a.T}


def _backward_mistakes(result: str, dim: int) -> Mistakes:
    """Those of da or db, whose pieces are cut along `dim`."""
    return {
        "Here dz compares z with the hidden activation y. What does the loss compare z with?": lambda seen: _formulas(
            seen, lambda z, y: 2 * (z - y) if z.shape == y.shape else z * np.nan
        )[result],
        "This is half the right value. The derivative of (z - target)**2 is 2 * (z - target), and nothing has to "
        "be divided by the number of ranks.": lambda seen: seen.want / 2,
        "This is the gradient of the mean of all squares. The loss is their sum.": lambda seen: (
            seen.want / seen.tensors["target"].size
        ),
        "The sign is wrong: dz is 2 * (z - target), and this is the gradient for 2 * (target - z).": lambda seen: (
            -seen.want
        ),
        "Here z is this rank's own term. The loss needs the sum of all terms: one all_reduce.": lambda seen: _formulas(
            seen, lambda z, y: 2 * (z - seen.own["target"]), whole=False
        )[result],
        f"The ranks' pieces of {result} are added up. Along tp each rank has a piece of its own, and the gradients "
        "of different pieces must stay apart.\n(Along dp, where ranks have copies of the weights, you would add.)": (
            added_over(dim)
        ),
    }


def _backward_tensors(rng: np.random.Generator, mesh: Mesh) -> Tensors:
    """On two ranks, the tutorial's own 2 x 2 example: y and the target have the same shape, which hides the bug."""
    if mesh.axis_size("tp") == 2:
        x, a, b = rng.normal(size=(3, 2, 2))
        return {"x": x, "a": a, "b": b, "target": np.array([[-0.5, 0.5], [-0.5, 0.5]])}
    sizes = {"x": (5, 3), "a": (3, 12), "b": (12, 4), "target": (5, 4)}
    return {name: rng.normal(size=size) / 2 for name, size in sizes.items()}


BACKWARD = Exercise(
    name="backward",
    tensors=_backward_tensors,
    specs={"x": P(), "a": COLUMNS, "b": ROWS, "target": P()},
    plain=_slopes,
    results={"da": COLUMNS, "db": ROWS},
    also={"dx": P()},
    mistakes={
        "da": _backward_mistakes("da", dim=1),
        "db": _backward_mistakes("db", dim=0),
        "dx": {
            "da and db are right. This dx is only the rank's own term; the other ranks' columns of A contribute "
            "too.": lambda seen: _formulas(seen, lambda z, y: 2 * (z - seen.own["target"]))["dx"],
        },
    },
    fewest=lambda mesh, tensors: bytes_of_a_sum(tensors["target"], mesh),
    divided="tp",
    tolerance=1e-7,  # the accuracy of finite differences
)


def check_backward(fn: Callable[..., Any], framework: Framework = "torch") -> Verdict:
    """Check that `fn` returns the gradients of sum((tanh(x @ a) @ b - target)**2), compared with finite differences.

    x [B, D]   a [D, F/tp]   b [F/tp, K]   target [B, K]   ->   da [D, F/tp], db [F/tp, K], this rank's pieces

    It may also return dx [B, D], before or after them.
    """
    return grade(fn, BACKWARD, framework)


# --- a bias, once --------------------------------------------------------------------------------------------------


def _columns_of_x(seen: Seen, index: int) -> np.ndarray:
    """The columns of x for the rows of w that the rank at `index` holds."""
    width = len(seen.own["w"])
    return seen.tensors["x"][:, index * width : (index + 1) * width]


APART = (
    "The ranks' pieces of this gradient are added up. Along tp each rank has a piece of its own, and the gradients of "
    "different pieces must stay apart.\nf (copy_to) belongs where a tensor that all ranks share enters divided work."
)


OF_A_BIAS: Mistakes = {
    "y is right, but the bias learns R times too slowly. Each rank adds 1/R of it, and receives the "
    "gradient of that part only.\nWhich gradient would the bias receive if it were added after the sum?": (
        lambda seen: seen.want / seen.size
    ),
    "y is right, but on this rank the bias receives no gradient, because only one rank adds it. For "
    "inference that is enough;\nin training, the ranks' copies of the bias would soon differ.": (
        lambda seen: seen.want * (seen.index == 0),
        lambda seen: seen.want * (seen.index == seen.size - 1),
    ),
    "y is right, but on each rank the bias is added once and taken off R - 1 times, and its gradient counts "
    "both.\nAdd the bias once, after the sum.": lambda seen: (2 - seen.size) * seen.want,
}
"""The mistakes with a bias that give the right result and a wrong gradient."""

ROW_LINEAR = Exercise(
    name="row_linear",
    tensors=lambda rng, mesh: {
        "x": rng.integers(-3, 4, (3, 12)).astype(float),
        "w": rng.integers(-3, 4, (12, 4)).astype(float),
        "bias": np.array([10.0, 20.0, 30.0, 40.0]),
    },
    specs={"x": P(), "w": ROWS, "bias": P()},
    plain=lambda x, w, bias: x @ w + bias,
    results={"y": P()},
    gradients=("w", "bias"),
    mistakes={
        "y": {
            "Every rank adds the bias, so the sum has it R times. Add it once, after the sum.": lambda seen: (
                seen.want + (seen.size - 1) * seen.own["bias"]
            ),
            "The bias is missing.": lambda seen: seen.want - seen.own["bias"],
            "This is the rank's own term: the sum over the ranks is missing.": lambda seen: (
                _columns_of_x(seen, seen.index) @ seen.own["w"] + seen.own["bias"]
            ),
            "Every rank took the first columns of x. The rank at index i holds rows i * width up to (i + 1) * width of "
            "w, and needs the same columns of x.": lambda seen: (
                _columns_of_x(seen, 0) @ sum(seen.parts(seen.tensors["w"])) + seen.own["bias"]
            ),
        },
        "dbias": OF_A_BIAS,
        "dw": {
            APART: added_over(0),
            "y is right, but this is R times too large: dy is the same on every rank, and it was added up.\n"
            "The backward pass of all_gather, ring_all_reduce and copy_to adds up gradients. That of reduce_from does "
            "not.": added_up_again,
        },
    },
    fewest=lambda mesh, tensors: bytes_of_a_sum(tensors["x"] @ tensors["w"], mesh),
    divided="tp",
    not_with=("RowParallelLinear",),
)


def check_row_linear(fn: Callable[..., Any], framework: Framework = "torch") -> Verdict:
    """Check that `fn` is a row-parallel layer with a bias for replicated input, with the right gradients of w and bias.

    x [B, D]   w [D/tp, K]   bias [K]   ->   x @ w + bias [B, K], the same on every rank of axis "tp"
    """
    return grade(fn, ROW_LINEAR, framework)


# --- a gated layer -------------------------------------------------------------------------------------------------


def _gated(x: np.ndarray, a: np.ndarray, c: np.ndarray, b: np.ndarray, for_c: np.ndarray | None = None) -> np.ndarray:
    """(silu(x @ a) * (x @ c)) @ b. `for_c` is an x for c alone."""
    u = x @ a
    return u / (1 + np.exp(-u)) * ((x if for_c is None else for_c) @ c) @ b


def _through(way: str, x: np.ndarray, a: np.ndarray, c: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The part of dx that comes through a, or through c."""
    return slopes(lambda one: _gated(one, a, c, b, x) if way == "a" else _gated(x, a, c, b, one), x)


def _one_way(summed: str, alone: str) -> Mistakes:
    """The mistake of adding up the gradients of only one of the paths from x, through a or c."""
    return {
        f"The gradients that come through {summed} are added up, but x also goes through {alone}.": (
            lambda seen: _through(summed, *seen.tensors.values()) + _through(alone, *seen.own.values())
        )
    }


GATED = Exercise(
    name="gated",
    tensors=lambda rng, mesh: {
        "x": rng.normal(size=(3, 4)),
        "a": rng.normal(size=(4, 12)),
        "c": rng.normal(size=(4, 12)),
        "b": rng.normal(size=(12, 4)),
    },
    specs={"x": P(), "a": COLUMNS, "c": COLUMNS, "b": ROWS},
    plain=_gated,
    results={"z": P()},
    gradients=("x", "a", "c", "b"),
    mistakes={
        "z": {
            "This is the rank's own term. b is split by rows, so the sum is missing.": own_part,
            "silu is applied to x @ c. It belongs to x @ a.": (
                lambda seen: seen.of({**seen.tensors, "a": seen.tensors["c"], "c": seen.tensors["a"]})
            ),
        },
        "dx": {
            "This is the rank's own part of dx: nothing adds up the gradients of the ranks. Does f or g do "
            "that?": own_part,
            **_one_way("a", "c"),
            **_one_way("c", "a"),
        },
        **{f"d{name}": {APART: added_over(0 if name == "b" else 1)} for name in "acb"},
    },
    fewest=lambda mesh, tensors: 2 * bytes_of_a_sum(tensors["x"], mesh),
    excess=(
        "Two sums will do: one forward, of the ranks' terms of z, and one backward, of their parts of dx. So x passes "
        "through one f, and what comes out through one g."
    ),
    divided="tp",
    not_with=("ColumnParallelLinear", "RowParallelLinear", "ParallelMLP"),
)


def check_gated(fn: Callable[..., Any], framework: Framework = "torch") -> Verdict:
    """Check that `fn` is the gated layer (silu(x @ a) * (x @ c)) @ b, with the right gradients.

    x [B, D]   a, c [D, F/tp]   b [F/tp, K]   ->   z [B, K], the same on every rank of axis "tp"
    """
    return grade(fn, GATED, framework)
