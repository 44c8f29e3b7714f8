"""`tplab.jax.run`: what goes in, what comes out, when it is compiled, what is refused, and that it never dies."""

import gc
import os
import re
import socket
import subprocess
import sys
import textwrap
import weakref
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tplab.jax as lab  # before JAX is used
from tplab import Mesh, P
from tplab.errors import ClusterError, MeshError, OutsideRunError, ReplicationError, ShapeError, SpecError
from tplab.jax import all_gather, all_reduce, axis_index, copy_to, rank_key, ring_shift, run
from tplab.jax.private import in_float64, pvary

TP2, TP4, GRID = Mesh(tp=2), Mesh(tp=4), Mesh(dp=2, tp=4)


def begun(script: str, *args: str) -> subprocess.Popen[str]:
    """A script in a process of its own, where JAX has not been used yet."""
    untouched = {name: value for name, value in os.environ.items() if name not in ("NPROC", "XLA_FLAGS")}
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(script), *args]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=untouched, stdout=pipe, stderr=pipe, text=True)


def ended(process: subprocess.Popen[str]) -> str:
    """What it printed."""
    try:
        out, err = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == 0, err[-3000:]
    return out


def in_a_process(script: str) -> str:
    return ended(begun(script))


# ----------------------------------------------------------------------------------------------------- in and out


def test_specs_say_who_gets_what():
    x, a = np.arange(12.0).reshape(3, 4), np.arange(8.0).reshape(4, 2)
    out = run(lambda x, a: all_reduce(x @ a, "tp"), TP2, x, a, in_specs=(P(None, "tp"), P("tp")), out_specs=P())
    np.testing.assert_array_equal(out.value, x @ a)
    assert [piece.shape for piece in out.per_rank] == [(3, 2), (3, 2)]


def test_an_empty_argument_changes_no_other_ones_type():
    """Its gradient is the sum of the ranks' parts, whatever else there is."""
    w, x = np.ones(3, np.float32), np.arange(6, dtype=np.float32)
    for unused in (np.zeros(1), np.zeros(0)):
        gradient = run(
            lambda w, x, _: jax.grad(lambda w: (w * x).sum())(w),
            *(TP2, w, x, unused),
            in_specs=(P(), P("tp"), P()),
            out_specs=P(),
        )
        np.testing.assert_array_equal(gradient.value, [3, 5, 7])
    mlp = lab.ParallelMLP(5, 6, "tp")
    out = run(mlp, TP2, mlp.init(jax.random.key(0)), np.zeros((0, 5)), in_specs=(mlp.specs, P()), out_specs=P())
    assert out.value.shape == (0, 5)


def test_without_specs_everything_reaches_every_rank_and_comes_back():
    out = run(lambda x: x + axis_index("tp"), TP4, np.array([1.0, 2.0]))
    assert [piece.tolist() for piece in out.per_rank] == [[1, 2], [2, 3], [3, 4], [4, 5]]
    with pytest.raises(SpecError, match=r"no out_specs.*give out_specs \(P\(\) where all ranks return the same\)"):
        _ = out.value


def test_results_of_every_kind_come_back_without_out_specs():
    def program(x):
        return {"varying": ring_shift(x, "tp"), "same": all_reduce(x, "tp"), "untouched": x, "number": 3, "none": None,
                "scalar": x.sum() * axis_index("tp"), "empty": x[:0], "flag": axis_index("tp") == 1}  # fmt: skip

    out = run(program, TP2, np.ones((2, 3), np.float32)).per_rank
    assert {key: getattr(value, "shape", None) for key, value in out[1].items()} == {
        "varying": (2, 3), "same": (2, 3), "untouched": (2, 3), "number": (), "none": None, "scalar": (), "flag": (),
        "empty": (0, 3),
    }  # fmt: skip
    assert float(out[1]["scalar"]) == 6
    assert [bool(result["flag"]) for result in out] == [False, True]


def test_results_of_different_ranks_can_be_computed_with():
    first, *others = run(lambda: jnp.ones(3) * axis_index("tp"), TP4).per_rank
    assert np.asarray(sum(others, first)).tolist() == [6, 6, 6]


