"""The exercises of lab 04: repair a bias that is added once per rank, and write a block with half as many sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tplab.exercises.check import Verdict, grade
from tplab.exercises.exercise import Exercise, Framework, Seen, Tensors, Wrong, added_over, bytes_of_a_sum, own_part
from tplab.exercises.plain_block import (
    BLOCK_SPECS,
    TOLERANCE,
    block_tensors,
    causal_attention,
    gelu_mlp,
    one_norm,
    rms_norm,
)
from tplab.exercises.slopes import slopes, weight
from tplab.exercises.split_a_layer import APART, OF_A_BIAS
from tplab.sharding import P

ROWS = P("tp")

# --- the bug to repair ---------------------------------------------------------------------------------------------


DOWN = Exercise(
    name="down",
    tensors=lambda rng, mesh: {
        "hidden": rng.integers(-3, 4, (2, 3, 12)).astype(float),
        "b": rng.integers(-3, 4, (12, 4)).astype(float),
        "bias": np.array([10.0, 20.0, 30.0, 40.0]),
    },
    specs={"hidden": P(None, None, "tp"), "b": ROWS, "bias": P()},
    plain=lambda hidden, b, bias: hidden @ b + bias,
    results={"y": P()},
    gradients=("hidden", "b", "bias"),
    mistakes={
        "y": {
            "y has the bias once per rank: each rank adds it to its own term, and then the terms are added.": (
                lambda seen: seen.want + (seen.size - 1) * seen.own["bias"]
            ),
            "The bias is missing.": lambda seen: seen.want - seen.own["bias"],
            "These are the mean of the ranks' terms and the bias. Add the terms up.": (
                lambda seen: seen.own["bias"] + (seen.want - seen.own["bias"]) / seen.size
            ),
            "y has the bias R times too often: each rank adds it before the sum, and it is added once more after "
            "it.": lambda seen: seen.want + seen.size * seen.own["bias"],
            "This is this rank's own term and the bias: the sum over the ranks is missing.": own_part,
        },
        "dbias": OF_A_BIAS,
        "dhidden": {
            APART: added_over(2),
        },
    },
    fewest=lambda mesh, tensors: bytes_of_a_sum(tensors["hidden"] @ tensors["b"], mesh),
    divided="tp",
    not_with=("RowParallelLinear",),
)


def check_down(fn: Callable[..., Any], framework: Framework = "torch") -> Verdict:
    """Check that `fn` is a row-parallel layer with a bias, with the right gradients.

    hidden [B, S, H/tp]   b [H/tp, D]   bias [D]   ->   hidden @ b + bias [B, S, D], the same on every rank of "tp"
    """
    return grade(fn, DOWN, framework)


# --- a block with one norm -----------------------------------------------------------------------------------------


def _two_norms(seen: Seen) -> np.ndarray:
    """The result if the MLP reads the sum of x and attention."""
    x, scale, *heads, a, b = seen.tensors.values()
    x = x + causal_attention(rms_norm(x, scale), *heads)
    return x + gelu_mlp(rms_norm(x, scale), a, b)


def _through(tensors: Tensors, path: str) -> np.ndarray:
    """The part of dx that comes through attention, or through the MLP."""
    x, scale, *heads, a, b = tensors.values()
    if path == "attention":
        return slopes(lambda one: causal_attention(rms_norm(one, scale), *heads), x)
    return slopes(lambda one: gelu_mlp(rms_norm(one, scale), a, b), x)


def _one_way(summed: str, alone: str) -> Wrong:
    """The mistake of adding up the gradients of only one of the paths from h, through attention or the MLP."""
    return lambda seen: weight(seen.want) + _through(seen.tensors, summed) + _through(seen.own, alone)


PARALLEL_BLOCK = Exercise(
    name="parallel_block",
    tensors=block_tensors,
    specs=BLOCK_SPECS,
    plain=one_norm,
    results={"y": P()},
    gradients=tuple(BLOCK_SPECS),
    mistakes={
        "y": {
            "This is x and this rank's own terms: the sum over the ranks is missing.": own_part,
            "y has x once per rank. Every rank has all of x, so add up only the terms of the heads and of the "
            "hidden features.": lambda seen: seen.want + (seen.size - 1) * seen.own["x"],
            "x itself is missing: y = x + ...": lambda seen: seen.want - seen.own["x"],
            "In your block the MLP reads what attention has written. In this exercise both read the same "
            "h.": _two_norms,
        },
        "dx": {
            "This is this rank's own part of dx: nothing adds up the gradients of the ranks. Does f or g do "
            "that?": own_part,
            "The gradient of the residual is added up as well, although it is the same on every rank. f belongs where "
            "divided work begins, after the norm.": lambda seen: seen.want + (seen.size - 1) * weight(seen.want),
            "y is right, but the gradient of the residual is R times too small: each rank adds 1/R of x, and receives "
            "the gradient of that part only.\nAdd x after the sum.": lambda seen: (
                seen.want - (1 - 1 / seen.size) * weight(seen.want)
            ),
            "What comes through the heads and the hidden features is R times too large: dy is the same on every rank, "
            "and it was added up.\nThe backward pass of reduce_from does not add; that of ring_all_reduce or "
            "all_gather does.": lambda seen: seen.size * (seen.want - weight(seen.want)) + weight(seen.want),
            "The gradients that come through attention are added up, but h also goes to a.": _one_way(
                "attention", "mlp"
            ),
            "The gradients that come through a are added up, but h also goes to the heads.": _one_way(
                "mlp", "attention"
            ),
        },
        "dscale": {
            "y and dx are right, but the gradient of scale is this rank's own part, because f is before the norm.\n"
            "Put f after the norm.": own_part,
        },
    },
    fewest=lambda mesh, tensors: 2 * bytes_of_a_sum(tensors["x"], mesh),
    excess=(
        "Attention and the MLP read the same h, and their terms are added to each other: one sum forward and one "
        "backward will do. With f after the norm, the gradient of scale needs none, and no weight is ever sent."
    ),
    divided="tp",
    tolerance=TOLERANCE,
)


def check_parallel_block(fn: Callable[..., Any], framework: Framework = "torch") -> Verdict:
    """Check that `fn` is the block y = x + attention(h) + mlp(h) with h = norm(x), with the right gradients.

    x [B, S, D]   scale [D]   q, k, v [n/tp, D, d]   o [n/tp, d, D]   a [D, H/tp]   b [H/tp, D]
      ->   y [B, S, D], the same on every rank of axis "tp"; norm: RMS, eps 1e-6; attention: causal; mlp: gelu
    """
    return grade(fn, PARALLEL_BLOCK, framework)
