"""Branches and loops in JAX: the trace has what every rank did there, and what would hang is refused."""

import gc
import itertools
import subprocess
import sys
import weakref
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import tplab.jax as lab  # before JAX is used
from tplab import Mesh, P
from tplab.cost import Chip, Cluster, Link
from tplab.errors import DeadlockError, TraceError
from tplab.jax import all_reduce, axis_index, ring_shift, run
from tplab.jax.private import in_float64
from tplab.jax.ranks.program import Compiled
from tplab.jax.tracing import decisions

TP2, TP4, GRID = Mesh(tp=2), Mesh(tp=4), Mesh(dp=2, tp=2)
TOY = Cluster("toy", Chip("counter", {"float32": 1.0}, 1e9, 1e9), Link("wire", 0.0, 1.0))


def ops(trace, rank=0):
    """How often a rank takes part in each operation that sends."""
    return Counter(e.op for e in trace.events if e.rank == rank and e.kind in ("send", "collective"))


# ------------------------------------------------------------------------------------- what only control flow needs


def while_sum_below(limit, x):
    return lax.while_loop(lambda c: all_reduce(c.sum(), "tp") < limit, lambda c: c + 1, x)


CONTROLS = {  # the program, and how many all_reduces it does
    "cond": (lambda x: lax.cond(all_reduce(x.sum(), "tp") > 0, lambda a: a * 2, lambda a: a, x), 1),
    "switch": (lambda x: lax.switch(all_reduce(jnp.int32(1), "tp") - 1, [jnp.sin, jnp.cos, jnp.tanh], x), 1),
    "fori_loop": (lambda x: lax.fori_loop(0, all_reduce(jnp.int32(2), "tp"), lambda i, c: c + i, x), 1),
    "while_loop": (lambda x: while_sum_below(2 * x.size + 5 * 2 * x.size, x), 6),
    "while_loop in scan": (
        lambda x: lax.scan(lambda c, n: (while_sum_below(2 * x.size * n, c), None), x, jnp.array([2, 2, 5]))[0],
        2 + 1 + 4,
    ),
}


@pytest.mark.parametrize("size", [4, 5000])  # small values are worked out, those of large arrays only reported
@pytest.mark.parametrize("name", CONTROLS)
def test_a_collective_that_only_a_decision_needs(name, size):
    program, count = CONTROLS[name]
    trace = run(program, TP2, np.ones(size, np.float32)).trace
    assert [ops(trace, rank) for rank in TP2.ranks] == [{"all_reduce": count}] * 2
    assert trace.bytes_sent() == count * 2 * 4


def test_what_a_decision_leads_to_waits_for_it():
    def program(x, w):
        return lax.cond(all_reduce(x, "tp")[0] > 0, lambda w: w * 2, lambda w: w, w)

    trace = run(program, TP2, np.ones(16, np.float32), np.ones(8, np.float32), cluster=TOY).trace
    times = {e.op: (e.start, e.end) for e in trace.events if e.rank == 0 and e.kind != "wait"}
    assert times["all_reduce"] == (0, 64)
    assert times["mul"] == (64, 72)


def test_a_loop_over_a_large_array_is_counted_as_it_ran():
    x = np.ones((4, 5000), np.float32)
    shared = lambda a: all_reduce(a.sum(), "tp") < 200_000  # noqa: E731
    out = run(lambda x: lax.while_loop(shared, lambda a: ring_shift(a, "tp") + 1, x), TP4, x, in_specs=P("tp"))
    assert out.per_rank[0][0, 0] == 10
    assert out.trace.select(op="ring_shift").bytes_sent() == 9 * 4 * 20_000
    assert ops(out.trace) == {"ring_shift": 9, "all_reduce": 10}


def test_what_a_rank_does_on_its_own_is_counted_on_each():
    """Ranks leave the loop, and choose the branch, by data that no one knows beforehand."""

    def program(x):
        x = lax.while_loop(lambda c: c.sum() < 20_000, lambda c: lax.cond(c[0, 0] > 3, jnp.exp, lambda c: c * 2, c), x)
        return all_reduce(x, "tp")

    x = np.array([[1.0] * 5000, [2.0] * 5000, [3.9] * 5000, [9.0] * 5000], np.float32)
    trace = run(program, TP4, x, in_specs=P("tp"), cluster=TOY).trace
    done = [Counter(e.op for e in trace.events if e.rank == rank and e.op in ("mul", "exp")) for rank in TP4.ranks]
    assert done == [{"mul": 2}, {"mul": 1}, {"exp": 1}, {}]


