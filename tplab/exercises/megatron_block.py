"""The exercises of lab 04: mend a bias that counts once a rank, write a block with half the sums, split its tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tplab.exercises.check import (
    Exercise,
    Framework,
    Mistake,
    Seen,
    Tensors,
    Verdict,
    added_up_again,
    grade,
    own_part,
    weight,
)
from tplab.exercises.plain_block import causal_attention, gelu_mlp, one_norm, rms_norm
from tplab.mesh import Mesh
from tplab.sharding import P

COLUMNS, ROWS, HEADS, TOKENS = P(None, "tp"), P("tp"), P("tp"), P(None, "tp")

# --- the bug to repair ---------------------------------------------------------------------------------------------


def _down(tensors: Tensors) -> Tensors:
    """y = hidden @ b + bias, and the gradients of sum(y * weight)."""
    hidden, b, bias = (tensors[name] for name in ("hidden", "b", "bias"))
    y = hidden @ b + bias
    dy = weight(y)
    db = np.tensordot(hidden, dy, ([0, 1], [0, 1]))
    return {"y": y, "dhidden": dy @ b.T, "db": db, "dbias": dy.sum((0, 1))}


def _added_before(seen: Seen) -> np.ndarray:
    return seen.want + (seen.mesh.axis_size("tp") - 1) * seen.own["bias"]


def _on_the_first_rank(seen: Seen) -> np.ndarray:
    return seen.want * (seen.mesh.index(seen.rank, "tp") == 0)


DOWN = Exercise(
    name="down",
    tensors=lambda rng, mesh: {
        "hidden": rng.integers(-3, 4, (2, 3, 12)).astype(float),
        "b": rng.integers(-3, 4, (12, 4)).astype(float),
        "bias": np.array([10.0, 20.0, 30.0, 40.0]),
    },
    specs={"hidden": P(None, None, "tp"), "b": ROWS, "bias": P()},
    plain=_down,
    results={"y": P()},
    gradients=("hidden", "b", "bias"),
    mistakes=(
        Mistake(
            "y",
            "It has the bias once for every rank. Each of them adds it to its own term, and then the terms are added.",
            _added_before,
        ),
        Mistake("y", "The bias is missing.", lambda seen: seen.want - seen.own["bias"]),
        own_part(_down, "y", "It is this rank's own term and the bias: the sum over the ranks is missing."),
        Mistake(
            "dbias",
            "y is right, and the bias learns R times too slowly: it is added as R equal parts, and each rank sees the "
            "gradient of its own part.\nHow does Megatron's g pass the gradient on to what is added behind it?",
            lambda seen: seen.want / seen.mesh.axis_size("tp"),
        ),
        Mistake(
            "dbias",
            "y is right, and on this rank the bias gets no gradient: only one rank adds it. That will do for a model "
            "that is only used;\nin training the ranks' copies of the bias part.",
            _on_the_first_rank,
        ),
        added_up_again("dbias", "tp", "It is R times too large: dy is the same on every rank, and was added up."),
        added_up_again("dhidden", "tp", "It is R times too large: dy is the same on every rank, and was added up."),
    ),
    fewest=lambda mesh, tensors: _sum_of(_down(tensors)["y"], mesh),
)


def check_down(fn: Callable[..., Any], framework: Framework = "torch") -> Verdict:
    """Whether `fn` is a row-parallel layer with a bias, with the right gradients.

    hidden [B, S, H/tp]   b [H/tp, D]   bias [D]   ->   hidden @ b + bias [B, S, D], the same on every rank of "tp"
    """
    return grade(fn, DOWN, framework)


# --- a block with one norm -----------------------------------------------------------------------------------------


def _two_norms(tensors: Tensors) -> np.ndarray:
    """What the MLP gives where it reads the sum of x and attention."""
    x = tensors["x"]
    x = x + causal_attention(rms_norm(x, tensors["scale"])[0], tensors)[0]
    return x + gelu_mlp(rms_norm(x, tensors["scale"])[0], tensors)[0]


def _own_weights(seen: Seen) -> Tensors:
    """All tokens, with this rank's heads and hidden features: its own part of every gradient."""
    return one_norm({**seen.own, "x": seen.tensors["x"]})


def _one_way(summed: str, alone: str, hint: str) -> Mistake:
    """h enters attention and the MLP; the gradients of one way only are added up."""

    def wrong(seen: Seen) -> np.ndarray:
        whole, own = one_norm(seen.tensors), _own_weights(seen)
        return whole["residual"] + whole[f"through {summed}"] + own[f"through {alone}"]

    return Mistake("dx", hint, wrong)


def _block_tensors(rng: np.random.Generator, mesh: Mesh) -> Tensors:
    width, num_heads, head_width, hidden = 4, 12, 2, 12
    shapes = {
        "x": (2, 12, width),
        "scale": (width,),
        **dict.fromkeys("qkv", (num_heads, width, head_width)),
        "o": (num_heads, head_width, width),
        "a": (width, hidden),
        "b": (hidden, width),
    }
    return {name: rng.normal(size=shape) / 2 for name, shape in shapes.items()}


_SPECS = {"x": P(), "scale": P(), **dict.fromkeys("qkvo", HEADS), "a": COLUMNS, "b": ROWS}
_ALL = ("x", "scale", "q", "k", "v", "o", "a", "b")

