"""The trace of a JAX run: what is in it, when that happens on the modelled clock, and whether its values are real."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import tplab.jax as lab  # before JAX is used
from tplab import Mesh, P, cost
from tplab.cost import Chip, Cluster, Link
from tplab.errors import TraceError
from tplab.jax import all_gather, all_reduce, axis_index, rank_key, reduce_scatter, ring_shift, run
from tplab.jax.tracing import walk

TP2, TP4, GRID = Mesh(tp=2), Mesh(tp=4), Mesh(dp=2, tp=4)

# 1 FLOP and 1 byte a second, no latency and no launch: times are whole numbers that can be worked out by hand.
CHIP = Chip("counter", flops={"float32": 1.0}, memory_bandwidth=1e9, memory=1e9)
TOY = Cluster("toy", CHIP, Link("wire", latency=0.0, bandwidth=1.0))


def events(trace, **wanted) -> list[Any]:
    return list(trace.select(**wanted).events)


def line_here(offset):
    """This file and the line `offset` lines below the caller's, as a trace names it."""
    return f"test_trace.py:{inspect.stack()[1].lineno + offset}"


# ------------------------------------------------------------------------------------------------------ what is there


def test_a_megatron_mlp():
    """One all_reduce; the FLOPs of two products and the tanh; the line of each."""
    B, D, F, R = 3, 8, 16, 4
    line = line_here(3)

    def mlp(x, a, b):
        return all_reduce(jnp.tanh(x @ a) @ b, "tp")

    specs = (P(), P(None, "tp"), P("tp"))
    args = np.ones((B, D)), np.ones((D, F)), np.ones((F, D))
    trace = run(mlp, TP4, *args, in_specs=specs, out_specs=P(), cluster="h100").trace
    assert (trace.framework, trace.title) == ("jax", "mlp")
    assert (trace.clock, trace.unit, trace.cluster) == ("modelled", "s", "h100")
    for rank in TP4.ranks:
        computed = events(trace, kind="compute", rank=rank)
        assert [(e.op, e.flops, e.shape) for e in computed] == [
            ("dot_general", 2 * B * D * F // R, (B, F // R)), ("tanh", B * F // R, (B, F // R)),
            ("dot_general", 2 * B * D * F // R, (B, D)),
        ]  # fmt: skip
        assert computed[0].bytes == 4 * (B * D + D * F // R + B * F // R)
        (collective,) = events(trace, kind="collective", rank=rank)
        assert (collective.op, collective.axis, collective.group) == ("all_reduce", "tp", (0, 1, 2, 3))
        assert collective.bytes == cost.bytes_sent("all_reduce", B * D, 4, R, rank)
        assert (collective.shape, collective.dtype, collective.contributors) == ((B, D), "float32", (0, 1, 2, 3))
        assert {e.where for e in (*computed, collective)} == {line}


def test_a_backward_pass_inside_the_program():
    """f's gradient is an all_reduce; it is put down to the line of the forward pass that it belongs to."""
    line = line_here(3)

    def loss(x, a):
        return all_reduce((x @ a).sum(), "tp")

    trace = run(lambda x, a: jax.grad(loss, argnums=(0, 1))(x, a), TP4, np.ones((2, 8)), np.ones((8, 4)),
                in_specs=(P(), P(None, "tp")), cluster="h100").trace  # fmt: skip
    (dx,) = events(trace, kind="collective", rank=0)
    assert (dx.op, dx.shape, dx.where) == ("all_reduce", (2, 8), line)
    products = [e for e in events(trace, kind="compute", rank=0) if e.op == "dot_general"]
    assert len(products) == 2  # the gradients': no result needs the forward's


COLLECTIVES = {
    "all_reduce": lambda x: all_reduce(x, "tp"),
    "all_gather": lambda x: all_gather(x, "tp"),
    "reduce_scatter": lambda x: reduce_scatter(x, "tp"),
    "all_to_all": lambda x: lab.all_to_all(x, "tp", 0, 1),
}


@pytest.mark.parametrize("op", COLLECTIVES)
@pytest.mark.parametrize("cluster", ["h100", "ethernet", "tpu_v5e"])
def test_a_collective_takes_what_it_costs(op, cluster):
    from tplab.cost import find

    trace = run(COLLECTIVES[op], GRID, np.ones((8, 3), np.float32), cluster=cluster).trace
    link = find(cluster).group_link(GRID.group(0, "tp"))
    for rank in GRID.ranks:
        (event,) = events(trace, kind="collective", rank=rank)
        assert event.op == op
        assert event.end - event.start == pytest.approx(cost.collective(op, 96, 4, link).seconds)
        assert event.bytes == cost.bytes_sent(op, 24, 4, 4, GRID.index(rank, "tp"))
    assert len({event.message for event in events(trace, kind="collective")}) == 2  # one a group


def test_several_axes_and_ranks_that_are_alone():
    trace = run(lambda x: all_reduce(all_reduce(x, ("dp", "tp")), "one"), Mesh(dp=2, one=1, tp=2), np.ones(3)).trace
    assert {(e.axis, e.group) for e in trace.events if e.kind == "collective"} == {("dp,tp", (0, 1, 2, 3))}
    assert trace.num_steps == 1


def test_reduction_by_the_largest_and_the_mean_are_all_reduces():
    trace = run(lambda x: (all_reduce(x, "tp", "max"), all_reduce(x, "tp", "mean")), TP2, np.ones(3)).trace
    assert [e.op for e in events(trace, kind="collective", rank=0)] == ["all_reduce", "all_reduce"]


def test_a_broadcast_costs_an_all_reduce():
    trace = run(lambda x: lab.broadcast(x, "tp", 2), TP4, np.arange(8.0)).trace
    for e in events(trace, kind="collective"):
        assert (e.op, e.bytes) == ("broadcast", 2 * 3 * 8 * 4 // 4)
        assert e.values.tolist() == list(range(8))


def test_collectives_that_the_program_calls_by_jax_own_names():
    def program(x):
        y = jax.lax.psum(x, "tp")
        return jax.lax.ppermute(y, "tp", [(0, 1)]), jax.lax.all_gather(x, "tp"), jax.lax.all_to_all(x, "tp", 0, 0)

    trace = run(program, TP2, np.arange(2.0)).trace
    assert [e.op for e in events(trace, rank=0) if e.kind in ("send", "collective")] == [
        "all_reduce", "all_gather", "all_to_all", "ppermute",
    ]  # fmt: skip


def test_what_no_result_needs_is_not_there():
    def program(x):
        all_reduce(x, "tp")
        return ring_shift(x, "tp")

    trace = run(program, TP2, np.ones(3)).trace
    assert {e.op for e in trace.events} == {"ring_shift"}


def test_what_is_printed_is_needed(capfd):
    def program(x):
        jax.debug.callback(lambda value: None, all_reduce(x, "tp").sum())
        return x

    assert [e.op for e in events(run(program, TP2, np.ones(3)).trace, kind="collective", rank=0)] == ["all_reduce"]


# ---------------------------------------------------------------------------------------------------- loops and calls


def passed_on(x, times):
    for _ in range(times):
        x = ring_shift(x * 2, "tp")
    return x


LOOPS = {
    "scan": lambda x: jax.lax.scan(lambda c, _: (ring_shift(c * 2, "tp"), None), x, None, length=3)[0],
    "scan over rows": lambda x: jax.lax.scan(lambda c, w: (ring_shift(c * w, "tp"), c), x, jnp.full(3, 2.0))[0],
    "reversed": lambda x: jax.lax.scan(lambda c, w: (ring_shift(c * w, "tp"), c), x, jnp.full(3, 2.0), reverse=True)[0],
    "fori_loop": lambda x: jax.lax.fori_loop(0, 3, lambda _, c: ring_shift(c * 2, "tp"), x),
    "while_loop": lambda x: jax.lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, ring_shift(c[1] * 2, "tp")), (0, x)
    )[1],
    "jit": lambda x: jax.jit(passed_on, static_argnums=1)(x, 3),
    "jit in jit": lambda x: jax.jit(lambda x: jax.jit(lambda x: passed_on(x, 2))(passed_on(x, 1)))(x),
    "checkpoint": lambda x: jax.checkpoint(lambda x: passed_on(x, 3))(x),
    "custom_jvp": lambda x: _custom_jvp(x),
    "custom_vjp": lambda x: _custom_vjp(x),
    "cond": lambda x: jax.lax.cond(jnp.ones(()) > 0, lambda x: passed_on(x, 3), lambda x: x, x),
    "switch": lambda x: jax.lax.switch(jnp.int32(1), [lambda x: x, lambda x: passed_on(x, 3), lambda x: x], x),
}
_custom_jvp, _custom_vjp = jax.custom_jvp(lambda x: passed_on(x, 3)), jax.custom_vjp(lambda x: passed_on(x, 3))
_custom_jvp.defjvp(lambda primals, tangents: (_custom_jvp(*primals), tangents[0]))
_custom_vjp.defvjp(lambda x: (_custom_vjp(x), None), lambda _, dy: (dy,))


@pytest.mark.parametrize("name", LOOPS)
def test_loops_and_calls_are_written_out(name):
    def program(x):
        return LOOPS[name](lab.copy_to(x, "tp") + axis_index("tp"))

    out = run(program, TP4, np.ones(2, np.float32), cluster=TOY)
    sends = events(out.trace, kind="send", rank=0)
    assert [(e.step, e.chunk, e.contributors) for e in sends] == [(0, 0, (0,)), (1, 3, (3,)), (2, 2, (2,))]
    assert [e.values.tolist() for e in sends] == [[2, 2], [16, 16], [24, 24]]
    assert out.per_rank[0].tolist() == [16, 16]
    assert sum(e.op == "mul" for e in events(out.trace, kind="compute", rank=0)) == 3


def test_a_while_loop_that_each_rank_leaves_when_it_is_done():
    def program(x):
        index = axis_index("tp")  # not in the loop's condition: jaxlib 0.7.2 aborts over that
        start = lab.copy_to(jnp.int32(0), "tp"), lab.copy_to(x, "tp")
        _, x = jax.lax.while_loop(lambda c: c[0] < index, lambda c: (c[0] + 1, c[1] * 2), start)
        return ring_shift(x, "tp")

    out = run(program, TP4, np.ones(2, np.float32), cluster=TOY)
    assert [piece.tolist() for piece in out.per_rank] == [[8, 8], [1, 1], [2, 2], [4, 4]]
    for rank in TP4.ranks:
        assert sum(e.op == "mul" for e in events(out.trace, kind="compute", rank=rank)) == rank
        assert events(out.trace, kind="send", rank=rank)[0].values.tolist() == [2**rank] * 2


def test_a_loop_that_is_too_long_is_an_error_of_the_trace(monkeypatch):
    monkeypatch.setattr(walk, "MOST_ITERATIONS", 20)

    def program(x):
        return jax.lax.while_loop(lambda c: c[0] < 40, lambda c: (c[0] + 1, c[1] + 1), (0, x))[1]

    with pytest.raises(TraceError, match=r"while_loop at test_trace.py:\d+ has run 20 times"):
        _ = run(program, TP2, np.ones(2)).trace


def test_ranks_that_take_different_branches():
    """The even ones compute; along dp, where all of a group agree, they may also communicate."""

    def program(x):
        even = axis_index("tp") % 2 == 0
        return jax.lax.cond(even, lambda x: all_reduce(x, "dp") @ x, lambda x: all_reduce(x, "dp") + x, x)

    mesh = Mesh(dp=2, tp=2)
    trace = run(program, mesh, np.ones((3, 3), np.float32), cluster=TOY).trace
    ops = {rank: [e.op for e in events(trace, rank=rank) if e.kind != "wait"] for rank in mesh.ranks}
    assert ops == {0: ["all_reduce", "dot_general"], 1: ["all_reduce", "add"]} | {
        2: ["all_reduce", "dot_general"], 3: ["all_reduce", "add"],
    }  # fmt: skip
    assert {e.group for e in events(trace, kind="collective")} == {(0, 2), (1, 3)}


# ------------------------------------------------------------------------------------------------------------ the clock


def test_a_hop_is_hidden_behind_a_product_that_does_not_need_it():
    """A ring all-gather beside the products of what is there already: t_matmul + (R - 1) max(t_matmul, t_hop)."""
    for width in (2, 4, 8):
        t_matmul, t_hop = 2 * 4 * 4 * width, 4 * 4 * 4  # FLOPs, bytes, at 1 a second

        def program(x, w):
            x = lab.copy_to(x, "tp")
            products = []
            for hop in range(4):
                products.append(x @ w)
                if hop < 3:
                    x = ring_shift(x, "tp")
            return products

        trace = run(program, TP4, np.ones((4, 4), np.float32), np.ones((4, width), np.float32), cluster=TOY).trace
        assert trace.makespan == t_matmul + 3 * max(t_matmul, t_hop)
        assert trace.busy().tolist() == [4 * t_matmul] * 4
        waited = sum(e.end - e.start for e in events(trace, kind="wait", rank=0))
        assert waited == 3 * max(0, t_hop - t_matmul)


def test_what_is_ready_is_computed_while_a_collective_runs():
    """The program's order is kept among what is ready, not enforced on what is not."""

    def program(x, w):
        total = all_reduce(x, "tp")  # takes 2 (R-1)/R * 64 = 64
        first = total + 1  # 16, must wait
        second = w @ w  # 2 * 64 = 128, need not
        return first, second

    trace = run(program, TP2, np.ones(16, np.float32), np.ones((4, 4), np.float32), cluster=TOY).trace
    times = {(e.op): (e.start, e.end) for e in events(trace, rank=0)}
    assert times == {"all_reduce": (0, 64), "dot_general": (0, 128), "add": (128, 144)}


def test_messages_of_one_rank_share_its_way_out():
    """On a switch one after the other; on a torus beside each other."""
    both = lambda x: (ring_shift(x, "tp"), ring_shift(x, "tp", -1))  # noqa: E731
    x = np.ones(5, np.float32)
    switch = run(both, TP4, x, cluster=TOY).trace
    torus = run(both, TP4, x, cluster=Cluster("torus", CHIP, TOY.inner_link, wiring="torus")).trace
    assert (switch.makespan, torus.makespan) == (40, 20)
    assert {e.step for e in switch.events if e.kind == "send"} == {0}


def test_without_a_cluster_time_counts_hops():
    trace = run(lambda x: passed_on(lab.copy_to(x, "tp"), 3), TP4, np.ones(2)).trace
    assert (trace.unit, trace.makespan, trace.num_steps, trace.cluster) == ("steps", 3, 3, None)
    assert {e.kind for e in trace.events} == {"send", "receive", "wait"}
    assert [(e.start, e.end) for e in events(trace, kind="wait", rank=1)] == [(0, 1), (1, 2), (2, 3)]


def test_the_same_program_has_the_same_trace():
    def program(x):
        x = jnp.where(jax.random.bernoulli(rank_key(), 0.5, x.shape), x, 0.0)
        return all_reduce(jnp.tanh(lab.ring_all_reduce(x, "tp")), "dp")

    texts = {run(program, GRID, np.ones(9, np.float32), cluster="tpu_v5e", seed=3).trace.to_json() for _ in range(3)}
    assert len(texts) == 1
    assert run(program, GRID, np.ones(9, np.float32), cluster="tpu_v5e", seed=4).trace.to_json() not in texts


# ---------------------------------------------------------------------------------------------------------- the values


def test_record_says_of_how_many_messages_values_are_kept():
    def program(x):
        return passed_on(lab.copy_to(x, "tp"), 3)

    def kept(x, **options):
        return sum(e.values is not None for e in events(run(program, TP2, x, **options).trace, kind="send"))

    assert kept(np.ones(64)) == 6
    assert kept(np.ones(65)) == 0
    assert kept(np.ones(4), keep_values=4) == 4
    assert kept(np.ones(4), keep_values=0) == 0


def test_types_that_numpy_does_not_have_are_shown_as_float32():
    trace = run(lambda x: all_reduce(x.astype(jnp.bfloat16), "tp"), TP2, np.ones(3)).trace
    event = events(trace, kind="collective", rank=0)[0]
    assert (event.dtype, event.values.dtype, event.values.tolist()) == ("bfloat16", np.float32, [2, 2, 2])


def test_what_depends_on_a_large_argument_is_not_known_and_the_rest_is():
    def program(x):
        x = jnp.where(axis_index("tp") == 0, x, 0.0)
        return all_reduce(x.sum(), "tp"), all_reduce(axis_index("tp"), "tp")

    total, indices = events(run(program, TP2, np.ones(5000)).trace, kind="collective", rank=1)
    assert total.values is None
    assert indices.values == 1


STEPS = {
    "tanh": jnp.tanh,
    "add index": lambda x: x + axis_index("tp"),
    "shift": lambda x: ring_shift(x, "tp"),
    "sum": lambda x: all_reduce(x, "tp") + 0 * x,
    "max": lambda x: all_reduce(x, "tp", "max") - x,
    "gather": lambda x: all_gather(x, "tp").reshape(-1, *x.shape).mean(0) + x,
    "scatter": lambda x: jnp.concatenate([reduce_scatter(jnp.concatenate([x, x]), "tp")] * 2)[: x.shape[0]],
    "exchange": lambda x: lab.all_to_all(jnp.concatenate([x, -x]), "tp")[: x.shape[0]],
    "permute": lambda x: lab.ppermute(x, "tp", [(0, 1)]) + x,
    "ring": lambda x: lab.ring_all_reduce(x, "tp", "split"),
    "where": lambda x: jnp.where(x > 0, x, jnp.sin(x)),
    "sort": lambda x: jnp.sort(x, axis=1)[:, ::-1],
    "product": lambda x: x @ jnp.ones((3, 3)) / 3,
    "gradient": lambda x: jax.grad(lambda x: (ring_shift(jnp.sin(x), "tp") ** 2).sum())(x),
    "largest's gradient": lambda x: jax.grad(lambda x: all_reduce(x, "tp", "max").sum())(x) * x,
    "scan": lambda x: jax.lax.scan(lambda c, w: (jnp.cos(c) * w, c.sum()), x, jnp.arange(3.0))[1].sum() + x,
    "branch": lambda x: jax.lax.cond(axis_index("tp") == 1, jnp.exp, jnp.negative, jnp.clip(x, -1, 1)),
    "random": lambda x: x + jax.random.normal(rank_key(), x.shape),
    "layer norm": lambda x: jax.nn.standardize(x, axis=1, epsilon=1e-3),
    "softmax": lambda x: jax.nn.softmax(x) + jax.nn.gelu(x),
    "logsumexp": lambda x: jax.nn.logsumexp(x, axis=1, keepdims=True) + x,
    "index": lambda x: jnp.take(x, jnp.array([1, 0]), axis=0).at[0, 1].set(2.0),
    "cumsum": lambda x: jnp.cumsum(x, axis=1) / 3,
    "einsum": lambda x: jnp.einsum("ij,kj->ik", x, x)[:, :1] + x,
}


def assert_values_are_real(program, seed):
    """Every broadcast's values in the trace are those that the program returned."""
    x = np.random.default_rng(seed).normal(size=(2, 3)).astype(np.float32)
    out = run(program, TP2, x, seed=seed)
    for rank in TP2.ranks:
        kept = [e.values for e in sorted(events(out.trace, op="broadcast", rank=rank), key=lambda e: e.message)
                if e.kind == "collective"]  # fmt: skip
        for values, returned in zip(kept, out.per_rank[rank], strict=True):
            assert values is not None
            np.testing.assert_allclose(values, returned, rtol=2e-5, atol=2e-5)  # XLA fuses, and then rounds otherwise


def test_values_are_those_that_the_devices_computed():
    def program(x):
        x = lab.copy_to(x, "tp")
        return [lab.broadcast(step(x), "tp", root) for step in STEPS.values() for root in (0, 1)]

    assert_values_are_real(program, seed=1)


@settings(max_examples=5)
@given(names=st.lists(st.sampled_from(sorted(STEPS)), min_size=2, max_size=4), seed=st.integers(0, 5))
def test_values_after_several_steps(names, seed):
    def program(x):
        for name in names:
            x = jnp.nan_to_num(STEPS[name](lab.copy_to(x, "tp")))
        return [lab.broadcast(x, "tp")]

    assert_values_are_real(program, seed)


@pytest.mark.parametrize("kind", ["rows", "summands", "batch"])
def test_a_product_of_groups_is_that_many_products(kind):
    """As ragged_dot has them for experts, and in their gradients."""
    x, w, both = (jnp.ones(shape, jnp.float32) for shape in ((24, 16), (3, 16, 32), (3, 8, 16)))
    about = {
        "rows": (x, w, lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))),
        "summands": (x, jnp.ones((24, 32)), lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())),
        "batch": (both, w, lax.RaggedDotDimensionNumbers((((2,), (1,)), ((0,), (0,))), (0,), ())),
    }
    a, b, dims = about[kind]
    sizes = jnp.array([8, 8, 8] if kind != "batch" else [1, 1, 1])
    each = (both.transpose(0, 2, 1), jnp.ones((3, 8, 32))) if kind == "summands" else (both, w)
    grouped, plain = (
        run(program, Mesh(tp=1), *given, cluster="h100-measured").trace.events[-1]
        for program, given in (
            (lambda x, y: lax.ragged_dot_general(x, y, sizes, dims), (a, b)),
            (lambda x, y: x @ y, each),
        )
    )
    assert grouped.op == "ragged_dot_general" and plain.op == "dot_general"
    assert grouped.flops == plain.flops == 2 * 3 * 8 * 16 * 32
    assert grouped.end - grouped.start == pytest.approx(plain.end - plain.start, rel=1e-3)