def test_a_loop_whose_result_nobody_needs_is_neither_run_nor_reported():
    def program(x):
        while_sum_below(1e6, x)
        return x

    assert ops(run(program, TP2, np.ones(5000, np.float32)).trace) == {}


def test_a_condition_that_decides_in_itself():
    def goes_on(c):
        return lax.cond(c.sum() > 7, lambda: all_reduce(c.sum(), "tp") < 60, lambda: c.sum() < 99)

    def program(x):
        return lax.while_loop(goes_on, lambda c: c + 1, all_reduce(x, "tp"))

    for size in (4, 5000):
        x = np.where(np.arange(size) < 4, 0.5, 0).astype(np.float32)
        trace = run(lambda x: program(x[:4]), TP2, x).trace  # sums 4, 8 (an all_reduce of 8), 12, ...
        assert ops(trace) == {"all_reduce": 1 + 7}


def test_decisions_inside_gradients_and_calls():
    def loss(x):
        branch = jax.checkpoint(lambda x: lax.cond(x.sum() > 0, lambda x: all_reduce(jnp.sin(x), "tp"), jnp.cos, x))
        return jax.jit(branch)(x).sum()

    for sign, count in ((1, 1), (-1, 0)):
        out = run(jax.grad(loss), TP2, np.full(5000, sign, np.float32), out_specs=P())
        assert ops(out.trace)["all_reduce"] == count
        np.testing.assert_allclose(out.value[0], 2 * np.cos(1) if sign > 0 else np.sin(1), rtol=1e-6)


def test_a_number_of_iterations_that_is_not_known_is_said():
    program, _ = CONTROLS["while_loop"]
    out = run(program, TP2, jax.ShapeDtypeStruct((4,), np.float32))
    with pytest.raises(TraceError, match=r"how often the while_loop at test_decisions.py:\d+ runs is not known"):
        _ = out.trace
    out = run(CONTROLS["cond"][0], TP2, jax.ShapeDtypeStruct((4,), np.float32))
    with pytest.raises(TraceError, match=r"which branch the cond at test_decisions.py:\d+ takes is not known"):
        _ = out.trace
    with pytest.raises(TraceError, match=r"not all ranks ran here; run it on arrays \(.*, not inside jit\)"):
        jax.jit(lambda x: run(CONTROLS["cond"][0], TP2, x).trace)(np.ones(4, np.float32))


def test_a_decision_about_numbers_alone_needs_no_answer():
    """A learning rate, say: nothing of it is in a trace."""

    def program(x):
        rate = lax.cond(x[0] > 0, lambda: 0.1, lambda: 0.2)
        return all_reduce(x, "tp") * rate

    assert ops(run(program, TP2, jax.ShapeDtypeStruct((4,), np.float32)).trace) == {"all_reduce": 1}


def test_more_decisions_than_a_run_reports(monkeypatch):
    monkeypatch.setattr(decisions, "MOST_ENTRIES", 3)

    def program(x):
        ways = jnp.sin, jnp.cos
        return lax.while_loop(lambda c: c[0] < 4, lambda c: (c[0] + 1, lax.cond(c[1][0] > 0, *ways, c[1])), (0, x))[1]

    with pytest.raises(TraceError, match=r"which branch the cond at .* is not known: the run decided 4 .*, of which 3"):
        _ = run(program, TP2, np.ones(2)).trace


# ----------------------------------------------------------------------------------------- when the ranks are asked


def forms_run(monkeypatch):
    """The forms of programs that are called from now on: "plain", and "reporting" which is slower."""
    forms, call = [], Compiled.__call__

    def spied(self, placed, seed, form=None):
        forms.append("plain" if form is None else "reporting")
        return call(self, placed, seed, form)

    monkeypatch.setattr(Compiled, "__call__", spied)
    return forms