def test_pieces_are_what_each_rank_returned_also_with_out_specs():
    out = run(lambda x: x * 2, GRID, np.arange(8.0), in_specs=P("dp"), out_specs=P("dp"))
    assert out.value.tolist() == (2 * np.arange(8.0)).tolist()
    assert [piece.tolist() for piece in out.per_rank] == [[0, 2, 4, 6]] * 4 + [[8, 10, 12, 14]] * 4


def test_specs_over_structures():
    params = {"w": np.ones((4, 2)), "b": np.zeros(2)}

    def program(params, scale):
        return {"w": params["w"] * scale, "b": (params["b"] + scale,)}

    specs = {"w": P("tp"), "b": None}
    out = run(program, TP2, params, 2.0, in_specs=(specs, None), out_specs={"w": P("tp"), "b": P()})
    assert out.value["w"].shape == (4, 2)
    assert out.value["b"][0].tolist() == [2, 2]
    assert out.per_rank[0]["w"].shape == (2, 2)
    one_for_all = run(lambda x, y: (x, y), TP2, np.arange(4), np.arange(2), in_specs=P("tp"), out_specs=P("tp"))
    assert [leaf.tolist() for leaf in one_for_all.value] == [[0, 1, 2, 3], [0, 1]]


WEIGHTS = {"w": P("tp"), "b": P("tp")}


@pytest.mark.parametrize(
    "in_specs",
    [
        None,
        P(),
        P("tp"),
        (P("tp"), None),
        (WEIGHTS, P("tp")),
        ({"w": P(), "b": None}, P()),
    ],
)
def test_none_as_an_argument_and_in_one(in_specs):
    def program(params, mask):
        return params["w"] * (2 if mask is None and params["b"] is None else 3)

    out = run(program, TP2, {"w": np.arange(4.0), "b": None}, None, in_specs=in_specs)
    is_split = "tp" in str(in_specs)
    assert out.per_rank[1].tolist() == ([4, 6] if is_split else [0, 2, 4, 6])


def test_none_in_results():
    x = np.arange(4.0)
    for out_specs in (P("tp"), (P("tp"), P()), (P("tp"), None)):
        out = run(lambda x: (x, None), TP2, x, in_specs=P("tp"), out_specs=out_specs)
        assert out.value[0].tolist() == x.tolist()
        assert out.value[1] is None
        assert out.per_rank[1][1] is None
    assert run(lambda: None, TP2, out_specs=P()).value is None
    assert run(lambda: None, TP2).per_rank == [None, None]


def test_jax_own_partition_specs_are_taken_too():
    spec = jax.sharding.PartitionSpec("tp")
    assert run(lambda x: x, TP2, np.arange(4), in_specs=spec, out_specs=spec).value.tolist() == [0, 1, 2, 3]


def test_what_is_no_array_is_part_of_the_program():
    def program(x, name, activation, times):
        assert name == "tanh"
        return activation(x) * times

    out = run(program, TP2, np.ones(2), "tanh", jnp.tanh, 3)
    np.testing.assert_allclose(out.per_rank[0], 3 * np.tanh(np.ones(2)), rtol=1e-6)
    with pytest.raises(SpecError, match=r"splits a str as P\('tp'\); only arrays can be split"):
        run(program, TP2, np.ones(2), "tanh", jnp.tanh, 3, in_specs=(P(), P("tp"), P(), P()))


def test_an_array_that_lies_right_is_not_moved():
    x = run(lambda: jnp.ones(3) * axis_index("tp"), TP4, out_specs=P("tp")).value
    out = run(lambda x: x, TP4, x, in_specs=P("tp"), out_specs=P("tp"))
    assert out._small[0] is x
    other = run(lambda x: x.sum().reshape(1), TP2, x, in_specs=P("tp"), out_specs=P("tp"))  # from four devices to two
    assert other.value.tolist() == [3, 15]


def test_numpy_memory_that_is_written_to_later_does_not_travel():
    """JAX uses NumPy's memory as it is, where it begins at a multiple of 64 bytes, and reads it when it comes to it."""
    memory = np.empty(4 * 16 * 4 + 64, np.uint8)
    begin = -memory.ctypes.data % 64
    x = memory[begin : begin + 4 * 16 * 4].view(np.float32).reshape(4, 16)
    x[:] = 1
    for specs in (P("tp"), P()):
        out = run(lambda x: ring_shift(x, "tp"), TP4, x, in_specs=specs)
        x[:] = 0
        assert all(np.all(event.values == 1) for event in out.trace.select(kind="send").events)
        assert all(np.all(piece == 1) for piece in out.per_rank)
        x[:] = 1


