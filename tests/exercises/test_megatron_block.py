"""The checks of lab 04: solutions pass in both frameworks, and each known mistake is told by name."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn import functional as F

import tplab.jax as tj
import tplab.torch as tt
from labs.source import build
from tests.exercises.test_exercises import expect
from tplab import Mesh, P
from tplab.exercises import block_memory, megatron_block
from tplab.exercises.check import grade
from tplab.exercises.exercise import Exercise
from tplab.exercises.megatron_block import check_down, check_parallel_block
from tplab.exercises.slopes import weight
from tplab.exercises.split_a_layer import finite_differences
from tplab.torch import axis_index, axis_size, copy_to, reduce_from

# --------------------------------------------------------------------------------------------------- the bug to repair


def in_the_lab(start: str) -> str:
    """The function that a cell of the lab begins with."""
    cells = [cell.source for cell in build.read_source("04_megatron_block").cells if cell.cell_type == "code"]
    return next(source for source in cells if source.startswith(start)).split("\n\n")[0]


def defined(source: str) -> dict[str, Any]:
    names: dict[str, Any] = {"F": F, "torch": torch, "tt": tt}
    exec(source, names)
    return names


def test_the_lab_shows_the_bug_and_its_repair_passes():
    bug = in_the_lab("def down(")
    expect(check_down(defined(bug)["down"]), False, "once per rank: each rank adds it", "rank 0 of Mesh(tp=2)")
    mended = bug.replace('tt.reduce_from(hidden @ b + bias, "tp")', 'tt.reduce_from(hidden @ b, "tp") + bias')
    assert mended != bug
    verdict = check_down(defined(mended)["down"])
    expect(verdict, True, "y, dhidden, db, dbias equal the unsharded result")
    assert "do without" not in verdict.text


def test_the_repair_in_jax_passes():
    expect(check_down(lambda hidden, b, bias: tj.reduce_from(hidden @ b, "tp") + bias, "jax"), True)


def on_rank_0(hidden, b, bias):
    y = hidden @ b
    return reduce_from(y + bias if axis_index("tp") == 0 else y + 0 * bias, "tp")


@pytest.mark.parametrize(
    ("fn", "hint"),
    [
        (lambda hidden, b, bias: reduce_from(hidden @ b, "tp"), "The bias is missing"),
        (lambda hidden, b, bias: hidden @ b + bias, "the sum over the ranks is missing"),
        (lambda hidden, b, bias: reduce_from(hidden @ b + bias / axis_size("tp"), "tp"), "learns R times too slowly"),
        (on_rank_0, "only one rank adds it"),
        (lambda hidden, b, bias: reduce_from(hidden @ b, "tp") + copy_to(bias, "tp"), "This is R times too large"),
        (lambda hidden, b, bias: reduce_from(copy_to(hidden, "tp") @ b, "tp") + bias, "pieces of this gradient are"),
        (  # raises on three ranks
            lambda hidden, b, bias: tt.all_gather(tt.reduce_scatter(hidden @ b, "tp", -1), "tp", -1) + bias,
            "This is R times too large",
        ),
        (
            lambda hidden, b, bias: reduce_from(hidden @ b, "tp") / axis_size("tp") + bias,
            "the mean of the ranks' terms",
        ),
        (lambda hidden, b, bias: reduce_from(hidden @ b + bias, "tp") + bias, "added once more after it"),
        (lambda hidden, b, bias: reduce_from(hidden @ b, "tp") - bias, "entries are off"),
    ],
    ids=[
        "no bias",
        "no sum",
        "divided",
        "rank 0",
        "f of the bias",
        "f of hidden",
        "two halves",
        "mean",
        "twice",
        "sign",
    ],
)
def test_what_is_wrong_with_a_bias_is_told(fn: Callable[..., Any], hint: str):
    expect(check_down(fn), False, hint)


def test_what_the_lab_says_of_its_bug():
    """Where biases are zero, as in a fresh model, output and every gradient are right."""
    names = defined(in_the_lab("def down("))
    right = defined("def down(hidden, b, bias): return tt.reduce_from(hidden @ b, 'tp') + bias")
    rng = np.random.default_rng(0)
    hidden, b, bias = rng.normal(size=(2, 3, 12)), rng.normal(size=(12, 4)), np.zeros(4)
    specs = tuple(megatron_block.DOWN.specs.values())

    def learnt(down: Callable[..., Any], bias: np.ndarray) -> list[Any]:
        def program(*args):
            leaves = [arg.requires_grad_() for arg in args]
            y = down(*leaves)
            y.square().sum().backward()
            return y, *(leaf.grad for leaf in leaves)

        return list(tt.run(program, Mesh(tp=4), hidden, b, bias, in_specs=specs, out_specs=(P(), *specs)).value)

    for one, other in zip(learnt(names["down"], bias), learnt(right["down"], bias)):
        assert torch.equal(one, other)
    assert not torch.allclose(learnt(names["down"], bias + 1)[0], learnt(right["down"], bias + 1)[0])


# ------------------------------------------------------------------------------------------------------ the exercises


def norm(x, scale):
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * scale


def heads(x, q, k, v, o):
    q, k, v = (torch.einsum("bsD,nDd->bnsd", x, w) for w in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return torch.einsum("bnsd,ndD->bsD", y, o)


def hidden(h, a, b):
    return F.gelu(h @ a) @ b


def f(x):
    return copy_to(x, "tp")


def g(x):
    return reduce_from(x, "tp")


def parallel_block(x, scale, q, k, v, o, a, b):
    h = f(norm(x, scale))
    return x + g(heads(h, q, k, v, o) + hidden(h, a, b))


def two_sums(x, scale, q, k, v, o, a, b):
    h = f(norm(x, scale))
    return x + g(heads(h, q, k, v, o)) + g(hidden(h, a, b))


def in_jax(split: bool):
    """Lab 04's block or, with its tokens split, lab 05's."""

    def block(x, scale, q, k, v, o, a, b):
        h = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * scale
        h = tj.all_gather(h, "tp", 1) if split else tj.copy_to(h, "tp")
        query, key, value = (jnp.einsum("bsD,nDd->bsnd", h, w) for w in (q, k, v))
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        terms = jnp.einsum("bsnd,ndD->bsD", mixed, o) + jax.nn.gelu(h @ a, approximate=False) @ b
        return x + (tj.reduce_scatter(terms, "tp", 1) if split else tj.reduce_from(terms, "tp"))

    return block


def test_a_block_with_half_the_sums():
    verdict = check_parallel_block(parallel_block)
    expect(verdict, True, "y, dx, dscale, dq, dk, dv, do, da, db equal the unsharded result")
    assert "do without" not in verdict.text
    expect(
        check_parallel_block(two_sums),
        False,
        "4,608 bytes, where 3,072 would do",
        "With f after the norm, the gradient of scale needs none",
    )


def test_other_peoples_blocks_pass():
    """A norm without its epsilon, and float32; gelu's approximation is another function."""

    def variant(activation: Callable[..., Any]) -> Callable[..., Any]:
        def block(x, scale, q, k, v, o, a, b):
            h = f(F.normalize(x, dim=-1) * x.shape[-1] ** 0.5 * scale)
            return g(activation(h @ a) @ b + heads(h, q, k, v, o)) + x

        return block

    expect(check_parallel_block(variant(F.gelu)), True)
    expect(check_parallel_block(lambda *args: parallel_block(*(arg.float() for arg in args))), True)
    expect(check_parallel_block(variant(lambda u: F.gelu(u, approximate="tanh"))), False, "entries are off")