def test_the_ranks_report_only_when_the_trace_is_read(monkeypatch):
    forms = forms_run(monkeypatch)
    out = run(CONTROLS["while_loop"][0], TP2, np.ones(5000, np.float32))
    _ = out.per_rank
    assert forms == ["plain"]
    assert ops(out.trace) == ops(out.trace) == {"all_reduce": 6}
    assert forms == ["plain", "reporting"]


def pipeline(x):
    """As a pipeline's schedule does it: a constant table says what each rank does at each tick."""
    table = jnp.asarray(np.array([[1, 0], [1, 1], [0, 1]]))[:, axis_index("tp")]

    def tick(x, does):
        once = lambda state: (state[0] & False, jnp.tanh(state[1]))  # noqa: E731
        x = lax.while_loop(lambda state: state[0], once, (does == 1, x))[1]
        x = lax.switch(does, [jnp.sin, jnp.cos], x)
        return ring_shift(x, "tp"), None

    return lax.scan(tick, lab.copy_to(x, "tp"), table)[0]


def test_what_a_table_and_the_rank_decide_needs_no_report(monkeypatch):
    forms = forms_run(monkeypatch)
    trace = run(pipeline, TP2, np.ones(5000, np.float32), cluster=TOY).trace
    done = [Counter(e.op for e in trace.events if e.rank == rank and e.kind == "compute") for rank in TP2.ranks]
    assert [(d["tanh"], d["sin"], d["cos"]) for d in done] == [(2, 1, 2), (2, 1, 2)]
    assert forms == ["plain"]


def test_what_has_an_effect_is_not_done_again(monkeypatch):
    seen = []

    def program(x):
        jax.debug.callback(lambda x: seen.append(float(x)), x[0])
        return lax.cond(all_reduce(x.sum(), "tp") > 0, lambda a: a * 2, lambda a: a, x)

    out = run(program, TP2, np.ones(5000, np.float32))
    assert ops(out.trace) == {"all_reduce": 1}
    jax.effects_barrier()
    assert seen == [1.0] * 2


def test_a_trace_read_under_other_settings_of_jax():
    """In float64, under a mesh, or inside of jit, where the ranks cannot be asked, but later they can."""
    with in_float64():
        out = run(CONTROLS["while_loop"][0], TP2, np.ones(5000))
    assert ops(out.trace) == {"all_reduce": 6}
    assert out.trace.bytes_sent() == 6 * 2 * 8
    out = run(CONTROLS["while_loop"][0], TP2, np.ones(5000, np.float32))
    with pytest.raises(TraceError, match="not inside jit"):
        jax.jit(lambda x: (out.trace, x)[1])(1.0)
    with jax.set_mesh(jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])):
        assert ops(out.trace) == {"all_reduce": 6}


def test_a_trace_whose_arguments_were_given_away():
    """As a jitted update with donate_argnums does it."""
    for program, x in itertools.product((CONTROLS["while_loop"][0], pipeline), ("early", "late")):
        placed = run(lambda x: x, TP2, np.ones(5000, np.float32), out_specs=P()).value
        out = run(program, TP2, placed)
        known = ops(out.trace) if x == "late" else None
        placed.delete()
        if program is pipeline:
            assert ops(out.trace) == {"ring_shift": 3}
        elif x == "late":
            assert ops(out.trace) == known == {"all_reduce": 6}
        else:
            with pytest.raises(TraceError, match=r"arguments that have been given away since \(donate_argnums\)"):
                _ = out.trace


def test_arguments_are_kept_only_until_the_trace_has_been_read():
    placed = run(lambda x: x, TP2, np.ones(5000, np.float32), out_specs=P()).value
    alive = weakref.ref(placed)
    out = run(CONTROLS["while_loop"][0], TP2, placed)
    del placed
    gc.collect()
    assert alive() is not None
    assert ops(out.trace) == {"all_reduce": 6}
    gc.collect()
    assert alive() is None


# ------------------------------------------------------------------------------------------------- random programs

Program = tuple  # ("add", k) | ("shift",) | ("sum",) | ("cond" | "while" | "for", decision, bodies) | ("scan", n, body)


