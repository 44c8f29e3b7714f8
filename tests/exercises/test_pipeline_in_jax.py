"""Lab 12's exercise: the solution passes, and every known mistake gets its hint."""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp
import pytest

import tplab.jax as tj
from tplab.exercises.pipeline_in_jax import check_pipeline


def pipeline(mistake: str = ""):
    """The solution, or one with a mistake in it."""

    def my_pipeline(w, xs):
        r, last, m = tj.axis_index("pp"), tj.axis_size("pp") - 1, len(xs)

        def tick(message, t):
            x = jnp.where(r == 0, xs[jnp.minimum(t, m - 1)], message)
            y = jnp.tanh(x @ w[0])
            step = [(i, (i + 1) % (last + 1)) for i in range(last + (mistake == "ring"))]
            return tj.ppermute(y, "pp", step), y

        ticks = jnp.arange(m + last + (mistake == "late"))
        _, ys = jax.lax.scan(tick, 0 * jnp.tanh(xs[0] @ w[0]), ticks)
        chosen = {"early": ys[:m], "late": ys[last + 1 :], "short": ys[: m - 1]}.get(mistake, ys[last:])
        source = 0 if mistake == "first rank" else last
        return tj.all_reduce(chosen if mistake == "all" else jnp.where(r == source, chosen, 0), "pp")

    return my_pipeline


@pytest.mark.parametrize("form", ["", "ring"])
def test_the_solution(form: str):
    verdict = check_pipeline(pipeline(form))
    assert verdict.passed, verdict


@pytest.mark.parametrize(
    "mistake, said",
    [
        ("early", "In which tick does microbatch 0 reach the last rank?"),
        ("late", "It begins one tick too late: microbatch 0 is missing."),
        ("all", "Every rank has added its own output."),
        ("short", "ys has shape [4, 1, 3]"),
        ("first rank", "ys is not right yet on rank 0"),
    ],
)
def test_known_mistakes(mistake: str, said: str):
    verdict = check_pipeline(pipeline(mistake))
    assert verdict.passed is False and said in verdict.text, verdict


def test_an_untouched_stub():
    def my_pipeline(w, xs): ...

    assert check_pipeline(cast(Any, my_pipeline)).passed is None
