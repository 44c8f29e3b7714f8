"""tplab.jax.same_model: steps that are wrong in a known way are named with line and factor, and right ones are not."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as Spec

import tplab.jax as lab  # before JAX is used
from tests.checking.doctor import jax_steps
from tests.checking.doctor.jax_steps import RIGHT_STEPS, WRONG_STEPS, gradient_summed, mlp_data
from tests.checking.doctor.test_jax_steps import mesh_of
from tplab import Mesh

SOURCE = inspect.getsource(jax_steps).splitlines()


def report_of(row, repaired=False):
    alone = mesh_of(row, alone=True)
    return lab.same_model(lambda mesh: row.make(mesh, repaired), row.data(), mesh=mesh_of(row), reference_mesh=alone)


@pytest.mark.parametrize("row", WRONG_STEPS, ids=str)
def test_what_is_wrong_is_named(row):
    report = report_of(row)
    first = report.first
    assert report.verdict == ("logs differ" if row.name == "local_loss_returned" else "different"), str(report)
    assert report.exit_code == 1 and first is not None
    assert first.what in row.what
    if not isinstance(row.factor, str):
        assert first.factor == pytest.approx(row.factor, rel=1e-3)
        assert f"{row.factor:g} (the number of ranks) times" in first.text_of_factor
    file, _, line = first.where.rpartition(":")
    assert file == "jax_steps.py"
    assert row.line in SOURCE[int(line) - 1]
    assert bool(first.cause) == bool(first.proof) == bool(row.cause) != bool(first.tried)
    assert not row.cause or any(word in first.cause for word in row.cause), str(first)


@pytest.mark.parametrize("row", WRONG_STEPS, ids=str)
def test_repaired_it_is_the_same(row):
    report = report_of(row, repaired=True)
    assert report.verdict == "same", str(report)


@pytest.mark.parametrize("row", RIGHT_STEPS, ids=str)
def test_what_is_right_has_no_finding(row):
    report = lab.same_model(row.make, mlp_data(), mesh=mesh_of(row))
    assert report.verdict == "same", str(report)
    assert ("no shard_map" in str(report)) == row.name.startswith("partitioned")
    assert [row.what for row in report.rows if row.ok is None] == ["weights", "samples"]


def test_a_mesh_of_tplab_and_results_without_names():
    """A tuple (loss, parameters): what is like the parameters is compared by what was added to it."""

    def make(mesh):
        step = gradient_summed(mesh, False)

        def plain(*args):
            out = step(*args)
            return out["loss"], out["params"]

        return plain

    report = lab.same_model(make, mlp_data(), mesh=Mesh(dp=3 - 1))
    assert report.first is not None and report.first.what == "parameters"
    assert report.first.factor == pytest.approx(2, rel=1e-3)
    assert [(row.what, row.ok) for row in report.rows][2:] == [("loss", True), ("parameters", False)]


def test_what_cannot_be_compared():
    for mesh in (None, "dp", 2):
        with pytest.raises(ValueError, match="give the mesh"):
            lab.same_model(lambda mesh: jnp.sin, (np.ones(3),), mesh=mesh)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="as `lambda mesh: step`, not 2"):
        lab.same_model(lambda mesh: mesh.size, (np.ones(3),), mesh=Mesh(dp=2))  # pyright: ignore[reportArgumentType]

    def only_on_many(mesh):
        return lambda x: x.sum() if mesh.size > 1 else x.reshape(5)

    report = lab.same_model(only_on_many, (np.ones(4, np.float32),), mesh=Mesh(dp=2))
    assert report.verdict == "could not run" and report.exit_code == 2 and "cannot reshape" in report.reason


@pytest.mark.parametrize(
    "make, size, reason",
    [
        (lambda mesh: lambda x: [x] * mesh.size, 2, "something else"),
        (lambda mesh: jnp.sin, 1, "one device"),
        (lambda mesh: lambda x: x.astype(int), 2, "no floating-point numbers"),
        (lambda mesh: lambda x: {"loss": jnp.log(-x).sum()}, 2, "loss is not finite on one device"),
        (lambda mesh: lambda x: {"loss": jnp.exp(1e6 * (x - x.mean() + 1)).sum() * 0}, 2, "loss is not finite"),
        (lambda mesh: lambda x: {"grads": jnp.sin(1e8 * x)}, 2, "rounding alone changes"),
    ],
)
def test_where_nothing_can_be_told(make, size, reason):
    report = lab.same_model(make, (np.linspace(1, 2, 4, dtype=np.float32),), mesh=Mesh(dp=size))
    assert report.verdict == "cannot tell" and report.exit_code == 3 and reason in report.reason


def test_what_is_not_finite_on_the_mesh_alone_is_said_first():
    def make(mesh):
        def step(x):
            return {"loss": x.sum() * mesh.size, "grads": jnp.log(x - x * (mesh.size - 1))}

        return step

    report = lab.same_model(make, (np.ones(4, np.float32),), mesh=Mesh(dp=2))
    assert report.first is not None and report.first.what == "gradient"
    assert report.verdict == "different" and "not finite on the mesh" in report.first.text_of_factor


def step_with_specs(times):
    """A step in Explicit mode, whose specs name no mesh; its loss is `times` too large where there are more devices."""

    def make(mesh):
        def loss(params, x):
            hidden = jnp.tanh(jnp.matmul(x, params["up"], out_sharding=Spec("dp")))
            return (jnp.matmul(hidden, params["down"]) ** 2).mean() * (times if mesh.size > 1 else 1)

        def step(params, x):
            value, grads = jax.value_and_grad(loss)(params, x)
            return {"loss": value, "grads": grads}

        return jax.jit(step)

    return make


@pytest.mark.skipif(jax.__version_info__ < (0, 8), reason="this JAX asks for out_sharding in the gradient of the step")
@pytest.mark.parametrize("times", [1, 3])
def test_arguments_with_explicit_axes_under_a_mesh_that_is_set(times):
    mesh = jax.make_mesh((4,), ("dp",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:4])
    params, x, _ = mlp_data()
    with jax.set_mesh(mesh):
        params = {name: jax.device_put(one, Spec()) for name, one in params.items()}
        report = lab.same_model(step_with_specs(times), (params, jax.device_put(x, Spec("dp"))), mesh=mesh)
    assert report.verdict == ("same" if times == 1 else "different"), str(report)
    assert times == 1 or (report.first is not None and report.first.factor == pytest.approx(times))


@pytest.mark.skipif(not hasattr(jax, "new_ref"), reason="this JAX has no Refs")
@pytest.mark.parametrize("times", [1, 3])
def test_what_a_step_writes_into_refs_is_compared_and_the_callers_stay_as_they_are(times):
    def make(mesh):
        def step(params, x):
            loss, grads = jax.value_and_grad(lambda w: (jnp.tanh(x @ w) ** 2).mean())(params["w"][...])
            params["w"][...] -= (times if mesh.size > 1 else 1) * grads
            return {"loss": loss}

        return jax.jit(step)

    w = np.linspace(-1, 1, 24, dtype=np.float32).reshape(6, 4)
    params = {"w": jax.new_ref(jnp.asarray(w))}
    report = lab.same_model(make, (params, mlp_data()[1]), mesh=Mesh(dp=4))
    assert report.verdict == ("same" if times == 1 else "different"), str(report)
    assert [(row.what, row.ok) for row in report.rows][2:] == [("loss", True), ("parameters", times == 1)]
    assert times == 1 or (report.first is not None and report.first.factor == pytest.approx(times, rel=1e-3))
    np.testing.assert_array_equal(params["w"][...], w)