def test_double_precision_where_jax_is_told_to():
    """The same function, compiled for both; in float64 a sharded product differs from NumPy's by rounding alone."""

    def program(x, a):
        return all_reduce(x @ a, "tp")

    random = np.random.default_rng(0).normal
    x, a = random(size=(5, 8)), random(size=(8, 3))
    for wide in (False, True, False):
        with in_float64(wide):
            out = run(program, TP4, x, a, in_specs=(P(None, "tp"), P("tp")), out_specs=P())
            assert out.value.dtype == (np.float64 if wide else np.float32)
            np.testing.assert_allclose(out.value, x @ a, rtol=0, atol=1e-14 if wide else 1e-5)
            (event,) = out.trace.select(rank=0, kind="collective").events
            assert (event.dtype, event.bytes) == (("float64", 176) if wide else ("float32", 88))
            assert event.values is not None
            np.testing.assert_allclose(event.values, x @ a, rtol=0, atol=1e-14 if wide else 1e-5)


def test_run_inside_grad_and_jit():
    w = jnp.arange(4.0)

    def loss(w):
        return run(lambda w: all_reduce((w**2).sum(), "tp"), TP4, w, in_specs=P("tp"), out_specs=P()).value

    np.testing.assert_array_equal(jax.grad(loss)(w), 2 * w)
    assert float(jax.jit(loss)(w)) == 14
    assert float(loss(w)) == 14


def test_its_collectives_work_in_a_shard_map_of_ones_own():
    mesh = jax.make_mesh((4,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    split, whole = jax.sharding.PartitionSpec("tp"), jax.sharding.PartitionSpec()
    double = jax.shard_map(lambda x: all_reduce(x, "tp"), mesh=mesh, in_specs=split, out_specs=whole)
    assert jax.jit(double)(jnp.arange(4)).tolist() == [6]


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_under_a_mesh_of_set_mesh(kind):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(getattr(jax.sharding.AxisType, kind),), devices=jax.devices()[:2])
    program = lambda x: all_reduce(x, "tp")  # noqa: E731
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.arange(2.0), jax.sharding.PartitionSpec("x"))
        out = run(program, TP2, x, out_specs=P())
        assert out.value.tolist() == [0, 2]
        assert len(out.trace.select(kind="collective")) == 2
        assert len(lab.collectives_in(program, TP2, x)) == 1
        whole = lambda x: run(program, TP2, x, out_specs=P()).value.sum()  # noqa: E731
        if kind == "Auto":
            assert jax.grad(whole)(x).tolist() == [2, 2]
        else:
            with pytest.raises(MeshError, match=r"inside jit or grad under a mesh of jax.set_mesh with Explicit axes"):
                jax.grad(whole)(x)


@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_under_a_mesh_of_set_mesh_with_another_number_of_devices(kind, size):
    types = (getattr(jax.sharding.AxisType, kind),)
    program = lambda x: lax.while_loop(lambda x: x.sum() < 9, lambda x: x * 2, all_reduce(x, "tp"))  # noqa: E731
    whole = lambda x: run(program, TP2, x, out_specs=P()).value.sum()  # noqa: E731
    with jax.set_mesh(jax.make_mesh((size,), ("x",), axis_types=types, devices=jax.devices()[:size])):
        for x in (np.arange(12.0), jax.device_put(jnp.arange(12.0), jax.sharding.PartitionSpec("x"))):
            out = run(program, TP2, x, out_specs=P())
            assert out.value.tolist() == out.per_rank[1].tolist() == [2 * n for n in range(12)]
            assert len(out.trace.select(kind="collective")) == 2
            assert len(lab.collectives_in(program, TP2, x)) == 1
            with pytest.raises(MeshError, match=r"inside jit or grad under a mesh of jax.set_mesh"):
                jax.jit(whole)(x)


def test_the_trace_of_arguments_that_were_given_away():
    """As a jitted update with donate_argnums does it, before somebody asks for the trace."""
    x = jnp.ones(4)
    out = run(lambda x: ring_shift(x, "tp"), TP2, x)
    x.delete()
    assert out.trace.bytes_sent() == 32
    assert out.per_rank[0].tolist() == [1, 1, 1, 1]


