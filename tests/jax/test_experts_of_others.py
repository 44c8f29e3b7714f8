"""Experts in a `shard_map` of JAX's own collectives, unchanged: compared with dense ones; what is sent is counted."""

from functools import partial

import numpy as np
import pytest

import tplab.jax as lab  # before JAX is used
from tplab import Mesh, P
from tplab.jax.ranks.devices import jax_mesh

import jax  # isort: skip
import jax.numpy as jnp  # isort: skip
from jax import lax  # isort: skip
from jax.sharding import AxisType  # isort: skip
from jax.sharding import PartitionSpec as Spec  # isort: skip

WIDTH, HIDDEN, EXPERTS, CHOICES, TOKENS = 16, 24, 8, 2, 32
SPECS = {"router": Spec(), "up": Spec("expert"), "down": Spec("expert")}
ROWS = Spec(("data", "expert"))


def mesh():
    return jax.make_mesh((2, 4), ("data", "expert"), axis_types=(AxisType.Auto,) * 2)


def routed(params, x):
    return lax.top_k(jax.nn.softmax(x @ params["router"]), CHOICES)


def dense(params, x):
    weights, chosen = routed(params, x)
    y = jnp.zeros_like(x)
    for expert in range(EXPERTS):
        weight = jnp.where(chosen == expert, weights, 0).sum(-1)
        y += weight[:, None] * (jax.nn.silu(x @ params["up"][expert]) @ params["down"][expert])
    return y


def ring_of_experts(params, x):
    """All tokens of a group to all its ranks; each computes its own experts' rows, and the sums are scattered."""
    x = lax.all_gather(x, "expert", tiled=True)
    weights, chosen = routed(params, x)
    here = EXPERTS // lax.axis_size("expert")
    local = chosen - lax.axis_index("expert") * here
    is_mine = (local >= 0) & (local < here)
    key = jnp.where(is_mine, local, here).reshape(-1)
    order = jnp.argsort(key, stable=True)
    sizes = jnp.bincount(key, length=here + 1)[:here]
    hidden = jax.nn.silu(lax.ragged_dot(x[order // CHOICES], params["up"], sizes))
    rows = lax.ragged_dot(hidden, params["down"], sizes)
    rows *= jnp.where(is_mine, weights, 0).reshape(-1)[order][:, None]
    return lax.psum_scatter(jnp.zeros_like(x).at[order // CHOICES].add(rows), "expert", tiled=True)


def buffers(params, x):
    """A slot for each token at each expert, there and back."""
    weights, chosen = routed(params, x)
    goes = jax.nn.one_hot(chosen, EXPERTS)
    there = lax.all_to_all(goes.sum(1).T[..., None] * x, "expert", 0, 1, tiled=True)
    hidden = jax.nn.silu(jnp.einsum("end,edh->enh", there, params["up"]))
    back = lax.all_to_all(jnp.einsum("enh,ehd->end", hidden, params["down"]), "expert", 1, 0, tiled=True)
    return jnp.einsum("end,nke,nk->nd", back, goes, weights)


MINE = TOKENS // 8 * WIDTH * 4  # bytes of a rank's tokens
# The losses' gradient needs no dx: there, back, and the backward pass of the way back.
SENT = {
    ring_of_experts: {"all_gather": 2 * 3 * MINE, "reduce_scatter": 3 * MINE},
    buffers: {"all_to_all": 3 * 6 * MINE},
}


@pytest.mark.parametrize("experts", SENT)
def test_a_shard_map_of_experts(experts):
    numbers = np.random.default_rng(0)
    shapes = {"router": (WIDTH, EXPERTS), "up": (EXPERTS, WIDTH, HIDDEN), "down": (EXPERTS, HIDDEN, WIDTH)}
    params = {name: numbers.normal(size=shape).astype("float32") / 4 for name, shape in shapes.items()}
    x = numbers.normal(size=(TOKENS, WIDTH)).astype("float32")
    sharded = partial(jax.shard_map, mesh=mesh(), in_specs=(SPECS, ROWS), out_specs=ROWS)(experts)

    def loss(params, x, layer=sharded):
        return jnp.square(layer(params, x)).mean()

    got = jax.jit(jax.value_and_grad(loss))(params, x)
    want = jax.value_and_grad(partial(loss, layer=dense))(params, x)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    trace = lab.trace(jax.value_and_grad(loss), params, x)
    sent = {op: sum(e.bytes for e in trace.select(kind="collective", op=op, rank=0).events) for op in SENT[experts]}
    assert sent == SENT[experts]


def test_a_ragged_exchange_is_traced_and_named():
    """It carries a rank's 8 rows of 16 floats, and keeps 1/4; XLA for CPUs does not have it."""

    def dispatch(x, sizes):
        sizes = lax.all_gather(sizes[0], "expert")
        given, mine = jnp.cumsum(sizes, 0) - sizes, lax.axis_index("expert")
        here = jnp.cumsum(sizes[mine]) - sizes[mine]
        room = jnp.zeros((32, WIDTH), x.dtype)
        return lax.ragged_all_to_all(x, room, here, sizes[mine], given[mine], sizes[:, mine], axis_name="expert")

    x, sizes = jnp.ones((32, WIDTH)), jnp.full((4, 4), 2, jnp.int32)
    about = {"in_specs": (P("expert"), P("expert")), "out_specs": P("expert")}
    shapes = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in (x, sizes)]
    found = lab.run(dispatch, Mesh(expert=4), *shapes, **about)
    assert found.trace.bytes_sent(rank=1, op="all_to_all") == 3 * 8 * WIDTH * 4 // 4
    assert {e.shape for e in found.trace.events if (e.op, e.kind) == ("all_to_all", "collective")} == {(8, WIDTH)}
    assert "all_to_all" in str(lab.run(dispatch, Mesh(expert=4), *shapes, **about, types=True).types)

    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        lab.run(dispatch, Mesh(expert=4), x, sizes, **about)
    assert "`run` compiles nothing" in " ".join(caught.value.__notes__)
    mapped = jax.shard_map(
        dispatch, mesh=jax_mesh(Mesh(expert=4)), in_specs=Spec("expert"), out_specs=Spec("expert"), check_vma=False
    )
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        lab.explain(mapped, x, sizes)
    assert "XLA for CPUs has no" in " ".join(caught.value.__notes__)
