"""The exercises of lab 05: repair how an MLP gathers its tokens, and write a block whose tokens are split."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from tplab.exercises.check import Answer, Verdict, but, grade
from tplab.exercises.exercise import Exercise, Framework, Seen, Tensors, bytes_of_a_sum
from tplab.exercises.plain_block import (
    BLOCK_SPECS,
    TOLERANCE,
    block_tensors,
    one_norm,
)
from tplab.exercises.slopes import slopes, weight
from tplab.mesh import Mesh
from tplab.sharding import P

TOKENS = P(None, "tp")
MOST = 1.3  # times the fewest bytes: the backward pass may gather h again instead of keeping it


def _own_weights(seen: Seen) -> np.ndarray:
    """The gradient that comes through this rank's own heads and hidden features, from all tokens."""
    return seen.of({**seen.own, "x": seen.tensors["x"]})


def _scale_of_each_token(seen: Seen) -> np.ndarray:
    """The gradient of scale, before it is added up over tokens [S, D]."""
    x, scale, *weights = seen.tensors.values()
    return slopes(lambda one: one_norm(x, one, *weights), np.tile(scale, (x.shape[1], 1)))


def _kept_to_itself(seen: Seen) -> np.ndarray:
    """The gradient of the residual, plus what this rank's own heads and features contribute for its own tokens."""
    return seen.part(_own_weights(seen), 1)


def _group(seen: Seen) -> list[Seen]:
    """The same trial, as each rank of the group sees it."""
    seen_by = seen.exercise.seen(seen.result, seen.tensors, seen.mesh)
    return [seen_by[rank] for rank in seen.mesh.group(seen.rank, "tp")]


def _never_gathered(seen: Seen) -> np.ndarray:
    return seen.own["x"] + sum(one.of(one.own) - one.own["x"] for one in _group(seen))


def _residual(seen: Seen) -> np.ndarray:
    """The part of dx that does not come through h."""
    return seen.part(weight(seen.tensors["x"]), 1)


def _cut_after_the_sum(seen: Seen) -> np.ndarray:
    """dx if the sum's backward pass adds nothing up: the loss of a token reaches only the weights of its own rank."""
    x, total = seen.tensors["x"], _residual(seen)
    for one in _group(seen):
        weights = np.zeros_like(x)
        one.part(weights, 1)[...] = one.part(weight(x), 1)
        terms = slopes(lambda whole, own=one.own: one_norm(*{**own, "x": whole}.values()) - whole, x, weights)
        total = total + seen.part(terms, 1)
    return total


def _other_tokens(seen: Seen) -> np.ndarray:
    """dx if f on x adds up the ranks' contributions for their own tokens, which are different tokens."""
    return _residual(seen) + sum(_kept_to_itself(one) - _residual(one) for one in _group(seen))


# --- what a rank sends and keeps -------------------------------------------------------------------------------------


KEPT_ON = Mesh(tp=4)


def _thrifty(answer: Answer) -> Verdict:
    """Refuse a sum that every rank receives whole and, in torch, ranks that each do the norm of all tokens."""
    panels = answer.verdict.panels
    for trace in answer.traces:
        size = answer.tensors(trace.mesh)["x"].size
        for event in trace.events:
            if event.op == "all_reduce" and np.prod(event.shape) >= size and len(event.group) > 1:
                but(
                    f"on {trace.mesh} an all_reduce adds up {list(event.shape)} on every rank, and each rank uses only "
                    "its own tokens of the sum.\nA reduce_scatter gives each rank just these, and sends half as much.",
                    panels,
                )
    if answer.framework == "jax":
        return answer.verdict
    from tplab.torch import gather_again

    tensors = answer.tensors(KEPT_ON)
    x = tensors["x"][:1]  # so small that a trace has the values that a gather returns
    values = answer.run(KEPT_ON, {**tensors, "x": x}).trace.values.values()
    if any(one.size == x.size and np.allclose(np.sort(one, None), np.sort(x, None), atol=1e-5) for one in values):
        but(
            "each rank gathers x, does the norm of all tokens, and keeps what that needs for its backward pass.\nThe "
            "norm needs one token at a time. So which should come first, the norm or the gather?",
            panels,
        )
    kept, again = _kept(answer, answer.fn), _kept(answer, gather_again(answer.fn))
    return answer.says(f"On {KEPT_ON} a rank keeps {kept:,} bytes, and with `tt.gather_again` {again:,}.")


def _kept(answer: Answer, fn: Callable[..., Any]) -> int:
    """The bytes that rank 0 keeps for its backward pass, in float32."""

    def program(*own: Any) -> int:
        from tplab.torch import saved_tensors

        return saved_tensors(fn, *(tensor.clone().requires_grad_() for tensor in own)).bytes

    return replace(answer, fn=program).run(KEPT_ON).per_rank[0]


# --- a block with its tokens split ---------------------------------------------------------------------------------

_APART = (
    "The tokens are never gathered: each rank's weights see only its own tokens, and then terms of "
    "different tokens are added up."
)

