"""Derivatives in JAX beyond the first gradient: in loops, of second order, forwards; against one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tplab.jax as lab  # before JAX is used
from tplab import Mesh, P
from tplab.jax import all_reduce, axis_index, run
from tplab.jax.ranks.context import vary

TP2 = Mesh(tp=2)
X = np.array([[1, 2, 5, 3], [3, 1, 4, 0.5]], np.float32)
DIRECTION = np.array([[0.3, -1, 0.2, 0.1], [0.5, 0.3, -0.2, 1]], np.float32)

LOOPS = {
    "scan": lambda step, x: lax.scan(lambda x, _: (step(x), None), x, None, length=3)[0],
    "fori_loop": lambda step, x: lax.fori_loop(0, 3, lambda _, x: step(x), x),
    "no loop": lambda step, x: step(step(step(x))),
}


@pytest.mark.parametrize("op", ["max", "min"])
@pytest.mark.parametrize("loop", LOOPS)
def test_an_extreme_in_a_loop_to_the_second_order(loop, op):
    """First and second derivatives, in reverse and in forward mode, are those of the same on one device."""

    def sharded(x):  # [4], a row on each rank
        step = lambda x: x * jnp.tanh(all_reduce(x * x, "tp", op).sum() / 9)  # noqa: E731
        return all_reduce(LOOPS[loop](step, x).sum(), "tp")

    def whole(x):  # [2, 4]
        for _ in range(3):
            x = x * jnp.tanh(getattr(jnp, op)(x * x, 0).sum() / 9)
        return x.sum()

    def derivatives(f, dot):
        """From x and a direction: the gradient, and its change in that direction, in both ways."""
        forwards = lambda x, dx: jax.jvp(jax.grad(f), (x,), (dx,))  # noqa: E731
        twice = lambda x, dx: jax.grad(lambda x: dot(jax.grad(f)(x), dx))(x)  # noqa: E731
        return lambda x, dx: jnp.stack([*forwards(x, dx), twice(x, dx)])

    want = derivatives(whole, jnp.vdot)(X, DIRECTION)
    on_ranks = derivatives(sharded, lambda a, b: all_reduce(jnp.vdot(a, b), "tp"))
    got = run(
        lambda x, dx: on_ranks(x[0], dx[0])[:, None], TP2, X, DIRECTION, in_specs=P("tp"), out_specs=P(None, "tp")
    )
    np.testing.assert_allclose(got.value, want, rtol=1e-5, atol=1e-6)  # float32, products of up to six factors
    assert np.abs(want[1]).max() > 1e-3


FORWARD = {  # a function of x [2, 4], replicated; and the same on one device
    "copy_to": (lambda x: all_reduce(lab.copy_to(x, "tp") ** 3 * (1 + axis_index("tp")), "tp"), lambda x: 3 * x**3),
    "copy_to of equals": (
        lambda x: all_reduce(lab.copy_to(vary(x, ("tp",)), "tp") ** 3, "tp"),
        lambda x: 2 * x**3,
    ),
    "scatter_to": (lambda x: lab.gather_from(lab.scatter_to(x, "tp") ** 3, "tp"), lambda x: x**3),
    "broadcast": (lambda x: lab.broadcast(x**3 * (1 + axis_index("tp")), "tp", 1), lambda x: 2 * x**3),
    "data_parallel": (lambda x: all_reduce(lab.data_parallel([x], "tp")[0] ** 3, "tp"), lambda x: 2 * x**3),
    "reduce_scatter max": (
        lambda x: lab.gather_from(lab.reduce_scatter(x * (1 + axis_index("tp")), "tp", 0, "max") ** 3, "tp", 0),
        lambda x: (2 * x) ** 3,
    ),
    "matmul_reduce_scatter": (
        lambda x: lab.gather_from(lab.matmul_reduce_scatter(x, jnp.eye(4), "tp") ** 3, "tp"),
        lambda x: (2 * x) ** 3,
    ),
    "all_gather_matmul": (
        lambda x: lab.all_gather_matmul(x, jnp.ones((3, 8)), "tp", dim=-1) ** 3,
        lambda x: jnp.stack([2 * x.sum(-1)] * 3, -1) ** 3,
    ),
}


@pytest.mark.parametrize("name", FORWARD)
def test_forward_mode(name):
    """jax.jvp: alone, in a loop, and under vmap."""
    sharded, whole = FORWARD[name]

    def program(x, dx):
        tangent = lambda dx: jax.jvp(sharded, (x,), (dx,))[1]  # noqa: E731
        looped = lax.scan(lambda carry, _: (carry, tangent(dx)), 0.0, None, length=1)[1]
        mapped = jax.vmap(tangent)(jnp.stack([dx, 2 * dx]))
        return tangent(dx), looped[0], mapped[0], mapped[1] / 2

    want = jax.jvp(whole, (X,), (DIRECTION,))[1]
    for found in run(program, TP2, X, DIRECTION).per_rank:
        for got in found:
            np.testing.assert_allclose(got, want, rtol=1e-5)  # float32


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("loop", LOOPS)
def test_quantised_collectives_differentiate_as_if_nothing_had_been_rounded(loop, bits):
    """First derivatives of a sum of squares are those of the rounded numbers, second ones those of the exact ones."""

    def exact(x):
        return (LOOPS[loop](lambda x: lab.reduce_scatter(lab.all_gather(x, "tp"), "tp") / 4, x) ** 2).sum()

    def rounded(x):
        def step(x):
            whole = lab.quantized_all_gather(x, "tp", bits=bits)
            return lab.quantized_reduce_scatter(whole, "tp", bits=bits) / 4

        return (LOOPS[loop](step, x) ** 2).sum()

    def second(f):
        return lambda x, dx: (jax.jvp(f, (x,), (dx,))[1], *jax.jvp(jax.grad(f), (x,), (dx,)))

    for got, want in zip(
        *(run(second(f), TP2, X, DIRECTION, in_specs=P("tp")).per_rank for f in (rounded, exact)), strict=True
    ):
        np.testing.assert_allclose(got[2], want[2], rtol=1e-5)  # of second order nothing is rounded
        for a, b in zip(got[:2], want[:2], strict=True):  # six roundings, each of half a step of the largest
            np.testing.assert_allclose(a, b, atol=6 * 0.5 / (2 ** (bits - 1) - 1) * np.abs(np.asarray(b)).max() + 0.1)