def test_a_result_says_what_it_is():
    out = run(lambda: axis_index("tp"), TP2)
    assert repr(out) == "Result of lambda on Mesh(tp=2): value, per_rank, trace"


# ------------------------------------------------------------------------------------------------------ compiling


def compiled(*args: Any, **options: Any) -> object:
    """What `run` calls: the same object as long as nothing is compiled anew."""
    return run(*args, **options)._compiled


def test_compiled_once_for_each_kind_of_arguments():
    def program(x, y):
        return x * y

    kinds = [compiled(program, TP2, np.ones(2, np.float32), 2.0)]
    for _ in range(3):
        assert compiled(program, TP2, np.ones(2, np.float32), 2.0) is kinds[0]
        assert compiled(program, TP2, jnp.ones(2), 3.0) is kinds[0]
    kinds.append(compiled(program, TP2, np.ones(3, np.float32), 2.0))
    kinds.append(compiled(program, TP2, np.ones(3, np.float32), 2))
    kinds.append(compiled(program, TP4, np.ones(3, np.float32), 2))
    kinds.append(compiled(program, TP4, np.ones(4, np.float32), 2, in_specs=(P("tp"), P())))
    assert len(set(map(id, kinds))) == 5
    with jax.default_matmul_precision("highest"):
        assert compiled(program, TP2, jnp.ones(2), 3.0) is not kinds[0]


def test_traced_once_where_nothing_changes(capsys):
    def program(x):
        print("traced")
        return x

    for _ in range(3):
        run(program, TP2, 1.0)
    assert capsys.readouterr().out == "traced\n"


def test_traced_but_not_compiled_again_where_what_changes_makes_no_difference():
    calls: list[int] = []

    def program(x):
        calls.append(len(calls))
        return x

    assert len({id(compiled(program, TP2, 1.0)) for _ in range(4)}) == 1
    assert calls == [0, 1, 2, 3]


def test_a_program_that_reads_what_cannot_be_compared_is_traced_at_every_call():
    random = np.random.default_rng(0)

    def program(x):
        return x + random.integers(1, 3)

    got = [float(run(program, TP2, 1.0).per_rank[0]) for _ in range(8)]
    again = np.random.default_rng(0)
    assert got == [1 + again.integers(1, 3) for _ in range(8)]
    assert len({id(compiled(program, TP2, 1.0)) for _ in range(8)}) <= 2


def test_two_functions_of_the_same_name_do_not_collide():
    """As where a cell is edited and run again, so often that memory is used again."""
    for number in range(20):
        program = eval(f"lambda x: x + {number}")
        assert run(program, TP2, np.zeros(1)).per_rank[0].tolist() == [number]


def test_what_was_compiled_goes_with_its_function():
    def make():
        big = np.ones(1000)
        program = lambda x: x + big  # noqa: E731
        assert run(program, TP2, np.zeros(1000)).per_rank[0][0] == 1
        return weakref.ref(program)

    reference = make()
    gc.collect()
    assert reference() is None


SCALE = 2.0
SETTINGS = {"scale": [1.0]}


def scaled(x):
    return x * SCALE


def test_a_global_that_changed_is_noticed(monkeypatch):
    def program(x):
        return scaled(x) * SETTINGS["scale"][0]

    value = lambda: float(run(program, TP2, np.float32(1)).per_rank[0])  # noqa: E731
    assert value() == 2
    monkeypatch.setitem(globals(), "SCALE", 3.0)  # read by a function that the program calls
    assert value() == 3
    SETTINGS["scale"][0] = 2.0
    assert value() == 6
    SETTINGS["scale"][0] = 1.0
    monkeypatch.setitem(globals(), "scaled", lambda x: x)
    assert value() == 1


def test_a_closure_that_changed_is_noticed():
    factor = np.float32(2)

    def program(x):
        return x * factor

    assert float(run(program, TP2, 1.0).per_rank[0]) == 2
    factor = jnp.float32(5)
    assert float(run(program, TP2, 1.0).per_rank[0]) == 5


