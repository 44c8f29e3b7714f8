"""tplab.jax.same_model blames the line that one would edit, and gives the cause of this mistake and not of another."""

import inspect
import sys
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import tplab.jax as lab
from tests.checking.doctor.jax_steps import mlp_data
from tplab import Mesh

P = PartitionSpec
SOURCE = inspect.getsource(sys.modules[__name__]).splitlines()


def loss_of(params, x, y):
    return ((jnp.tanh(x @ params["up"]) @ params["down"] + params["bias"] - y) ** 2).mean()


def divided(mesh, step: Any, checks=False):
    batch = P("dp")
    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(P(), batch, batch), out_specs=P(), check_vma=checks))


def summed_by_jax(mesh, repaired):
    def step(params, x, y):
        def loss(params):
            own = loss_of(params, x, y)
            return lax.pmean(own, "dp") if repaired else own

        return {"grads": jax.grad(loss)(params)}  # blamed

    return divided(mesh, step, checks=True)


def norm_of_parts(mesh, repaired):
    def step(params, x, y):
        grads = jax.grad(loss_of)(params, x, y)
        if repaired:
            grads = lax.pmean(grads, "dp")
        norm = optax.tree.norm(grads)  # blamed
        return {"grads": lax.pmean(jax.tree.map(lambda g: g / norm, grads), "dp")}

    return divided(mesh, step)


def rate_by_devices(mesh, repaired):
    rate = 0.1 if repaired else 0.1 * mesh.shape["dp"]

    def step(params, x, y):
        grads = lax.pmean(jax.grad(loss_of)(params, x, y), "dp")
        return {"params": jax.tree.map(lambda p, g: p - rate * g, params, grads)}  # blamed

    return divided(mesh, step)


def own_masks(mesh, repaired):
    def step(params, x, y):
        rows = len(x) * lax.axis_size("dp") if repaired else len(x)
        mask = jax.random.bernoulli(jax.random.key(1), 0.5, (rows, x.shape[1]))  # blamed
        if repaired:
            mask = lax.dynamic_slice_in_dim(mask, lax.axis_index("dp") * len(x), len(x))
        return {"loss": lax.pmean(loss_of(params, x * mask, y), "dp")}

    return divided(mesh, step)


def ring_too_short(mesh, repaired):
    size = mesh.shape["tp"]

    def step(params, x, y):
        part = total = jnp.tanh(x @ params["up"]) @ params["down"]
        for _ in range(size - 1 if repaired else size - 2):
            part = lax.ppermute(part, "tp", [(at, (at + 1) % size) for at in range(size)])  # blamed
            total = total + part
        return {"loss": lax.pmean(((total + params["bias"] - y) ** 2).mean(), "tp")}

    specs = {"up": P(None, "tp"), "down": P("tp"), "bias": P()}
    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(specs, P(), P()), out_specs=P(), check_vma=False))


@pytest.mark.parametrize(
    "make, axis, words",
    [
        (summed_by_jax, "dp", "jax.grad itself adds up"),
        (norm_of_parts, "dp", "a pmean over 'dp' is missing"),
        (rate_by_devices, "dp", "divided by 4, which is the number of devices along 'dp'"),
        (own_masks, "dp", "random numbers are drawn there on each device"),
        (ring_too_short, "tp", "something else there than on one device"),
    ],
)
def test_the_line_and_the_cause(make, axis, words):
    data, mesh = mlp_data(), Mesh(**{axis: 4})
    first = lab.same_model(lambda mesh: make(mesh, False), data, mesh=mesh).first
    assert first is not None and words in first.cause
    lines = [int(line.rpartition(":")[2]) for line in first.lines]
    assert first.where == first.lines[0] and first.where.startswith("test_same_model_jax_causes.py:")
    start = inspect.getsourcelines(make)[1]
    blamed = next(at for at in range(start, len(SOURCE)) if SOURCE[at].endswith("# blamed")) + 1
    assert blamed in lines, first
    assert lab.same_model(lambda mesh: make(mesh, True), data, mesh=mesh).verdict == "same"


def test_bfloat16_does_not_hide_a_mean_of_means():
    """Rounding to 8 bits takes a loss 0.4 % off at most; weights of the wrong means, 6 %."""

    def make(mesh):
        def step(params, x, y):
            half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
            gaps = ((jnp.tanh(x @ half["up"]) @ half["down"] - y) ** 2).mean(1).astype(jnp.float32)
            counts = (x[:, 0] > 0).astype(jnp.float32)
            return {"loss": lax.pmean((gaps * counts).sum() / jnp.maximum(counts.sum(), 1.0), "dp")}

        return divided(mesh, step)

    params, x, y = mlp_data()
    x = x.at[:, 0].set(jnp.asarray([1.0, 1, 1, 1, 1, -1, -1, -1]))
    y = y.at[:4].multiply(1.2)
    halves = x.astype(jnp.bfloat16), y.astype(jnp.bfloat16)
    first = lab.same_model(make, (params, *halves), mesh=Mesh(dp=2)).first
    assert first is not None and first.what == "loss"