def programs(depth, may_send):
    simple = [st.tuples(st.just("add"), st.integers(1, 9))]
    if may_send:
        simple += [st.just(("shift",)), st.just(("sum",))]
    statement = st.one_of(simple)
    if depth:
        ways = [("own", programs(depth - 1, False))]
        if may_send:
            ways.append(("shared", programs(depth - 1, True)))
        for decision, body in ways:
            bodies = st.lists(body, min_size=2, max_size=3)
            statement |= st.tuples(st.just("cond"), st.just(decision), bodies)
            statement |= st.tuples(st.sampled_from(["while", "for"]), st.just(decision), st.tuples(body))
        statement |= st.tuples(st.just("scan"), st.integers(0, 3), st.tuples(programs(depth - 1, may_send)))
    return st.lists(statement, min_size=1, max_size=3)


def in_jax(statements, x):
    """Run by JAX on a rank; x [n], whole numbers below 17."""

    def decide(decision, x):
        return all_reduce(x.sum(), "tp") if decision == "shared" else x.sum()

    for op, *rest in statements:
        if op == "add":
            x = (x * 3 + rest[0]) % 17
        elif op == "shift":
            x = ring_shift(x, "tp")
        elif op == "sum":
            x = lab.copy_to(all_reduce(x, "tp"), "tp") % 17
        elif op == "scan":
            x = lax.scan(lambda x, _, body=rest[1][0]: (in_jax(body, x), None), x, None, length=rest[0])[0]
        elif op == "cond":
            ways = [lambda x, body=body: in_jax(body, x) for body in rest[1]]
            x = lax.switch(decide(rest[0], x) % len(ways), ways, x)
        elif op == "for":
            x = lax.fori_loop(0, decide(rest[0], x) % 3, lambda _, x, body=rest[1][0]: in_jax(body, x), x)
        else:
            vary = (lambda n: n) if rest[0] == "shared" else (lambda n: lab.copy_to(n, "tp"))
            x = lax.while_loop(
                lambda c, kind=rest[0]: (c[0] < 4) & (decide(kind, c[1]) % 5 != 0),
                lambda c, body=rest[1][0]: (c[0] + 1, in_jax(body, c[1])), (vary(jnp.int32(0)), x),
            )[1]  # fmt: skip
    return x


def in_numpy(statements, xs, ranks, done):
    """The same on all of `ranks`, whose arrays are in xs; `done[rank]` counts what each does."""

    def decide(decision, modulus):
        if decision == "own":
            return {rank: xs[rank].sum() % modulus for rank in ranks}
        for rank in ranks:
            done[rank]["all_reduce"] += 1
        return dict.fromkeys(ranks, sum(xs[rank].sum() for rank in ranks) % modulus)

    def some(bodies, taken):
        for index, body in enumerate(bodies):
            if takers := [rank for rank in ranks if taken.get(rank) == index]:
                in_numpy(body, xs, takers, done)

    for op, *rest in statements:
        if op == "add":
            for rank in ranks:
                xs[rank] = (xs[rank] * 3 + rest[0]) % 17
                done[rank]["mul"] += 1
        elif op in ("shift", "sum"):
            before = dict(xs)
            for rank in ranks:
                xs[rank] = before[ranks[rank - 1]] if op == "shift" else sum(before[r] for r in ranks) % 17
                done[rank]["ring_shift" if op == "shift" else "all_reduce"] += 1
        elif op == "scan":
            for _ in range(rest[0]):
                in_numpy(rest[1][0], xs, ranks, done)
        elif op == "cond":
            some(rest[1], decide(rest[0], len(rest[1])))
        elif op == "for":
            times = decide(rest[0], 3)
            for turn in range(3):
                some(rest[1], {rank: 0 for rank in ranks if times[rank] > turn})
        else:
            left, everyone = list(ranks), ranks
            for turn in range(5):
                ranks = left
                goes_on = decide(rest[0], 5)
                left = [rank for rank in ranks if turn < 4 and goes_on[rank] != 0]
                if not left:
                    break
                ranks = left
                in_numpy(rest[1][0], xs, left, done)
            ranks = everyone