def test_methods_partials_and_objects_can_be_run():
    from functools import partial

    class Layer:
        def __init__(self, w):
            self.w = w

        def forward(self, x):
            return x * self.w

        __call__ = forward

    double, triple = Layer(2), Layer(3)
    for _ in range(2):
        assert float(run(double.forward, TP2, 1.0).per_rank[0]) == 2
        assert float(run(triple.forward, TP2, 1.0).per_rank[0]) == 3
        assert float(run(triple, TP2, 1.0).per_rank[0]) == 3
        assert float(run(partial(lambda x, y: x - y, 5.0), TP2, 1.0).per_rank[0]) == 4
    assert double.forward.__func__ is Layer.forward


# --------------------------------------------------------------------------------------------------------- random


def dropout(x):
    keep = jax.random.bernoulli(rank_key(), 0.7, x.shape)
    noise = jax.random.normal(jax.random.fold_in(rank_key(), 1), x.shape)
    return jnp.where(keep, all_reduce(x, "tp") + noise, 0.0)


def test_twenty_runs_with_dropout_give_the_same_bits():
    x = np.ones((33, 17), np.float32)
    results = {tuple(p.tobytes() for p in map(np.asarray, run(dropout, GRID, x, seed=7).per_rank)) for _ in range(20)}
    assert len(results) == 1
    (pieces,) = results
    assert len(set(pieces)) == GRID.size  # each rank draws its own
    again = [np.asarray(piece).tobytes() for piece in run(dropout, GRID, x, seed=8).per_rank]
    assert not set(pieces) & set(again)


def test_a_seed_does_not_compile_anew():
    def program():
        return jax.random.uniform(rank_key())

    runs = [run(program, TP2, seed=seed) for seed in (0, 1, 2**32, 2**70, 2**70 + 1)]
    assert len({float(piece) for out in runs for piece in out.per_rank}) == 10
    assert len({id(out._compiled) for out in runs}) == 1


def test_a_key_may_be_an_argument():
    def program(key):
        return jax.random.normal(jax.random.fold_in(key, axis_index("tp")), (3,))

    found = run(program, Mesh(tp=2), jax.random.key(7)).per_rank
    for rank in (0, 1):
        want = jax.random.normal(jax.random.fold_in(jax.random.key(7), rank), (3,))
        np.testing.assert_array_equal(found[rank], want)


