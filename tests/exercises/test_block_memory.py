"""The checks of lab 05: solutions pass in both frameworks, and each known mistake is told by name."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import tplab.torch as tt
from labs.source import build
from tests.exercises.test_exercises import expect
from tests.exercises.test_megatron_block import f, heads, hidden, in_jax, norm, parallel_block, plainly
from tplab import Mesh
from tplab.exercises import block_memory
from tplab.exercises.block_memory import check_sequence_mlp, check_tokens_split
from tplab.exercises.check import grade
from tplab.torch import all_gather, all_reduce, gather_from, reduce_scatter

# --------------------------------------------------------------------------------------------------- the bug to repair


def in_the_lab(start: str) -> dict[str, Any]:
    """The names that the cell which begins so defines."""
    cells = [cell.source for cell in build.read_source("05_block_memory").cells if cell.cell_type == "code"]
    names: dict[str, Any] = {"F": F, "torch": torch, "tt": tt, "norm": norm}
    exec(next(source for source in cells if source.startswith(start)).split("\n\n")[0], names)
    return names


def sequence_mlp(enter: Callable, shared: Callable = f, leave: Callable = reduce_scatter, residual: bool = True):
    def program(x, scale, a, b):
        h = enter(norm(x, shared(scale)), "tp", 1)
        return (x if residual else 0) + leave(hidden(h, a, b), "tp", 1)

    return program


def leaving(y):
    return reduce_scatter(y, "tp", 1)


def gathered_then_f(x, axis, dim):
    return f(gather_from(x, axis, dim))


def test_the_lab_shows_the_bug():
    verdict = check_sequence_mlp(in_the_lab("def sequence_mlp(")["sequence_mlp"])
    expect(verdict, False, "dx is not right yet", "The other ranks' parts are missing")
    assert verdict.panels


def test_its_repairs_pass():
    verdict = check_sequence_mlp(sequence_mlp(all_gather))
    expect(verdict, True, "y, dx, dscale, da, db equal the unsharded result", "bytes, and with `tt.gather_again` 5,704")
    assert "would do" not in verdict.text
    again = check_sequence_mlp(tt.gather_again(sequence_mlp(all_gather)))
    expect(
        again,
        True,
        "where 3,136 would do: do the other 768 gather again, so that a rank keeps less?",
        "bytes, and with `tt.gather_again` 5,704",
    )  # it sends more, and keeps less


def test_an_all_reduce_of_all_tokens_is_refused():
    def cut(x, axis, dim):
        return tt.scatter_to(all_reduce(x, axis), axis, dim)

    hint = "an all_reduce adds up [2, 12, 4] on every rank"
    expect(check_sequence_mlp(sequence_mlp(gathered_then_f)), False, hint)
    expect(check_sequence_mlp(sequence_mlp(all_gather, leave=cut)), False, hint)
    expect(check_tokens_split(tokens_split(scatter=cut)), False, hint, "sends half as much")


def test_gathering_weights_instead_of_tokens_is_refused():
    def whole_weights(x, scale, a, b):
        return x + hidden(norm(x, f(scale)), all_gather(a, "tp", 1), all_gather(b, "tp", 0))

    expect(check_sequence_mlp(whole_weights), False, "sends 12,352 bytes, where 3,136 would do", "h is gathered once")


def test_a_norm_without_its_epsilon_and_float32_pass_and_another_activation_does_not():
    def without(x, scale):
        return F.normalize(x, dim=-1) * x.shape[-1] ** 0.5 * scale

    def program(norm, activation=F.gelu):
        def mlp(x, scale, a, b):
            h = all_gather(norm(x, f(scale)), "tp", 1)
            return x + reduce_scatter(activation(h @ a) @ b, "tp", 1)

        return mlp

    expect(check_sequence_mlp(program(without)), True)
    expect(check_sequence_mlp(lambda *args: program(norm)(*(arg.float() for arg in args))), True)
    by_tanh = lambda u: F.gelu(u, approximate="tanh")  # noqa: E731
    expect(check_sequence_mlp(program(norm, by_tanh)), False, "entries are off")


@pytest.mark.parametrize(
    ("fn", "hint"),
    [
        (sequence_mlp(gather_from), "The other ranks' parts are missing"),
        (sequence_mlp(all_gather, shared=plainly), "Megatron-LM #1446"),
        (sequence_mlp(all_gather, residual=False), "add its x, once"),
        (lambda x, s, a, b: x + tt.reduce_from(hidden(norm(x, f(s)), a, b), "tp"), "The tokens are never gathered"),
        (
            lambda *args: sequence_mlp(all_gather, residual=False)(*args) + tt.axis_size("tp") * args[0],
            "add its x, once",
        ),
        (
            lambda x, s, a, b: x + reduce_scatter(hidden(norm(all_gather(x, "tp", 1), s), a, b), "tp", 1),
            "this rank's own weights only",
        ),
        (sequence_mlp(all_gather, shared=lambda scale: f(f(scale))), "R times too large"),
        (lambda x, s, a, b: x + leaving(hidden(gather_from(norm(f(x), f(s)), "tp", 1), a, b)), "of different tokens"),
        (
            lambda x, s, a, b: x + leaving(hidden(all_gather(norm(f(x), f(s)), "tp", 1), a, b)),
            "for this rank's own tokens",
        ),
        (sequence_mlp(lambda *at: f(all_gather(*at))), "come back through h are added up twice"),
        (sequence_mlp(lambda *at: f(all_gather(*at)), shared=plainly), "come back through h are added up twice"),
    ],
    ids=[
        "gather_from",
        "scale",
        "no x",
        "not gathered",
        "x early",
        "norm behind",
        "scale twice",
        "f on x",
        "f on x, gathered",
        "f on h",
        "f on h only",
    ],
)
def test_what_is_wrong_with_an_mlp_is_told(fn: Callable[..., Any], hint: str):
    expect(check_sequence_mlp(fn), False, hint, "Mesh(tp=2)")


# ---------------------------------------------------------------------------------------------------- the block, split


def tokens_split(gather=all_gather, dim=1, shared=f, scatter=reduce_scatter):
    def block(x, scale, q, k, v, o, a, b):
        h = gather(norm(x, shared(scale)), "tp", dim)
        return x + scatter(heads(h, q, k, v, o) + hidden(h, a, b), "tp", dim)

    return block


def cut(y, axis, dim):
    each = y.shape[dim] // tt.axis_size(axis)
    return all_reduce(y, axis).narrow(dim, tt.axis_index(axis) * each, each)


def norm_behind(shared):
    def block(x, scale, q, k, v, o, a, b):
        h = norm(all_gather(x, "tp", 1), shared(scale))
        return x + reduce_scatter(heads(h, q, k, v, o) + hidden(h, a, b), "tp", 1)

    return block


def one_after_the_other(x, scale, q, k, v, o, a, b):
    x = x + leaving(heads(all_gather(norm(x, f(scale)), "tp", 1), q, k, v, o))
    return sequence_mlp(all_gather)(x, scale, a, b)


def test_its_tokens_split():
    verdict = check_tokens_split(tokens_split())
    expect(verdict, True, "y, dx, dscale, dq, dk, dv, do, da, db equal the unsharded result")
    assert "do without" not in verdict.text


def test_gathering_before_the_norm_is_refused():
    """The numbers and the bytes sent are right; what a rank computes and keeps is not."""

    def mlp(x, scale, a, b):
        return x + reduce_scatter(hidden(norm(all_gather(x, "tp", 1), f(scale)), a, b), "tp", 1)

    hint = "each rank gathers x, does the norm of all tokens"
    expect(check_tokens_split(norm_behind(f)), False, hint)
    expect(check_tokens_split(tt.gather_again(norm_behind(f))), False, hint)
    expect(check_sequence_mlp(mlp), False, hint)


def test_computing_everything_on_every_rank_is_refused():
    def whole(x, scale, q, k, v, o, a, b):
        q, k, v, o = (gather_from(w, "tp", 0) for w in (q, k, v, o))
        x, a, b = all_gather(x, "tp", 1), gather_from(a, "tp", 1), gather_from(b, "tp", 0)
        h = norm(x, scale)
        y = x + heads(h, q, k, v, o) + hidden(h, a, b)
        return tt.scatter_to(y, "tp", 1)

    expect(check_tokens_split(whole), False)


def test_gathering_the_mlps_weights_is_refused():
    def block(x, scale, q, k, v, o, a, b):
        n = norm(x, f(scale))
        a, b = all_gather(a, "tp", 1), all_gather(b, "tp", 0)
        return x + reduce_scatter(heads(all_gather(n, "tp", 1), q, k, v, o), "tp", 1) + hidden(n, a, b)

    expect(check_tokens_split(block), False, "Weights stay on their ranks")


@pytest.mark.parametrize("two", ["gathers", "scatters"])
def test_two_of_what_one_would_do_are_refused(two: str):
    def block(x, scale, q, k, v, o, a, b):
        n = norm(x, f(scale))
        h = all_gather(n, "tp", 1)
        terms = heads(h, q, k, v, o), hidden(all_gather(n, "tp", 1) if two == "gathers" else h, a, b)
        if two == "gathers":
            return x + reduce_scatter(terms[0] + terms[1], "tp", 1)
        return x + reduce_scatter(terms[0], "tp", 1) + reduce_scatter(terms[1], "tp", 1)

    expect(check_tokens_split(block), False, "sends 4,672 bytes, where 3,136 would do", "gather h once")


def test_the_block_in_jax_passes():
    """On one mesh: it takes XLA seconds."""
    verdict = grade(in_jax(split=True), replace(block_memory.TOKENS_SPLIT, meshes=(Mesh(tp=3),)), "jax")
    expect(verdict, True, "y, dx, dscale, dq, dk, dv, do, da, db equal the unsharded result")
    assert "do without" not in verdict.text


@pytest.mark.parametrize(
    ("fn", "hint"),
    [
        (tokens_split(dim=0), "only the tokens of its own rank"),
        (lambda x, *rest: tokens_split()(x, *rest) - x, "add its x, once"),
        (tokens_split(gather=gather_from), "Is h from gather_from? That is for ranks that all do the same afterwards"),
        (tokens_split(shared=plainly), "Megatron-LM #1446"),
        (norm_behind(plainly), "this rank's own weights only"),
        (tokens_split(shared=lambda scale: f(f(scale))), "R times too large"),
        (parallel_block, "The tokens are never gathered"),
        (one_after_the_other, "h = norm(x) of all tokens"),
        (tokens_split(scatter=cut), "Is y added up on all ranks, and then cut? A reduce_scatter does both"),
        (lambda x, s, q, *w: tokens_split()(x, s, f(q), *w), "its gradient is complete as it is"),
    ],
    ids=[
        "dim 0",
        "no x",
        "gather_from",
        "norm not summed",
        "norm behind, not summed",
        "summed twice",
        "not gathered",
        "sequential",
        "cut",
        "f on q",
    ],
)
def test_what_is_wrong_with_split_tokens_is_told(fn: Callable[..., Any], hint: str):
    expect(check_tokens_split(fn), False, hint, "Mesh(tp=2)")


def test_the_labs_stub_is_not_started():
    verdict = check_tokens_split(in_the_lab("def tokens_split(")["tokens_split"])
    expect(verdict, None, "tokens_split: not started")  # type: ignore[arg-type]