@settings(max_examples=12)
@given(statements=programs(3, True), size=st.sampled_from([3, 5000]), seed=st.integers(0, 9))
def test_random_programs_are_counted_as_they_ran(statements, size, seed):
    x = np.random.default_rng(seed).integers(0, 17, (3, size))
    mesh = Mesh(tp=3)
    out = run(lambda x: in_jax(statements, x[0]), mesh, x.astype(np.int32), in_specs=P("tp"), cluster=TOY)
    xs, done = dict(enumerate(x)), [Counter() for _ in mesh.ranks]
    in_numpy(statements, xs, list(mesh.ranks), done)
    for rank in mesh.ranks:
        np.testing.assert_array_equal(out.per_rank[rank], xs[rank])
        kinds = ("send", "collective", "compute")
        found = Counter(e.op for e in out.trace.events if e.rank == rank and e.kind in kinds)
        assert {op: found[op] for op in ("mul", "ring_shift", "all_reduce")} == {
            op: done[rank][op] for op in ("mul", "ring_shift", "all_reduce")
        }


# ----------------------------------------------------------------------------------------------- what would hang

HANGING = {
    "cond": "lax.cond(J.axis_index('tp') == 0, lambda a: J.ring_shift(a, 'tp'), lambda a: a, v)",
    "switch": "lax.switch(J.axis_index('tp'), [lambda a: a, lambda a: J.all_gather(a, 'tp')[:1]], v)",
    "while": "lax.while_loop(lambda a: a.sum() < 9, lambda a: J.ring_shift(a, 'tp') + 1, v)",
}


def test_a_collective_that_only_some_ranks_reach_is_refused():
    """In a process of its own: where it is not refused, it hangs for good."""
    programs = ", ".join(f"{name!r}: lambda v: {program}" for name, program in HANGING.items())
    text = f"""
import numpy as np
from jax import lax
import tplab.jax as J
from tplab import Mesh, P
from tplab.errors import DeadlockError
for name, program in {{{programs}}}.items():
    try:
        J.run(program, Mesh(tp=2), np.arange(8.0).reshape(2, 4), in_specs=P("tp")).per_rank
    except DeadlockError:
        print(name, flush=True)
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.split() == list(HANGING), done.stderr


def refusal(program, mesh, *args):
    """The refusal's words. Only shapes are given, so that nothing would run, and hang, without one."""
    with pytest.raises(DeadlockError) as info:
        run(program, mesh, *(jax.ShapeDtypeStruct(arg, np.float32) for arg in args))
    return str(info.value)


def test_the_refusal_names_the_collective_the_lines_the_ranks_and_the_way_out():
    def program(x):
        some = axis_index("tp") % 3 == 0
        return lax.cond(some, lambda x: lab.reduce_scatter(x, "tp") + 0 * x[:1], lambda x: lab.copy_to(x[:1], "tp"), x)

    line = f"test_decisions.py:{program.__code__.co_firstlineno + 2}"
    assert refusal(program, TP4, (4,)) == (
        f"reduce_scatter over 'tp' at {line} is inside a branch of the cond at {line}, "
        "and the ranks along 'tp' may take different branches: ranks 1, 2 take branch 0; ranks 0, 3 take branch 1.\n"
        "Those that reach the reduce_scatter would wait for the others forever. Call it on every rank, and choose "
        "between results with jnp.where; or let every rank decide alike: all_reduce(condition, 'tp', 'max')"
    )


def test_a_refusal_where_only_data_decides():
    def program(x):
        x = x * axis_index("tp")
        return lax.while_loop(lambda x: x.sum() < 9, lambda x: lab.copy_to(all_reduce(x, "tp"), "tp"), x)

    said = refusal(program, TP2, (4,))
    assert "all_reduce over 'tp'" in said
    assert "inside the while_loop at test_decisions.py" in said
    assert "may leave it at different times.\n" in said


def copied(x):
    return lab.copy_to(x, "tp")


def shifted(x):
    return ring_shift(x, "tp")


def counted(x, limit):
    """A while_loop of its own, of as many turns as `limit` says."""
    return lax.while_loop(lambda s: s[0] < limit, lambda s: (s[0] + 1, shifted(s[1])), (copied(jnp.int32(0)), x))[1]