def test_a_key_needs_a_run():
    with pytest.raises(OutsideRunError, match="no ranks here"):
        rank_key()
    mesh = jax.make_mesh((2,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    spec = jax.sharding.PartitionSpec("tp")
    program = jax.shard_map(lambda x: x + jax.random.uniform(rank_key()), mesh=mesh, in_specs=spec, out_specs=spec)
    with pytest.raises(OutsideRunError, match="pass keys in, and fold axis_index into"):
        program(jnp.ones(2))


# --------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    "specs, error, message",
    [
        (
            P("pp"),
            SpecError,
            r"P\('pp'\) names axis 'pp', which Mesh\(dp=2, tp=4\) does not have; its axes are 'dp', 'tp'",
        ),
        (P(None, None, "tp"), SpecError, r"3 entries, and the .*\(4, 10\) has 2 dims"),
        (
            P(None, "tp"),
            ShapeError,
            r"dim 1 has size 10, which the 4 ranks of axis 'tp' .*\npad it to 12, or use a mesh",
        ),
        ((P(), P()), SpecError, r"in_specs has 2 entries, but there are 1 arguments; give one for each"),
        (
            {"x": P()},
            SpecError,
            r"in_specs is \{'x': P\(\)\}; give a P, or a tuple with one P for each of the 1 arguments",
        ),
        ("tp", SpecError, r"in_specs has 'tp' where a P belongs"),
        (("tp",), SpecError, r"in_specs has 'tp' where a P belongs"),
        (({"a": P()},), SpecError, r"in_specs has \{'a': P\(\)\} where the value is PyTreeDef\(\*\); give a P, or"),
    ],
)
def test_in_specs_that_do_not_fit(specs, error, message):
    with pytest.raises(error, match=message):
        run(lambda x: x, GRID, np.zeros((4, 10)), in_specs=specs)


@pytest.mark.parametrize(
    "specs, error, message",
    [
        (P("pp"), SpecError, r"P\('pp'\) names axis 'pp', which Mesh\(dp=2, tp=4\) does not have"),
        (
            P(None, None, "tp"),
            SpecError,
            r"out_specs gives result P\(None, None, 'tp'\), which has 3 entries, and each",
        ),
        ((P(), P()), SpecError, r"out_specs has \(P\(\), P\(\)\) where the value is PyTreeDef\(\*\)"),
        ("tp", SpecError, r"out_specs has 'tp' where a P belongs"),
    ],
)
def test_out_specs_that_do_not_fit(specs, error, message):
    with pytest.raises(error, match=message):
        run(lambda x: x, GRID, np.zeros((4, 10)), out_specs=specs)


def test_a_scalar_cannot_be_joined():
    with pytest.raises(SpecError, match=r"0 dims \(\).*x.reshape\(1\) makes a scalar a piece that can be joined"):
        run(lambda x: x.sum(), TP2, np.ones(2), in_specs=P("tp"), out_specs=P("tp"))


def test_replication_that_nothing_makes_so():
    x = np.ones((8, 4), np.float32)
    message = (
        r"out_specs=P\(\) says that result\['y'\], \[4, 4\], is the same on all ranks of axis 'dp'.*\n"
        r"If it is a partial result, all_reduce over 'dp' makes it the same .*\. .* piece, with out_specs=P\('dp'\)\.\n"
        r"If the ranks are meant to differ, name 'dp' in out_specs"
    )
    with pytest.raises(ReplicationError, match=message):
        run(lambda x: {"y": x}, GRID, x, in_specs=P("dp"), out_specs=P())
    with pytest.raises(ReplicationError, match="a ring gathered it, JAX cannot know that the ranks agree"):
        run(lambda x: all_gather(x, "dp"), GRID, x, in_specs=P("dp"), out_specs=P())
    with pytest.raises(ReplicationError, match="axis 'dp' and 'tp'"):
        run(lambda x: x, GRID, x, in_specs=P(("dp", "tp")), out_specs=P())
    run(lambda x: all_reduce(x, "dp"), GRID, x, in_specs=P("dp"), out_specs=P())


def test_a_carry_that_begins_the_same_on_all_ranks():
    def program(x, begin=lambda zeros: zeros):
        return lax.scan(lambda total, _: (total + x, None), begin(jnp.zeros(2)), None, length=3)[0]

    about: dict[str, Any] = {"in_specs": P("dp"), "out_specs": P("dp")}
    with pytest.raises(TypeError, match="must have equal types") as caught:
        run(program, Mesh(dp=2), np.ones(4, np.float32), **about)
    assert "zeros become that by jax.lax.pcast(x, axis, to='varying')" in " ".join(caught.value.__notes__)
    program = partial(program, begin=lambda zeros: pvary(zeros, ("dp",)))
    np.testing.assert_array_equal(run(program, Mesh(dp=2), np.ones(4, np.float32), **about).value, [3] * 4)


def test_a_sum_over_groups_of_an_axis():
    with pytest.raises(NotImplementedError) as caught:
        run(lambda x: lax.psum(x, "dp", axis_index_groups=[[0, 1], [2, 3]]), Mesh(dp=4), np.ones(4))
    assert re.search(r"test_run.py:\d+.*: JAX has no types for this.* an axis for", " ".join(caught.value.__notes__))


def test_copies_for_work_that_is_divided_differ_as_far_as_types_know():
    with pytest.raises(ReplicationError, match="axis 'tp'"):
        run(lambda x: copy_to(x, "tp"), GRID, np.ones(2), out_specs=P())


def asks_in_a_branch(x):
    if axis_index("tp") == 0:
        return x
    return -x


@pytest.mark.parametrize(
    ("program", "line", "way_out"),
    [
        (asks_in_a_branch, 'if axis_index("tp") == 0:', "jnp.where to choose"),
        (lambda x: x * max(x[0], x[1]), "max(x[0], x[1])", "jnp.where to choose"),
        (lambda x: sum(x for _ in range(axis_index("tp"))), "range(", "jax.lax.fori_loop"),
        (lambda x: [x, -x][axis_index("tp")], "[x, -x]", "jax.lax.switch"),
        (lambda x: x[: int(axis_index("tp"))], "int(", "Keep the array"),
        (lambda x: x * float(x[0]), "float(", "Keep the array"),
        (lambda x: x * x[0].item(), "item()", "Keep the array"),
        (lambda x: x[: axis_index("tp")], "x[: axis", "jax.lax.dynamic_slice_in_dim"),
        (lambda x: jnp.zeros(axis_index("tp")), "jnp.zeros(", "same shape on every rank"),
        (lambda x: jnp.arange(axis_index("tp")), "jnp.arange(", "same shape on every rank"),
        (lambda x: x[x > 0], "x[x > 0]", "jnp.where(mask, x, 0)"),
        (lambda x: np.sin(x), "np.sin(", "jax.numpy in the program"),
        (lambda x: jnp.nonzero(x), "jnp.nonzero(", ""),  # JAX says what to do
        (lambda x: lax.scan(lambda x, _: (x if x[0] > 0 else -x, None), x, None, 2)[0], "lax.scan(", "jnp.where"),
    ],
)
def test_python_cannot_ask_what_a_rank_is(program, line, way_out):
    """Every refusal has tplab's words, the line of the program, and what to write instead."""
    with pytest.raises((TypeError, IndexError)) as caught:
        run(program, TP2, np.ones(2))
    (note,) = [note for note in caught.value.__notes__ if "JAX has removed" not in note]
    place, _, rest = note.partition(": tplab.jax.run traces the program once for all ranks")
    assert re.match(r"test_run\.py:\d+, `", place)
    assert line in place
    assert way_out in rest and bool(way_out) == ("\n" in rest)
    if "tracing the function" in str(caught.value):
        assert re.search(r"tracing the function \S+ at \S*test_run\.py:\d+", str(caught.value))


def test_what_the_program_raises_comes_out_as_it_is():
    def program(x):
        raise KeyError("lost my shard")

    with pytest.raises(KeyError, match="lost my shard"):
        run(program, TP2, np.ones(2))
    assert run(lambda x: x, TP2, np.ones(2)).per_rank[1].tolist() == [1, 1]


@pytest.mark.parametrize(
    "options, error, message",
    [
        (
            {"clock": "measured"},
            ValueError,
            r"clock='measured' is for tplab.torch: XLA compiles .*\n.*cluster='laptop'",
        ),
        ({"clock": "sundial"}, ValueError, r"clock is 'sundial'; it must be 'modelled'"),
        ({"on": "processes"}, ValueError, r"on='processes' is for tplab.torch; .*jax.distributed.initialize"),
        ({"on": "abacus"}, ValueError, r"on is 'abacus', and JAX knows no such devices here"),
        ({"cluster": "abacus"}, ClusterError, r"no cluster is named 'abacus'"),
        ({"seed": -1}, ValueError, "seed is -1; it must be a whole number, 0 or more"),
        ({"seed": "a"}, ValueError, "seed is 'a'; it must be a whole number, 0 or more"),
        ({"keep_values": -5}, ValueError, "keep_values is -5; it must be a whole number, 0 or more"),
    ],
)
def test_options_that_make_no_sense(options, error, message):
    with pytest.raises(error, match=message):
        run(lambda x: x, TP2, np.ones(2), **options)


@pytest.mark.parametrize("args", [(lambda x: x, 4), (TP2, lambda x: x), (None, TP2)])
def test_a_function_and_a_mesh(args):
    with pytest.raises(TypeError, match=r"run takes a function and a mesh, as run\(f, Mesh\(tp=4\), ...\), not"):
        run(*args)


@pytest.mark.parametrize("result", ["done", {"a": ["done"]}, lambda x: x, {1, 2}, TP2])
def test_results_that_no_compiled_program_can_have(result):
    with pytest.raises(TypeError, match=r"the program returned .*, of type .*; a compiled program returns arrays"):
        run(lambda: result, TP2)


def test_a_run_in_a_rank_s_program():
    message = r"run was called in the program of a rank, on Mesh\(tp=4\)\. .*tplab.torch, where a rank can call run"
    with pytest.raises(MeshError, match=message):
        run(lambda x: run(lambda y: y, TP2, x).per_rank[0], TP4, np.ones(2))


# -------------------------------------------------------------------------------------------------------- devices


def test_more_ranks_than_devices():
    message = r"the mesh has 64 ranks, and JAX made 16 CPU devices when it was first used.*\nRestart the kernel"
    with pytest.raises(MeshError, match=message) as caught:
        run(lambda: axis_index("tp"), Mesh(tp=64))
    assert "tplab.jax.prepare(64)" in str(caught.value)
    with pytest.raises(MeshError, match="Restart the kernel"):
        lab.prepare(64)
    lab.prepare(8)  # that many there are


def test_a_mesh_that_is_too_large_is_refused_at_once():
    for refused in (lambda: run(lambda: 1, Mesh(tp=2**20)), lambda: lab.prepare(2**20)):
        with pytest.raises(MeshError, match=r"1,048,576 ranks, and tplab has JAX simulate at most 1,024 CPU devices"):
            refused()


def test_as_many_devices_as_the_mesh_needs():
    script = """
        from tplab import Mesh
        from tplab.jax import run, axis_index, all_reduce
        print([int(x) for x in run(lambda: all_reduce(axis_index("tp"), "tp"), Mesh(tp=24)).per_rank])
    """
    assert in_a_process(script) == f"{[276] * 24}\n"


def test_prepare_and_other_peoples_settings():
    script = """
        import jax
        jax.config.update("jax_num_cpu_devices", 20)
        import tplab.jax
        tplab.jax.prepare({number})
        print(len(jax.devices()))
    """
    assert in_a_process(script.format(number=4)) == "20\n"
    assert in_a_process(script.format(number=24)) == "24\n"


IN_FLIGHT = """
    import numpy as np
    {before}
    from tplab import Mesh, P
    from tplab.jax import run, ring_shift, all_reduce
    from tplab.jax.ranks.devices import needs_pacing, jax_mesh

    def program(x):
        y = x
        for _ in range(7):
            x = ring_shift(x, "tp")
            y = y + x + all_reduce(x, "tp")
        return y

    print(needs_pacing(jax_mesh(Mesh(tp=8))))
    x = np.ones((8, 64, 64), np.float32)
    runs = [run(program, Mesh(tp=8), x, in_specs=P("tp"), out_specs=P("tp")) for _ in range({num_runs})]
    assert all(np.all(np.asarray(r.value) == 64) for r in runs)
"""


def test_hundreds_of_runs_in_flight():
    """Without the threads that tplab arranges for, XLA ends the process on a machine of two cores after some 50."""
    assert in_a_process(IN_FLIGHT.format(before="", num_runs=150)) == "False\n"


def test_hundreds_of_runs_where_jax_was_used_before_tplab_came():
    """Then the threads are too few, and one run ends before the next begins."""
    before = "import jax; jax.config.update('jax_num_cpu_devices', 8); jax.devices()"
    assert in_a_process(IN_FLIGHT.format(before=before, num_runs=150)) == "True\n"
    same = "import jax; jax.config.update('jax_num_cpu_devices', 16); jax.devices()"  # the number we would have set
    assert in_a_process(IN_FLIGHT.format(before=same, num_runs=0)) == "True\n"  # so these are paced too


def test_the_devices_of_several_processes():
    """jax.distributed: the ranks are shared out among the processes, and each sees the results of its own."""
    script = """
        import sys
        import tplab.jax as lab
        from tplab import Mesh, P
        from tplab.errors import MeshError
        import jax, numpy as np
        jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
        x = np.arange(8, dtype=np.float32)
        program = lambda x: lab.all_reduce(lab.ring_shift(x, "tp"), "dp")
        out = lab.run(program, Mesh(dp=2, tp=2), x, in_specs=P(("dp", "tp")), out_specs=P("tp"), cluster="h100")
        pieces = [None if piece is None else piece.tolist() for piece in out.per_rank]
        print(pieces, out.trace.bytes_sent(), out.value.shape)
        try:
            lab.run(lambda: 1, Mesh(tp=3))
        except MeshError as error:
            print("2 processes, which cannot share them equally" in str(error))
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    first, second = begun(script, address, "0"), begun(script, address, "1")
    out = [[line for line in ended(process).splitlines() if "Gloo" not in line] for process in (first, second)]
    pieces = [[8.0, 10.0], [4.0, 6.0]]
    assert out[0] == [f"{[*pieces, None, None]} 64 (4,)", "True"]
    assert out[1] == [f"{[None, None, *pieces]} 64 (4,)", "True"]