def test_the_block_in_jax_passes():
    """On one mesh: it takes XLA seconds."""
    exercise = replace(megatron_block.PARALLEL_BLOCK, meshes=(Mesh(tp=3),))
    verdict = grade(in_jax(split=False), exercise, "jax")
    expect(verdict, True, "y, dx, dscale, dq, dk, dv, do, da, db equal the unsharded result")
    assert "do without" not in verdict.text


def sequential(x, scale, q, k, v, o, a, b):
    x = x + g(heads(f(norm(x, scale)), q, k, v, o))
    return x + g(hidden(f(norm(x, scale)), a, b))


def plainly(x):
    return x


def block_of(attends: Callable = f, projects: Callable = f, residual: Callable = plainly, first: Callable = plainly):
    """With what is done to h on its way to the heads and to a, to the residual, and to x before the norm."""

    def block(x, scale, q, k, v, o, a, b):
        h = norm(first(x), scale)
        return residual(x) + g(heads(attends(h), q, k, v, o) + hidden(projects(h), a, b))

    return block


def no_sum(x, scale, q, k, v, o, a, b):
    return x + terms(x, scale, q, k, v, o, a, b)


def x_summed(x, scale, q, k, v, o, a, b):
    return g(x + terms(x, scale, q, k, v, o, a, b))