PARALLEL_BLOCK = Exercise(
    name="parallel_block",
    tensors=_block_tensors,
    specs=_SPECS,
    plain=one_norm,
    results={"y": P()},
    gradients=_ALL,
    mistakes=(
        own_part(one_norm, "y", "It is x and this rank's own terms: what is missing is the sum."),
        Mistake(
            "y",
            "It has x once for every rank. x is whole everywhere: what is added up are the terms of the heads and of "
            "the hidden features.",
            lambda seen: seen.want + (seen.mesh.axis_size("tp") - 1) * seen.own["x"],
        ),
        Mistake("y", "x itself is missing: y = x + ...", lambda seen: seen.want - seen.own["x"]),
        Mistake(
            "y",
            "It is the block from above, where the MLP reads what attention has written. Here both read the same h.",
            lambda seen: _two_norms(seen.tensors),
        ),
        Mistake(
            "dx",
            "It is this rank's own part of dx: nothing adds up the gradients of the ranks. Which of f and g does that?",
            lambda seen: _own_weights(seen)["dx"],
        ),
        Mistake(
            "dx",
            "The gradient of the residual is added up as well. It is the same on every rank; f belongs where divided "
            "work begins, behind the norm.",
            lambda seen: seen.want + (seen.mesh.axis_size("tp") - 1) * weight(seen.want),
        ),
        _one_way("attention", "mlp", "The gradients that come through attention are added up; h also goes to a."),
        _one_way("mlp", "attention", "The gradients that come through a are added up; h also goes to the heads."),
        Mistake(
            "dscale",
            "y and dx are right, and scale's gradient is this rank's own part: f stands before the norm. Every rank "
            "then hands scale the gradient of its own work.\nPut f behind the norm.",
            lambda seen: _own_weights(seen)["dscale"],
        ),
        added_up_again("dscale", "tp", "It is R times too large: a gradient that was added up is added up again."),
    ),
    fewest=lambda mesh, tensors: 2 * _sum_of(tensors["x"], mesh),
)


def check_parallel_block(fn: Callable[..., Any], framework: Framework = "torch") -> Verdict:
    """Whether `fn` is the block y = x + attention(h) + mlp(h) with h = norm(x), with the right gradients.

    x [B, S, D]   scale [D]   q, k, v [n/tp, D, d]   o [n/tp, d, D]   a [D, H/tp]   b [H/tp, D]
      ->   y [B, S, D], the same on every rank of axis "tp"; norm: RMS, eps 1e-6; attention: causal; mlp: gelu
    """
    return grade(fn, PARALLEL_BLOCK, framework)


# --- its tokens split ----------------------------------------------------------------------------------------------


def _own_tokens(seen: Seen, whole: np.ndarray, dim: int = 1) -> np.ndarray:
    """Of something of every token, that of this rank's tokens."""
    size = seen.own["x"].shape[1]
    begin = seen.mesh.index(seen.rank, "tp") * size
    return np.take(whole, range(begin, begin + size), axis=dim)


def _kept_to_itself(seen: Seen) -> np.ndarray:
    """The gradient of the residual, and what this rank's own heads and features say of its own tokens."""
    whole, own = one_norm(seen.tensors), _own_weights(seen)
    return _own_tokens(seen, whole["residual"] + own["through attention"] + own["through mlp"])


TOKENS_SPLIT = Exercise(
    name="tokens_split",
    tensors=_block_tensors,
    specs={**_SPECS, "x": TOKENS},
    plain=one_norm,
    results={"y": TOKENS},
    gradients=_ALL,
    mistakes=(
        Mistake(
            "y",
            "Every token has seen the tokens of its own rank only. Dim 0 is the batch; gather tokens along dim 1.",
            lambda seen: one_norm({**seen.tensors, "x": seen.own["x"]})["y"],
        ),
        Mistake("y", "x itself is missing: y = x + ...", lambda seen: seen.want - seen.own["x"]),
        Mistake(
            "dx",
            "y is right, and dx has what this rank's own heads and features say of its tokens; the other ranks' part "
            "is missing.\nBehind gather_from all ranks would go on in the same way. Here each goes on in its own.",
            _kept_to_itself,
        ),
        Mistake(
            "dscale",
            "y and dx are right. scale's gradient is that of this rank's own tokens, and every rank has another one: "
            "Megatron-LM #1446.\nThe ranks share scale, and use it for different tokens. Which region is that?",
            lambda seen: _own_tokens(seen, one_norm(seen.tensors)["of each token"], 0).sum(0),
        ),
        Mistake(
            "dscale",
            "y and dx are right. scale's gradient is that of this rank's own heads and features. The ranks share "
            "scale, and go on from it in their own ways: which region is that?",
            lambda seen: _own_weights(seen)["dscale"],
        ),
        added_up_again("dscale", "tp", "It is R times too large: a gradient that was added up is added up again."),
    ),
    fewest=lambda mesh, tensors: 2 * _sum_of(tensors["x"], mesh) + _sum_of(tensors["scale"], mesh),
)


def check_tokens_split(fn: Callable[..., Any], framework: Framework = "torch") -> Verdict:
    """Whether `fn` is the block of `check_parallel_block`, where a rank has some of the tokens: x, y [B, S/tp, D]."""
    return grade(fn, TOKENS_SPLIT, framework)


def _sum_of(tensor: np.ndarray, mesh: Mesh) -> int:
    """The bytes that all ranks together send to add up a tensor over `tp`: 2(R-1) times its size in every group.

    As many as an all_gather and a reduce_scatter of it.
    """
    num_ranks = mesh.axis_size("tp")
    return 2 * (num_ranks - 1) * tensor.nbytes * (mesh.size // num_ranks)
