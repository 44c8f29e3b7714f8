"""Lab 12's exercises: the solutions pass, and every known mistake gets its hint."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import pytest

import tplab.jax as tj
from labs.source import build
from tplab import Mesh
from tplab.exercises import pipeline_in_jax
from tplab.exercises.pipeline_in_jax import FOUR, check_loop, check_pipeline

ON_FOUR = pytest.mark.usefixtures("four_ranks")
"""Ticks and messages are counted on four ranks, and each other mesh is a program more to compile, twice. The solutions
run on all of them; these tests run on four ranks, and on one, which sends nothing."""


@pytest.fixture
def four_ranks(monkeypatch: pytest.MonkeyPatch):
    for name in ("PIPELINE", "LOOP"):
        exercise = replace(getattr(pipeline_in_jax, name), meshes=(FOUR, Mesh(pp=1)))
        monkeypatch.setattr(pipeline_in_jax, name, exercise)


def pipeline(mistake: str = ""):
    """The solution, or one with a mistake in it."""

    def my_pipeline(w, xs):
        r, last, m = tj.axis_index("pp"), tj.axis_size("pp") - 1, len(xs)

        def tick(message, t):
            x = jnp.where(r == 0, xs[jnp.minimum(t, m - 1)], message)
            y = jnp.tanh(x @ w[0] + 0.1)
            step = [(i, (i + 1) % (last + 1)) for i in range(last + (mistake == "ring"))]
            return tj.ppermute(y, "pp", step), y

        ticks = jnp.arange((m + last + (mistake == "late")) * (2 if mistake == "long" else 1))
        _, ys = jax.lax.scan(tick, 0 * jnp.tanh(xs[0] @ w[0] + 0.1), ticks)
        chosen = {"early": ys[:m], "late": ys[last + 1 :], "short": ys[: m - 1], "long": ys[last : last + m]}.get(
            mistake, ys[last:]
        )
        source = 0 if mistake == "first rank" else last
        if mistake in ("own", "last"):
            return chosen if mistake == "own" else jnp.where(r == source, chosen, 0)
        if mistake == "gather":
            return tj.all_gather(chosen[None], "pp", 0)[-1]
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
        ("all", "Every rank has added its own outputs."),
        ("own", "All ranks should return those of the last rank."),
        ("last", "Only the last rank has the outputs."),
        ("gather", "This is R times the right gradient."),
        ("long", "the ranks exchange messages 15 times, where 7 would do"),
        ("short", "ys has shape [4, 1, 3]"),
        ("first rank", "These are the first rank's outputs"),
    ],
)
def test_known_mistakes(mistake: str, said: str):
    verdict = check_pipeline(pipeline(mistake))
    assert verdict.passed is False and said in verdict.text, verdict


def python_loop(sends_last: bool, too_many: int = 0):
    """The pipeline without a scan. XLA removes what nothing depends on, so a tick too many costs nothing here."""

    def my_pipeline(w, xs):
        r, last, m = tj.axis_index("pp"), tj.axis_size("pp") - 1, len(xs)
        message, ys = jnp.zeros_like(xs[0]), []
        num_ticks = m + last + too_many
        for t in range(num_ticks):
            ys.append(jnp.tanh(jnp.where(r == 0, xs[min(t, m - 1)], message) @ w[0] + 0.1))
            if t < num_ticks - 1 or sends_last:
                message = tj.ppermute(ys[-1], "pp", [(i, i + 1) for i in range(last)])
        return tj.all_reduce(jnp.where(r == last, jnp.stack(ys[last : last + m]), 0), "pp")

    return my_pipeline


def first_tick_alone(too_many: int = 0):
    """The first tick is before the loop, whose ticks begin with an exchange: the last tick sends nothing."""

    def my_pipeline(w, xs):
        r, last, m = tj.axis_index("pp"), tj.axis_size("pp") - 1, len(xs)

        def tick(y, t):
            message = tj.ppermute(y, "pp", [(i, i + 1) for i in range(last)])
            y = jnp.tanh(jnp.where(r == 0, xs[jnp.minimum(t, m - 1)], message) @ w[0] + 0.1)
            return y, y

        first = jnp.tanh(xs[0] @ w[0] + 0.1)
        _, ys = jax.lax.scan(tick, first, jnp.arange(1, m + last + too_many))
        ys = jnp.concatenate([first[None], ys])[last : last + m]
        return tj.all_reduce(jnp.where(r == last, ys, 0), "pp")

    return my_pipeline


def fori_loop(w, xs):
    """The pipeline as a loop that carries its outputs."""
    r, last, m = tj.axis_index("pp"), tj.axis_size("pp") - 1, len(xs)

    def tick(t, carry):
        message, ys = carry
        y = jnp.tanh(jnp.where(r == 0, xs[jnp.minimum(t, m - 1)], message) @ w[0] + 0.1)
        ys = ys.at[jnp.where(t < last, m, t - last)].set(y)
        return tj.ppermute(y, "pp", [(i, i + 1) for i in range(last)]), ys

    ys = 0 * jnp.tanh(xs @ w[0] + 0.1)
    _, ys = jax.lax.fori_loop(0, m + last, tick, (ys[0], ys))
    return tj.all_reduce(jnp.where(r == last, ys, 0), "pp")


def receives_first(w, xs):
    """A tick begins with the exchange: the first one carries nothing."""
    r, last, m = tj.axis_index("pp"), tj.axis_size("pp") - 1, len(xs)

    def tick(y, t):
        message = tj.ppermute(y, "pp", [(i, i + 1) for i in range(last)])
        y = jnp.tanh(jnp.where(r == 0, xs[jnp.minimum(t, m - 1)], message) @ w[0] + 0.1)
        return y, y

    _, ys = jax.lax.scan(tick, 0 * jnp.tanh(xs[0] @ w[0] + 0.1), jnp.arange(m + last))
    return tj.all_reduce(jnp.where(r == last, ys[last:], 0), "pp")


def idles(w, xs):
    """A rank that has no microbatch computes nothing."""
    r, last, m = tj.axis_index("pp"), tj.axis_size("pp") - 1, len(xs)
    nothing = 0 * jnp.tanh(xs[0] @ w[0] + 0.1)

    def tick(message, t):
        x = jnp.where(r == 0, xs[jnp.minimum(t, m - 1)], message)
        y = jax.lax.cond((t >= r) & (t < r + m), lambda: jnp.tanh(x @ w[0] + 0.1), lambda: nothing)
        return tj.ppermute(y, "pp", [(i, i + 1) for i in range(last)]), y

    _, ys = jax.lax.scan(tick, nothing, jnp.arange(m + last))
    return tj.all_reduce(jnp.where(r == last, ys[last:], 0), "pp")


OTHER_FORMS = [
    python_loop(sends_last=False),
    python_loop(sends_last=True),
    python_loop(sends_last=True, too_many=1),
    first_tick_alone(),
    fori_loop,
    receives_first,
    idles,
]


@ON_FOUR
@pytest.mark.parametrize("my_pipeline", OTHER_FORMS)
def test_other_forms_of_the_loop(my_pipeline: Any):
    verdict = check_pipeline(my_pipeline)
    assert verdict.passed, verdict


@ON_FOUR
def test_an_unused_tick_is_too_slow():
    verdict = check_pipeline(first_tick_alone(too_many=1))
    assert verdict.passed is False and "it takes 9 ticks, where 8 would do" in verdict.text, verdict


ROW = "ys.at[t].set(y)"


def of_the_lab(row: str = ROW, old: str = "", new: str = ""):
    """The pipeline to repair, as the lab has it, or with another row, and with another change."""
    cells = [cell.source for cell in build.read_source("12_pipeline_in_jax").cells if cell.cell_type == "code"]
    bug = next(source for source in cells if "def my_pipeline(" in source)
    assert bug.count(ROW) == 1 and old in bug
    names: dict[str, Any] = {"tj": tj, "jax": jax, "jnp": jnp, "stage": lambda w, x: jnp.tanh(x @ w + 0.1)}
    exec(bug.replace(ROW, row).replace(old, new), names)
    return names["my_pipeline"]


def test_the_lab_shows_the_bug():
    """The rows are off by p - 1, and JAX drops those that would be below the last one."""
    verdict = check_pipeline(of_the_lab())
    assert verdict.passed is False and "In which tick does microbatch 0 reach the last rank?" in verdict.text
    assert check_pipeline(of_the_lab("ys.at[t - last].set(y)")).passed


@pytest.mark.parametrize(
    "row, said",
    [
        (
            "ys.at[jnp.minimum(t, m - 1)].set(y)",
            "The last row is right, because the last microbatch is written into it",
        ),
        ("ys.at[t + last].set(y)", "Your rows are shifted in the wrong direction."),
        ("ys.at[t - last].add(y)", "These outputs were added to the last rows."),
        ("ys.at[jnp.maximum(t - last, 0)].add(y)", "entries are off"),
        ("ys.at[t % m].set(y)", "right outputs in the wrong rows"),
        ("ys.at[t - last - 1].set(y)", "right outputs in the wrong rows"),
    ],
)
def test_wrong_rows(row: str, said: str):
    verdict = check_pipeline(of_the_lab(row))
    assert verdict.passed is False and said in verdict.text, verdict


@pytest.mark.parametrize(
    "old, new, said",
    [
        ("jnp.arange(m + last)", "jnp.arange(m)", "The last rows are missing."),
        ("jnp.where(r == last, ys, 0)", "jnp.where(r == 0, ys, 0)", "These are the first rank's outputs"),
        ("return tj", "ys = jax.lax.stop_gradient(ys)\n    return tj", "All of it is zero"),
    ],
)
def test_other_mistakes_in_the_loop(old: str, new: str, said: str):
    verdict = check_pipeline(of_the_lab("ys.at[t - last].set(y)", old, new))
    assert verdict.passed is False and said in verdict.text, verdict


def test_stages_after_one_another_send_no_message():
    def my_pipeline(w, xs):
        r, p = tj.axis_index("pp"), tj.axis_size("pp")
        for stage in range(p):
            xs = tj.all_reduce(jnp.where(r == stage, jnp.tanh(xs @ w[0] + 0.1), 0), "pp")
        return xs

    verdict = check_pipeline(my_pipeline)
    assert "on Mesh(pp=4) a rank sends 0 messages to another. A pipeline needs at least 7" in verdict.text, verdict


def one_matrix(w, number, x):
    return jnp.tanh(x @ w[jnp.clip(number, 0, 1)] + 0.1)


def loop(mistake: str = "", compute: Any = one_matrix):
    """Twice around the ring, or with a mistake in it, or with another way to choose the matrix."""

    def my_loop(w, xs):
        r, p = tj.axis_index("pp"), tj.axis_size("pp")

        def tick(message, t):
            takes_xs = r == 0 if mistake in ("begins again", "waits") else (r == 0) & (t < p)
            x = jnp.where(takes_xs, xs[jnp.minimum(t, p - 1) if mistake == "waits" else t % p], message)
            number = {
                "first matrix": 0 * t,
                "same tick": t // p,
                "swapped": 1 - (t - r) // p,
                "turns": (t - r) % 2,
                "one late": (t - r - 1) // p,
            }.get(mistake, (t - r) // p)
            y = compute(w[0], number, x)
            pairs = [(i, (i + 1) % p) for i in range(p - (mistake == "a line"))]
            pairs = [(b, a) for a, b in pairs] if mistake == "backwards" else pairs
            return tj.ppermute(y, "pp", pairs), y

        start = 0 * xs[0] if mistake == "plain zeros" else 0 * jnp.tanh(xs[0] @ w[0, 0] + 0.1)
        _, ys = jax.lax.scan(tick, start, jnp.arange(4 * p if mistake == "long" else 3 * p - 1))
        chosen = {"first round": ys[p - 1 : 2 * p - 1], "long": ys[2 * p - 1 : 3 * p - 1]}.get(mistake, ys[-p:])
        if mistake in ("own", "all"):
            return chosen if mistake == "own" else tj.all_reduce(chosen, "pp")
        return tj.all_reduce(jnp.where(r == (0 if mistake == "first rank" else p - 1), chosen, 0), "pp")

    return my_loop


def by_cond(w, number, x):
    return jax.lax.cond(number > 0, lambda: jnp.tanh(x @ w[1] + 0.1), lambda: jnp.tanh(x @ w[0] + 0.1))


def by_matmul(w, number, x):  # choosing is no stage, however it is done
    return jnp.tanh(x @ jnp.einsum("k,kde->de", jax.nn.one_hot(jnp.clip(number, 0, 1), 2), w) + 0.1)


def test_twice_around_the_ring():
    verdict = check_loop(loop())
    assert verdict.passed, verdict


@ON_FOUR
@pytest.mark.parametrize("compute", [by_cond, by_matmul])
def test_other_ways_to_choose_the_matrix(compute: Any):
    verdict = check_loop(loop(compute=compute))
    assert verdict.passed, verdict


def both_chosen(w, number, x):
    return jnp.where(number > 0, jnp.tanh(x @ w[1] + 0.1), jnp.tanh(x @ w[0] + 0.1))


def both_at_once(w, number, x):
    return jnp.tanh(jnp.einsum("bd,kde->kbe", x, w) + 0.1)[jnp.clip(number, 0, 1)]


@ON_FOUR
@pytest.mark.parametrize("compute", [both_chosen, both_at_once])
def test_a_rank_that_computes_both_of_its_stages_in_every_tick(compute: Any):
    verdict = check_loop(loop(compute=compute))
    assert verdict.passed is False, verdict
    assert "on Mesh(pp=4) a rank does 2 matmuls per tick, where one stage needs 1" in verdict.text


@ON_FOUR
def test_a_pause_between_the_rounds_is_too_slow():
    def my_loop(w, xs):
        for number in range(2):
            xs = pipeline()(w[:, number], xs)
        return xs

    verdict = check_loop(my_loop)
    assert verdict.passed is False and "exchange messages 12 times, where 10 would do" in verdict.text, verdict


@ON_FOUR
@pytest.mark.parametrize("too_many", [0, 1])
def test_an_unused_tick_around_the_ring_is_too_slow(too_many: int):
    def my_loop(w, xs):
        r, p = tj.axis_index("pp"), tj.axis_size("pp")

        def tick(y, t):
            message = tj.ppermute(y, "pp", [(i, (i + 1) % p) for i in range(p)])
            y = one_matrix(w[0], (t - r) // p, jnp.where((r == 0) & (t < p), xs[t % p], message))
            return y, y

        first = one_matrix(w[0], 0, xs[0])
        _, ys = jax.lax.scan(tick, first, jnp.arange(1, 3 * p - 1 + too_many))
        ys = jnp.concatenate([first[None], ys])[2 * p - 1 : 3 * p - 1]
        return tj.all_reduce(jnp.where(r == p - 1, ys, 0), "pp")

    verdict = check_loop(my_loop)
    assert verdict.passed is not bool(too_many), verdict
    assert ("it takes 12 ticks, where 11 would do" in verdict.text) is bool(too_many), verdict


@ON_FOUR
def test_all_microbatches_in_one_message_are_no_pipeline():
    def my_loop(w, xs):
        r, p = tj.axis_index("pp"), tj.axis_size("pp")
        for t in range(2 * p):
            xs = jnp.where(r == t % p, jnp.tanh(xs @ w[0, t // p] + 0.1), xs)
            xs = tj.ppermute(xs, "pp", [(i, (i + 1) % p) for i in range(p)])
        return tj.all_reduce(jnp.where(r == 0, xs, 0), "pp")

    verdict = check_loop(my_loop)
    assert verdict.passed is False and "Send one microbatch at a time" in verdict.text, verdict


@pytest.mark.parametrize(
    "mistake, said",
    [
        ("a line", "which rank must send to rank 0?"),
        ("begins again", "In its second round, rank 0 takes xs again."),
        ("waits", "In its second round, rank 0 takes xs again."),
        ("first matrix", "Both rounds have used the first of a rank's matrices."),
        ("same tick", "all ranks have changed to their second\nmatrix in the same tick."),
        ("swapped", "The first round has used a rank's second matrix"),
        ("first round", "These are the outputs of the first round."),
        ("turns", "The two matrices take turns"),
        ("one late", "Each rank changes to its second matrix one tick too late."),
        ("backwards", "Messages go around the ring in the wrong direction."),
        ("own", "Every rank returns its own outputs."),
        ("all", "Every rank has added its own outputs."),
        ("first rank", "These are the first rank's outputs"),
        ("long", "15 times, where 10 would do.\nMicrobatch 0 can be back on rank 0 in tick R, and the last one leaves"),
        (
            "plain zeros",
            "a loop begins with a value that is the same on every rank, and goes on with one that\nmay differ",
        ),
    ],
)
def test_known_mistakes_around_the_ring(mistake: str, said: str):
    verdict = check_loop(loop(mistake))
    assert verdict.passed is False and said in verdict.text, verdict


def test_both_stages_in_one_tick():
    def my_loop(w, xs):
        r, p = tj.axis_index("pp"), tj.axis_size("pp")

        def tick(message, t):
            x = jnp.where(r == 0, xs[jnp.minimum(t, p - 1)], message)
            y = one_matrix(w[0], 1, one_matrix(w[0], 0, x))
            return tj.ppermute(y, "pp", [(i, i + 1) for i in range(p - 1)]), y

        _, ys = jax.lax.scan(tick, 0 * one_matrix(w[0], 0, xs[0]), jnp.arange(2 * p - 1))
        return tj.all_reduce(jnp.where(r == p - 1, ys[p - 1 :], 0), "pp")

    verdict = check_loop(my_loop)
    assert verdict.passed is False and "Each rank has run both of its stages" in verdict.text, verdict


def test_untouched_stubs():
    def my_pipeline(w, xs): ...

    assert check_pipeline(cast(Any, my_pipeline)).passed is None and check_loop(cast(Any, my_pipeline)).passed is None
