"""Training steps as people write them: what they send, counted, beside the formula. In plain JAX with optax, in Equinox
and in Flax NNX, where they are installed (`make test` installs them).

The model is two weights, up [D, F] and down [F, D], on a batch of B. One float32 is 4 bytes. In a ring, R ranks
together send 2(R-1) times the size of what they sum, and R-1 times that of what they gather.
"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import tplab.jax as lab  # before JAX is used
from tplab import Mesh
from tplab.jax.ranks.devices import jax_mesh

B, D, F = 64, 8, 16
WEIGHTS, LOSS = 2 * D * F * 4, 4
OPTIMIZER = optax.adam(1e-3)


DATA, BOTH = Mesh(data=4), Mesh(data=2, model=2)
LAYOUTS = {  # and the bytes that a group of ranks sends
    # every gradient, and the loss
    "data": SimpleNamespace(
        mesh=DATA, up=(), down=(), sends={("all_reduce", "data"): 2 * 3 * (WEIGHTS + LOSS)},
    ),
    # each weight once; of the sum of its gradients a rank keeps its part (XLA for CPUs sends all of the sum: `there`)
    "sharded over data": SimpleNamespace(
        mesh=DATA, up=("data",), down=("data",), sends={
            ("all_gather", "data"): 3 * WEIGHTS, ("all_reduce", "data"): 2 * 3 * (WEIGHTS + LOSS),
        }, there={
            ("all_gather", "data"): 3 * WEIGHTS, ("reduce_scatter", "data"): 3 * WEIGHTS,
            ("all_reduce", "data"): 2 * 3 * LOSS,
        },
    ),
    # Megatron's: the part of the batch once, forward (its gradient is not asked for), and the part of the gradients
    "data and model": SimpleNamespace(
        mesh=BOTH, up=(None, "model"), down=("model",), sends={
            ("all_reduce", "model"): 2 * 1 * (B // 2 * D * 4),
            ("all_reduce", "data"): 2 * 1 * (WEIGHTS // 2 + LOSS),
        },
    ),
}  # fmt: skip


def sent(found):
    """By operation and axis, what the ranks of each group send."""
    kinds = {(e.op, e.axis) for e in found.events if e.kind in ("send", "collective")}
    groups = {axis: found.mesh.groups(axis) for _, axis in kinds}
    return {
        (op, axis): [sum(found.bytes_sent(rank, axis, op) for rank in group) for group in groups[axis]]
        for op, axis in kinds
    }


def check(layout, step, *args, accelerator=False):
    found = lab.trace(step, *args, cluster="h100", accelerator=accelerator)
    why = lab.explain(step, *args, accelerator=accelerator)
    assert found.mesh == layout.mesh
    expected = (layout.there if accelerator else layout.sends).items()
    assert sent(found) == {(op, axis): [size] * len(found.mesh.groups(axis)) for (op, axis), size in expected}
    assert why.bytes == max(found.bytes_sent(rank) for rank in found.mesh.ranks)
    assert found.makespan > 0
    return why


@pytest.fixture(params=LAYOUTS)
def layout(request):
    return LAYOUTS[request.param]


def put(array, layout, *spec):
    return jax.device_put(array, NamedSharding(jax_mesh(layout.mesh), PartitionSpec(*spec)))


def batch(layout):
    return put(np.ones((B, D), np.float32), layout, "data")


def test_plain_jax_with_optax(layout):
    def loss(params, x):
        return ((jax.nn.relu(x @ params["up"]) @ params["down"] - x) ** 2).mean()

    @jax.jit
    def step(params, state, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        updates, state = OPTIMIZER.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    params = {
        "up": put(np.ones((D, F), np.float32), layout, *layout.up),
        "down": put(np.ones((F, D), np.float32), layout, *layout.down),
    }
    why = check(layout, step, params, OPTIMIZER.init(params), batch(layout))
    operands = " ".join(operand for one in why for cause in one.causes for operand in cause.operands)
    assert ("params['down']" in operands) == (layout.down != ())
    if hasattr(layout, "there"):
        check(layout, step, params, OPTIMIZER.init(params), batch(layout), accelerator=True)


@pytest.mark.parametrize("activation", [jax.nn.relu, None])
def test_equinox(layout, activation):
    """Numbers among the arguments are not traced, also where all others are arrays."""
    eqx = pytest.importorskip("equinox", reason="Equinox is not installed")

    class Model(eqx.Module):
        up: jax.Array
        down: jax.Array
        activation: object
        times: int = 2

        def __call__(self, x):
            for _ in range(self.times - 1):  # a number that is not traced
                x = (self.activation or jax.nn.relu)(x @ self.up) @ self.down  # type: ignore[operator]
            return x

    def loss(model, x):
        return ((jax.vmap(model)(x) - x) ** 2).mean()

    @eqx.filter_jit
    def step(model, state, x):
        value, grads = eqx.filter_value_and_grad(loss)(model, x)
        updates, state = OPTIMIZER.update(grads, state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), state, value

    up, down = np.ones((D, F), np.float32), np.ones((F, D), np.float32)
    model = Model(put(up, layout, *layout.up), put(down, layout, *layout.down), activation)
    why = check(layout, step, model, OPTIMIZER.init(eqx.filter(model, eqx.is_array)), batch(layout))
    operands = " ".join(operand for one in why for cause in one.causes for operand in cause.operands)
    assert ("model.down float32" in operands) == (layout.down != ())


def test_flax_nnx(layout):
    nnx = pytest.importorskip("flax.nnx", reason="Flax is not installed")

    class Model(nnx.Module):
        def __init__(self, rngs):
            init = nnx.initializers.lecun_normal()
            names = lambda spec: nnx.with_partitioning(init, (*spec, None, None)[:2])  # noqa: E731
            self.up = nnx.Linear(D, F, use_bias=False, kernel_init=names(layout.up), rngs=rngs)
            self.down = nnx.Linear(F, D, use_bias=False, kernel_init=names(layout.down), rngs=rngs)

        def __call__(self, x):
            return self.down(nnx.relu(self.up(x)))

    @nnx.jit
    def step(model, optimizer, x):
        value, grads = nnx.value_and_grad(lambda model: ((model(x) - x) ** 2).mean())(model)
        optimizer.update(model, grads)
        return value

    line = f"test_training_steps.py:{Model.__call__.__code__.co_firstlineno + 1}"
    with jax.set_mesh(jax_mesh(layout.mesh)):
        model = Model(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)
        why = check(layout, step, model, optimizer, batch(layout))
    causes = [cause for one in why for cause in one.causes]
    assert line in {cause.where for cause in causes}  # the model's, not Flax's
    operands = " ".join(operand for cause in causes for operand in cause.operands)
    assert ("model.down.kernel float32" in operands) == (layout.down != ())


def test_a_step_in_explicit_mode():
    """The types say where each array lies, and products say where their results are to."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:4])

    def loss(params, x):
        hidden = jax.nn.relu(x @ params["up"])
        return ((jnp.matmul(hidden, params["down"], out_sharding=PartitionSpec("data")) - x) ** 2).mean()

    with jax.set_mesh(mesh):
        params = {
            "up": jax.device_put(np.ones((D, F), np.float32), PartitionSpec(None, "model")),
            "down": jax.device_put(np.ones((F, D), np.float32), PartitionSpec("model", None)),
        }
        x = jax.device_put(np.ones((B, D), np.float32), PartitionSpec("data"))
        check(LAYOUTS["data and model"], jax.jit(jax.value_and_grad(loss)), params, x)


@pytest.mark.skipif(not hasattr(jax, "new_ref"), reason="this JAX has no Refs")
def test_a_step_that_writes_its_parameters_into_refs():
    """JAX gives the results of such a step no shardings, and its arguments no names."""
    layout = LAYOUTS["sharded over data"]

    def step(_, params, x):
        loss = lambda params: ((jax.nn.relu(x @ params["up"]) @ params["down"] - x) ** 2).mean()  # noqa: E731
        value, grads = jax.value_and_grad(loss)(jax.tree.map(lambda ref: ref[...], params))
        for name, grad in grads.items():
            params[name][...] -= grad
        return value

    up, down = np.ones((D, F), np.float32), np.ones((F, D), np.float32)
    params = {"up": jax.new_ref(put(up, layout, *layout.up)), "down": jax.new_ref(put(down, layout, *layout.down))}
    why = check(layout, jax.jit(step), np.ones(3), params, batch(layout))
    operands = [operand for one in why for cause in one.causes for operand in cause.operands]
    assert "params['down'] float32[16, 8] P('data')" in operands