BEFORE = {  # what comes before the place that hangs
    "nothing": copied,
    "ring_shift": shifted,
    "ppermute": lambda x: lab.ppermute(x, "tp", [(0, 1)]),
    "ring_shift in a scan": lambda x: lax.scan(lambda x, _: (shifted(x), None), copied(x), None, length=2)[0],
    "a cond that data decides": lambda x: shifted(lax.cond(x[0] > 0, jnp.sin, jnp.cos, x)),
    "a while_loop that data decides": lambda x: while_sum_below(5, copied(x)),
}
WAYS = {  # what hangs, and which way the ranks go
    "cond": (
        lambda x: lax.cond(axis_index("tp") == 0, shifted, lambda x: x, x),
        "may take different branches: rank 1 takes branch 0; rank 0 takes branch 1.",
    ),
    "switch": (
        lambda x: lax.switch(axis_index("tp"), [lambda x: x, shifted], x),
        "may take different branches: rank 0 takes branch 0; rank 1 takes branch 1.",
    ),
    "while_loop": (
        lambda x: counted(x, axis_index("tp") + 1),
        "may leave it at different times: rank 0 leaves it after 1 turn, and rank 1 goes on.",
    ),
    "fori_loop": (
        lambda x: lax.fori_loop(0, axis_index("tp"), lambda _, x: shifted(x), x),
        "may leave it at different times: rank 0 leaves it after 0 turns, and rank 1 goes on.",
    ),
    "cond in a scan": (
        lambda x: lax.scan(lambda x, _: (WAYS["cond"][0](shifted(x)), None), x, None, length=2)[0],
        "may take different branches: rank 1 takes branch 0; rank 0 takes branch 1.",
    ),
}


@pytest.mark.parametrize(
    ("before", "way"), dict.fromkeys([*((name, "cond") for name in BEFORE), *(("ring_shift", name) for name in WAYS)])
)
def test_the_refusal_says_which_way_the_ranks_go_whatever_comes_before(before, way):
    program, words = WAYS[way]
    assert words in refusal(lambda x: program(BEFORE[before](x)), TP2, (4,))


def test_the_way_out_works():
    """Every rank decides alike; or computes, and chooses."""
    x = np.arange(8, dtype=np.float32).reshape(4, 2)

    def alike(x):
        return lax.cond(all_reduce(x[0, 0] > 5, "tp", "max"), lambda x: ring_shift(x, "tp"), lambda x: x, x)

    def chosen(x):
        return jnp.where(axis_index("tp") == 0, ring_shift(x, "tp"), x)

    for program, first in ((alike, [6, 0, 2, 4]), (chosen, [6, 2, 4, 6])):
        assert [x[0, 0] for x in run(program, TP4, x, in_specs=P("tp")).per_rank] == first


def test_along_other_axes_ranks_may_decide_differently():
    """But XLA's ppermute joins all devices, whatever the axis."""

    def program(collective, x):
        return lax.cond(
            axis_index("dp") == 0,
            lambda x: lab.copy_to(collective(x, "tp"), GRID.axis_names),
            lambda x: lab.copy_to(x, GRID.axis_names),
            x,
        )

    out = run(lambda x: program(all_reduce, x), GRID, np.ones(2, np.float32))
    assert [x.tolist() for x in out.per_rank] == [[2, 2], [2, 2], [1, 1], [1, 1]]
    assert [ops(out.trace, rank) for rank in GRID.ranks] == [{"all_reduce": 1}] * 2 + [{}] * 2
    assert "ppermute joins every rank" in refusal(lambda x: program(ring_shift, x), GRID, (2,))


def test_a_gradient_that_only_some_ranks_would_add_up():
    """JAX adds up the gradient of what enters a branch replicated: in the branch."""

    def loss(x):
        index = axis_index("tp")
        return lax.cond(index == 0, lambda x: (x * index).sum(), lambda x: 0.0 * index, x)

    assert "all_reduce over 'tp'" in refusal(jax.grad(lambda x: all_reduce(loss(x), "tp")), TP2, (4,))