TOKENS_SPLIT = Exercise(
    name="tokens_split",
    tensors=block_tensors,
    specs=BLOCK_SPECS | {"x": TOKENS},
    plain=one_norm,
    results={"y": TOKENS},
    gradients=tuple(BLOCK_SPECS),
    mistakes={
        "y": {
            "Every token has seen only the tokens of its own rank. Dim 0 is the batch; gather tokens along dim 1.": (
                lambda seen: seen.of({**seen.tensors, "x": seen.own["x"]})
            ),
            _APART: _never_gathered,
        },
        "dx": {
            "y is right, but dx is only the part that comes through this rank's own weights. The other ranks' parts "
            "are missing.\n"
            "Is h from gather_from? That is for ranks that all do the same afterwards, and here each uses its own "
            "weights.\n"
            "Or is y added up on all ranks, and then cut?": _kept_to_itself,
            "y is right, but the gradient of a token's output reaches only the weights of the rank that has this "
            "token.\nIs y added up on all ranks, and then cut? A reduce_scatter does both, and passes gradients "
            "back to all.": _cut_after_the_sum,
            "y is right, but f (copy_to) on x adds up gradients of different tokens: each rank has its own.\nAll "
            "ranks use all of h. Which of its gathers adds up their gradients?": _other_tokens,
            "y is right, but the gradients that come back through h are added up twice.\nall_gather does so in its "
            "backward pass already, and f (copy_to) does it again.": lambda seen: (
                _residual(seen) + seen.size * (seen.want - _residual(seen))
            ),
        },
        "dscale": {
            "y and dx are right, but the gradient of scale comes from this rank's own tokens only (Megatron-LM #1446)."
            "\nThe ranks share scale, and each uses it for different tokens. Which of f and g belongs "
            "there?": lambda seen: seen.part(_scale_of_each_token(seen)).sum(0),
            "y and dx are right, but the gradient of scale comes through this rank's own weights only.\n"
            "The ranks share scale, and each then does different work. Which of f and g belongs there?": _own_weights,
        },
    },
    reminders={
        "y": "h = norm(x) of all tokens goes through this rank's weights. Add up what the weights of all ranks "
        "give\nfor a token, and then add its x, once.",
        "dx": "dx is for this rank's own tokens: what comes back through h, added up once over all ranks' "
        "weights,\nand the gradient of the residual.",
        **dict.fromkeys(
            [f"d{name}" for name in "qkvoab"],
            "This weight is the rank's own piece, and all tokens go through it: its gradient is complete as it is.",
        ),
    },
    fewest=lambda mesh, tensors: 2 * bytes_of_a_sum(tensors["x"], mesh) + bytes_of_a_sum(tensors["scale"], mesh),
    excess=(
        "Weights stay on their ranks. Attention and the MLP read the same h, and their terms are added to each other: "
        "gather h once,\nand let one reduce_scatter add up and split both terms."
    ),
    surplus="do the other {:,} gather again, so that a rank keeps less?",
    slack=MOST,
    tolerance=TOLERANCE,
    divided="tp",
)


def check_tokens_split(fn: Callable[..., Any], framework: Framework = "torch") -> Verdict:
    """Check that `fn` is the block of lab 04's `check_parallel_block` on some of the tokens: x, y [B, S/tp, D]."""
    return grade(fn, TOKENS_SPLIT, framework, _thrifty)


# --- the bug to repair ---------------------------------------------------------------------------------------------

_NAMES = ("x", "scale", "a", "b")


def _mlp_tensors(rng: np.random.Generator, mesh: Mesh) -> Tensors:
    """Arguments whose hidden layer is so wide that gathering weights sends far more than gathering tokens."""
    tensors = block_tensors(rng, mesh)
    wide = {"a": rng.normal(size=(4, 96)) / 2, "b": rng.normal(size=(96, 4)) / 6}
    return {name: {**tensors, **wide}[name] for name in _NAMES}


SEQUENCE_MLP = replace(
    TOKENS_SPLIT,
    name="sequence_mlp",
    tensors=_mlp_tensors,
    specs={name: TOKENS_SPLIT.specs[name] for name in _NAMES},
    gradients=_NAMES,
    mistakes={
        **TOKENS_SPLIT.mistakes,
        "y": {_APART: _never_gathered},
        "dx": {
            hint: wrong for hint, wrong in TOKENS_SPLIT.mistakes["dx"].items() if wrong is not _cut_after_the_sum
        },  # without attention, it gives what `_kept_to_itself` gives
    },
    excess="h is gathered once, and y is scattered once; the backward pass does both in reverse. Apart from that, only "
    "the gradient of scale has to be sent.",
)


def check_sequence_mlp(fn: Callable[..., Any], framework: Framework = "torch") -> Verdict:
    """Check that `fn` is the MLP half of a block, x + gelu(norm(x) @ a) @ b, whose tokens are split over the ranks.

    x [B, S/tp, D]   scale [D]   a [D, H/tp]   b [H/tp, D]   ->   y [B, S/tp, D]; norm: RMS, eps 1e-6
    """
    return grade(fn, SEQUENCE_MLP, framework, _thrifty)