def no_x(x, scale, q, k, v, o, a, b):
    return g(terms(x, scale, q, k, v, o, a, b))


def x_in_parts(x, scale, q, k, v, o, a, b):
    h = f(norm(x, scale))
    return g(x / axis_size("tp") + heads(h, q, k, v, o) + hidden(h, a, b))


def by_hops(x, scale, q, k, v, o, a, b):
    h = f(norm(x, scale))
    return x + tt.ring_all_reduce(heads(h, q, k, v, o) + hidden(h, a, b), "tp")


def with_whole_weights(x, scale, q, k, v, o, a, b):
    q, k, v, o, b = (tt.all_gather(part, "tp") for part in (q, k, v, o, b))
    return x + terms(x, scale, q, k, v, o, tt.all_gather(a, "tp", 1), b)


def terms(x, scale, q, k, v, o, a, b):
    return heads(norm(x, scale), q, k, v, o) + hidden(norm(x, scale), a, b)


@pytest.mark.parametrize(
    ("fn", "hint"),
    [
        (no_sum, "the sum over the ranks is missing"),
        (x_summed, "y has x once per rank"),
        (no_x, "x itself is missing"),
        (sequential, "both read the same h"),
        (block_of(plainly, plainly), "this rank's own part of dx"),
        (block_of(plainly, plainly, residual=f, first=f), "residual is added up as well"),
        (block_of(projects=plainly), "through attention are added up"),
        (block_of(attends=plainly), "through a are added up"),
        (block_of(plainly, plainly, first=f), "because f is before the norm"),
        (x_in_parts, "the gradient of the residual is R times too small"),
        (by_hops, "that of ring_all_reduce or all_gather does"),
        (with_whole_weights, "dq is not right yet on rank 0 of Mesh(tp=2).\nThis is R times too large"),
        (block_of(residual=lambda x: -x), "entries are off"),
    ],
    ids=[
        "no sum",
        "x summed",
        "no x",
        "sequential",
        "no f",
        "f of x",
        "f half",
        "f other half",
        "f early",
        "x in parts",
    ]
    + ["by hops", "whole weights", "- x"],
)
def test_what_is_wrong_with_a_block_is_told(fn: Callable[..., Any], hint: str):
    expect(check_parallel_block(fn), False, hint, "Mesh(tp=2)")


def test_the_labs_stub_is_not_started():
    stub = in_the_lab("def parallel_block(")
    assert stub.rstrip().endswith("...")
    expect(check_parallel_block(defined(stub)["parallel_block"]), None, "not started")  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------------------------------- the core


@pytest.mark.parametrize("exercise", [megatron_block.DOWN, megatron_block.PARALLEL_BLOCK], ids=lambda one: one.name)
def test_the_plain_gradients_are_slopes(exercise: Exercise):
    """The check's own formulas, against the loss alone."""
    tensors = dict(exercise.tensors(np.random.default_rng(0), Mesh(tp=2)))
    if exercise is megatron_block.PARALLEL_BLOCK:  # fewer, so that nudging each takes no time
        tensors = {name: array[:3] if name in "qkvo" else array for name, array in tensors.items()}
        tensors["x"] = tensors["x"][:, :5]
    for name in exercise.gradients:

        def loss(value: np.ndarray, name: str = name) -> float:
            y = exercise.plain(*{**tensors, name: value}.values())
            return float((y * weight(y)).sum())

        slopes = finite_differences(loss, tensors[name])
        assert np.allclose(exercise.right(f"d{name}", tensors), slopes, rtol=1e-7, atol=1e-7), name


@pytest.mark.parametrize(
    "exercise",
    [megatron_block.DOWN, megatron_block.PARALLEL_BLOCK, block_memory.SEQUENCE_MLP, block_memory.TOKENS_SPLIT],
    ids=lambda one: one.name,
)
def test_known_mistakes_differ_from_what_is_right_and_from_each_other(exercise: Exercise):
    """On the mesh that a wrong program meets first; otherwise a hint would be a guess."""
    mesh = exercise.meshes[0]
    tensors = exercise.tensors(np.random.default_rng(0), mesh)
    for result in exercise.mistakes:
        seen = exercise.seen(result, tensors, mesh)
        known = [np.stack([one.want for one in seen])]
        for hint, wrong in exercise.known(result):
            outcome = np.stack([wrong(one) for one in seen])
            assert not any(outcome.shape == other.shape and np.allclose(outcome, other) for other in known), hint
            known.append(outcome)
