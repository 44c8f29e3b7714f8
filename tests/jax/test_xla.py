"""`trace`: any function of sharded arrays, from what XLA compiled of it."""

import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import tplab.jax as lab  # before JAX is used
from tplab import Mesh, P, cost
from tplab.cost import Chip, Cluster, Link
from tplab.errors import TraceError
from tplab.jax import collectives_in, run, trace
from tplab.jax.ranks.devices import jax_mesh
from tplab.trace.trace import Trace
from tplab.trace.traffic import Traffic

GRID = Mesh(dp=2, tp=4)
TOY = Cluster("toy", Chip("counter", {"float32": 1.0, "bfloat16": 1.0}, 1e9, 1e9), Link("wire", 0.0, 1.0))


def placed(shape, *spec, mesh=GRID):
    """An array of this shape, and how it lies on the mesh. There are no numbers: nothing is run."""
    return jax.ShapeDtypeStruct(shape, np.float32, sharding=on(*spec, mesh=mesh))


def on(*spec, mesh=GRID):
    return NamedSharding(jax_mesh(mesh), PartitionSpec(*spec))


def events(given, *kinds, rank=0):
    return [e for e in given.events if e.rank == rank and e.kind in kinds]


def sent(given, rank=0):
    return [(e.op, e.axis, e.group, e.bytes) for e in events(given, "send", "collective", rank=rank)]


def here(offset):
    return f"test_xla.py:{inspect.stack()[1].lineno + offset}"


# ------------------------------------------------------------------------------------------------- what jit puts in


def test_what_jit_put_in_for_its_shardings():
    """Megatron's MLP by shardings alone: one all_reduce, on the line of the product that needs it."""
    B, D, F = 8, 16, 32
    line = here(3)

    def mlp(x, a, b):
        return jnp.tanh(x @ a) @ b

    found = trace(mlp, placed((B, D), "dp"), placed((D, F), None, "tp"), placed((F, D), "tp"), cluster=TOY)
    assert (found.title, found.framework, found.mesh, found.cluster) == ("mlp", "jax", GRID, "toy")
    for rank in GRID.ranks:
        (total,) = events(found, "collective", rank=rank)
        assert (total.op, total.axis, total.shape) == ("all_reduce", "tp", (B // 2, D))
        assert total.group == GRID.group(rank, "tp")
        assert total.bytes == cost.bytes_sent("all_reduce", B // 2 * D, 4, 4, GRID.index(rank, "tp"))
        assert total.where == line
        computed = events(found, "compute", rank=rank)
        flops = 2 * (B // 2) * D * F // 4
        assert [(e.op, e.flops) for e in computed if e.flops] == [
            ("dot_general", flops), ("tanh", B // 2 * F // 4), ("dot_general", flops),
        ]  # fmt: skip
        assert total.start == max(e.end for e in computed)
    assert Trace.from_json(found.to_json()) == found


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize(
    "op, given, result, formula",
    [
        ("all_reduce", (None, "tp"), (), lambda R: 2 * (R - 1) * 16 * 4 // R),  # of the sums of 16 rows
        ("all_gather", ("tp",), (None, None), lambda R: (R - 1) * 16 * 8 * 4 // R),
        ("all_to_all", ("tp",), (None, "tp"), lambda R: (R - 1) * 16 * 8 * 4 // R // R),
    ],
)
def test_the_bytes_are_those_of_the_ring_on_any_number_of_devices(op, given, result, formula, num_ranks):
    mesh = Mesh(tp=num_ranks)
    fn = (lambda x: x.sum(1)) if op == "all_reduce" else (lambda x: x * 2)
    found = trace(jax.jit(fn, out_shardings=on(*result, mesh=mesh)), placed((16, 8), *given, mesh=mesh))
    assert found.mesh == mesh
    expected = [(op, "tp", tuple(range(num_ranks)), formula(num_ranks))] if num_ranks > 1 else []
    for rank in mesh.ranks:
        assert sent(found, rank) == expected


def test_a_training_step_sends_what_xla_lists():
    """A scan over layers and its gradient: loops are written out, and each axis has its share."""

    def loss(weights, x):
        layer = lambda x, w: (jnp.tanh(x @ w[0]) @ w[1], None)  # noqa: E731
        return (lax.scan(layer, x, weights)[0] ** 2).sum()

    step = jax.jit(jax.value_and_grad(loss))
    arguments = (placed((3, 16, 32), None, None, "tp"), placed((3, 32, 16), None, "tp")), placed((8, 16), "dp")
    found, listed = trace(step, *arguments, cluster=TOY), collectives_in(step, *arguments)
    assert Traffic.of_trace(found).total.bytes == sum((c.count or 0) * c.bytes for c in listed)
    sums = events(found, "collective")
    assert sum(e.axis == "tp" and e.shape == (4, 16) for e in sums) == 6  # each layer: one forward, one backward
    assert sum(e.bytes for e in sums if e.axis == "dp") == 3 * 2 * (16 * 8) * 4 + 4  # each gradient once, and the loss
    assert sum(e.op == "dot_general" for e in events(found, "compute")) == 3 * 6


@pytest.mark.parametrize("partitioner", ["shardy", "gspmd"])
def test_both_partitioners(partitioner):
    before = jax.config.jax_use_shardy_partitioner  # type: ignore[attr-defined]
    jax.config.update("jax_use_shardy_partitioner", partitioner == "shardy")
    try:
        found = trace(lambda x, w: jnp.sin(x @ w), placed((8, 16), "dp", "tp"), placed((16, 4), "tp"))
    finally:
        jax.config.update("jax_use_shardy_partitioner", before)
    assert sent(found, rank=5) == [("all_reduce", "tp", (4, 5, 6, 7), 2 * 3 * 16 * 4 // 4)]


def test_explicit_shardings():
    """Along `model` in part: 2 of its 4 ranks exchange, as XLA chose."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:8])
    with jax.set_mesh(mesh):
        x = jax.device_put(np.ones((8, 16), np.float32), PartitionSpec("data", "model"))
        w = jax.device_put(np.ones((16, 4), np.float32), PartitionSpec("model"))
        product = trace(lambda x, w: jnp.matmul(x, w, out_sharding=PartitionSpec("data")), x, w)
        gathered = trace(lambda x: jax.sharding.reshard(x, PartitionSpec("data")), x)
    assert product.mesh == gathered.mesh == Mesh(data=2, model=4)
    assert sent(product) == [("all_reduce", "model", (0, 1, 2, 3), 2 * 3 * 16 * 4 // 4)]
    assert sent(gathered) == [("all_gather", "model", (0, 1, 2, 3), 3 * 16 * 4)]


@pytest.mark.parametrize("spec, axis", [((("dp", "tp"), None), "dp,tp"), (("dp", "tp"), "dp"), (("tp", "dp"), "tp")])
def test_groups_have_the_names_of_their_axes(spec, axis):
    (total,) = events(trace(lambda x: x.sum(0), placed((64, 8), *spec)), "collective")
    assert (total.axis, total.group) == (axis, GRID.group(0, tuple(axis.split(","))))


def test_ranks_are_the_places_in_the_mesh_whatever_their_devices():
    backwards = jax.sharding.Mesh(np.array(jax.devices()[:8][::-1]).reshape(2, 4), ("dp", "tp"))
    x = jax.ShapeDtypeStruct((8, 4), np.float32, sharding=NamedSharding(backwards, PartitionSpec("tp")))
    assert sent(trace(lambda x: jnp.roll(x, 2, 0), x)) == [("ppermute", "tp", (0, 1, 2, 3), 2 * 4 * 4)]
    hop = events(trace(lambda x: jnp.roll(x, 2, 0), x), "send", rank=3)[0]
    assert (hop.peer, GRID.index(3, "tp")) == (0, 3)


# ------------------------------------------------------------------------------------------------- what is written


def test_a_shard_map_sends_what_run_says():
    def program(x):
        y = lax.fori_loop(0, 3, lambda _, x: lab.ring_shift(x, "tp") + 1, x)
        y = lab.all_to_all(lab.reduce_scatter(lab.all_gather(y, "dp"), "tp"), "tp", 1, 0)
        return lab.all_reduce(y, ("dp", "tp"))

    x = np.ones((16, 16), np.float32)
    mapped = jax.shard_map(program, mesh=jax_mesh(GRID), in_specs=PartitionSpec("dp", "tp"), out_specs=PartitionSpec())
    ours, theirs = run(program, GRID, x, in_specs=P("dp", "tp"), out_specs=P()).trace, trace(mapped, x)
    assert theirs.mesh == GRID
    for rank in GRID.ranks:
        one, other = (events(t, "send", "receive", "collective", rank=rank) for t in (theirs, ours))
        assert [(e.kind, e.peer, e.axis, e.group, e.bytes) for e in one] == [
            (e.kind, e.peer, e.axis, e.group, e.bytes) for e in other
        ]


@pytest.mark.parametrize("name, axis", [("replica", "replica"), (None, "devices")])
def test_pmap(name, axis):
    total = (lambda x: lax.psum(x, name)) if name else (lambda x: x + 1)
    found = trace(jax.pmap(total, axis_name=name), np.ones((4, 8), np.float32))
    assert found.mesh == Mesh(**{axis: 4})
    assert sent(found) == ([("all_reduce", axis, (0, 1, 2, 3), 2 * 3 * 8 * 4 // 4)] if name else [])


def test_what_is_no_array_may_be_among_the_arguments():
    """As the activation of an Equinox layer is. Its results, too."""

    def step(layer, x, scale):
        return layer["activation"](x @ layer["w"]) * scale, layer

    layer = {"w": placed((16, 4), "tp"), "activation": jnp.tanh}
    found = trace(step, layer, placed((8, 16), "dp", "tp"), scale=2.0)
    assert [op for op, *_ in sent(found)] == ["all_reduce"]
    assert trace(partial(step, scale=2.0), layer, placed((8, 16), "dp", "tp")).title == "step"


def test_no_mesh_at_all_and_what_is_compiled_already():
    x = np.ones((4, 4), np.float32)

    def product(x):
        return jnp.sin(x) @ x

    compiled = jax.jit(product).lower(x).compile()
    for found in (trace(product, x, cluster=TOY), trace(compiled, cluster=TOY)):
        assert found.title == "product"
        assert found.mesh == Mesh(devices=1)
        assert [e.flops for e in events(found, "compute") if e.flops] == [16, 128]
        assert found.bytes_sent() == 0


# --------------------------------------------------------------------------------- what only the running program knows


def test_a_branch_that_sends_like_the_other_is_followed():
    """The one with the most to compute. With `branch`, the one that was asked for."""
    x = placed((8, 16), "tp")

    def step(x):
        more = lambda x: jnp.sin(jnp.cos(x) @ x.T @ x)  # noqa: E731
        return lax.cond(x[0, 0] > 1, more, lambda x: (x @ x.T) @ x, x)

    flops = [sum(e.flops for e in events(trace(step, x, cluster=TOY, branch=n), "compute")) for n in (0, 1)]
    assert flops[0] < flops[1] == sum(e.flops for e in events(trace(step, x, cluster=TOY), "compute"))


def test_a_branch_that_sends_other_things_is_refused_until_it_is_named():
    x = placed((8, 16), "tp")
    line = here(1)
    step = lambda x: lax.cond(x[0, 0] > 1, lambda x: jnp.cumsum(x, 0), jnp.sin, x)  # noqa: E731
    with pytest.raises(TraceError, match=rf"conditional at {line} takes is known only when it runs") as error:
        trace(step, x)
    assert "\n  0: nothing\n  1: all_" in str(error.value)
    assert "trace(..., branch=1)" in str(error.value)
    asked = events(trace(step, x, branch=0), "collective")
    assert len(events(trace(step, x, branch=1), "collective")) > len(asked)
    with pytest.raises(TraceError, match=r"branch is 2, and the conditional .* has branches 0 to 1"):
        trace(step, x, branch=2)


def test_a_loop_of_unknown_length():
    x, line = placed((8,), "tp"), here(1)
    step = lambda x: lax.while_loop(lambda x: x.sum() < 9, lambda x: x + 1, x)  # noqa: E731
    with pytest.raises(TraceError, match=rf"how often the loop at {line} runs is known only when it runs"):
        trace(step, x)
    assert [len(sent(trace(step, x, trips=n))) for n in (0, 3)] == [1, 4]  # the condition, once more than the body


def test_a_long_loop_that_sends_nothing_is_one_event():
    x = placed((8,), "tp")
    found = trace(lambda x: lax.scan(lambda x, _: (jnp.sin(x), None), x, None, length=20_000)[0], x, cluster=TOY)
    (loop,) = [e for e in events(found, "compute") if e.flops]
    assert (loop.op, loop.flops) == ("while", 20_000 * 2)
    with pytest.raises(TraceError, match=r"runs 20,000 times, and a trace writes out 10,000"):
        trace(lambda x: lax.scan(lambda x, _: (jnp.sin(x.sum() + x), None), x, None, length=20_000)[0], x)


def test_what_cannot_be_traced_is_said():
    x = np.ones(4, np.float32)
    with pytest.raises(TraceError, match="called inside jit, grad or another"):
        jax.jit(lambda x: trace(jnp.sin, x))(x)
    with pytest.raises(TypeError, match="takes a function and its arguments"):
        trace(x)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="compiled already"):
        trace(jax.jit(jnp.sin).lower(x).compile(), x)


@pytest.mark.parametrize("options", [{"trips": -1}, {"trips": 1.5}, {"branch": "1"}, {"branch": True}])
def test_a_branch_and_trips_are_whole_numbers(options):
    ((name, given),) = options.items()
    with pytest.raises(ValueError, match=f"{name} is {given!r}; it must be a whole number, 0 or more"):
        trace(jnp.sin, jnp.ones(3), **options)
