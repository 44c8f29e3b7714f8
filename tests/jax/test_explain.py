"""`explain`: which line and which operand made XLA insert each collective."""

import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import tplab.jax as lab  # before JAX is used
from tplab import Mesh
from tplab.jax import explain, trace
from tplab.jax.ranks.devices import jax_mesh

GRID, DP = Mesh(dp=2, tp=4), Mesh(dp=4)


def on(*spec, mesh=GRID):
    return NamedSharding(jax_mesh(mesh), PartitionSpec(*spec))


def placed(shape, *spec, mesh=GRID):
    return jax.ShapeDtypeStruct(shape, np.float32, sharding=on(*spec, mesh=mesh))


def here(offset):
    return f"test_explain.py:{inspect.stack()[1].lineno + offset}"


def test_a_sum_over_a_dim_that_is_sharded():
    line = here(4)

    def mlp(x, params):
        h = jnp.tanh(x @ params["a"])
        return h @ params["b"]

    found = explain(mlp, placed((8, 16), "dp"), {"a": placed((16, 32), None, "tp"), "b": placed((32, 16), "tp")})
    (total,) = found
    (cause,) = total.causes
    assert (total.op, total.axis, total.bytes, total.count) == ("all_reduce", "tp", 2 * 3 * 4 * 16 * 4 // 4, 1)
    assert not total.is_written
    assert not total.is_backward
    assert (total.where, cause.operation, cause.dtype, cause.shape) == (line, "dot_general", "float32", (4, 16))
    assert cause.operands == (f"the result of tanh ({here(-10)})", "params['b'] float32[32, 16] P('tp')")
    head, kind, *rest = repr(found).splitlines()
    assert (head, kind) == ("mlp on Mesh(dp=2, tp=4): each rank sends 384 B", "1 x all_reduce along tp, 384 B")
    assert " ".join(line.removeprefix("    ") for line in rest) == (
        f"{line}, float32[4, 16]: dot_general of {' and '.join(cause.operands)} sums over a dim that is sharded "
        "over tp, so each rank has only its part"
    )
    assert max(map(len, rest)) <= 88


def test_a_training_step_with_a_scan():
    """Each collective is on its line, forward and backward; what scan puts away for the backward pass is known by what
    made it. Together they send what the trace has."""

    def loss(weights, x):
        def layer(x, w):
            h = jnp.tanh(x @ w[0])
            return h @ w[1], None

        return (lax.scan(layer, x, weights)[0] ** 2).sum()

    up, down, end = here(-5), here(-4), here(-2)
    weights = placed((3, 16, 32), None, None, "tp"), placed((3, 32, 16), None, "tp")
    step = jax.jit(jax.value_and_grad(loss))
    found = explain(step, weights, placed((8, 16), "dp"))
    assert found.bytes == trace(step, weights, placed((8, 16), "dp")).bytes_sent(rank=0)
    of_tp = {(one.where, one.is_backward): one for one in found if one.axis == "tp"}
    assert {place: (one.count, one.bytes) for place, one in of_tp.items()} == {
        (down, False): (3, 384), (up, True): (3, 384),
    }  # fmt: skip
    assert of_tp[down, False].causes[0].operands == (
        f"the result of tanh ({up})",
        "weights[1] float32[3, 32, 16] P(None, 'tp')",
    )
    assert of_tp[up, True].causes[0].operands[1] == "weights[0] float32[3, 16, 32] P(None, None, 'tp')"
    gradients = [cause for one in found if one.axis == "dp" and one.is_backward for cause in one.causes]
    assert sorted(cause.where for cause in gradients) == [up, down]
    (of_up,) = [cause for cause in gradients if cause.where == up]
    assert f"the result of dot_general ({down})" in of_up.operands  # the layer's input, which the one before made
    (of_loss,) = [one for one in found if one.where == end]
    assert (of_loss.causes[0].operation, of_loss.bytes) == ("reduce_sum", 4)


def test_weights_that_are_sharded_over_data():
    """FSDP by shardings: each weight is gathered, and of its gradient's sum each rank keeps a part. On CPUs XLA does
    not make a reduce_scatter of that, and `explain` says where it does."""

    def step(w, x):
        return w - jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).sum())(w)

    w, x = placed((16, 32), "dp", mesh=DP), placed((64, 16), "dp", mesh=DP)
    gather, total = explain(jax.jit(step, out_shardings=on("dp", mesh=DP)), w, x)
    (cause,) = gather.causes
    assert (gather.op, gather.bytes, cause.shape) == ("all_gather", 3 * 16 * 32 * 4 // 4, (4, 32))
    assert cause.operands == ("w float32[16, 32] P('dp')",)
    assert cause.why == "dot_general needs all of w float32[16, 32] P('dp'), which is sharded over dp"
    assert (total.op, total.bytes, total.is_backward) == ("all_reduce", 2 * 3 * 16 * 32 * 4 // 4, True)
    assert total.causes[0].why.endswith("; each rank keeps 1/4 of the result: a reduce_scatter on GPUs and TPUs")


def constrained(x, *spec):
    return lax.with_sharding_constraint(x, on(*spec))


HERE = "(where the program calls constrained)"
X, ROWS, COLUMNS = placed((8, 16), "dp", "tp"), placed((8, 16), "dp"), placed((8, 16), None, "tp")
UP, DOWN, WORDS = placed((16, 32), None, "tp"), placed((16, 32), "tp"), placed((8,), "dp")
x_, rows, columns = (f"x float32[8, 16] {spec}" for spec in ("P('dp', 'tp')", "P('dp')", "P(None, 'tp')"))
PART, TP = "a dim that is sharded over {}, so each rank has only its part", ", which is sharded over tp"


def in_a_scan(weights, x):
    return lax.scan(lambda x, w: (constrained(jnp.tanh(x @ w))[:, :8], None), x, weights)[0]


def elementwise_twice(x):
    return constrained(jnp.cos(jnp.sin(x) * 3 + 1))


BACK = "on pieces that are cut along another dim, and here moves its result back"
CAUSES = {  # the program, its arguments, out_shardings, and for each collective what it is and why
    "constraint after tanh": (
        lambda x, w: (constrained(jnp.tanh(x @ w), "dp") * 2).sum(1), (ROWS, UP), None,
        [f"all_gather: {HERE} asks for P('dp'), which takes all of the result of dot_general{TP}"],
    ),
    "constraint of a sum": (
        lambda x, w: constrained(jnp.tanh(x @ w)) * 2, (COLUMNS, DOWN), None,
        [f"all_reduce: dot_general of {columns} and w float32[16, 32] P('tp') sums over {PART.format('tp')}"],
    ),
    "constraint after two operations": (
        elementwise_twice, (ROWS,), None,
        [f"all_gather: {HERE} asks for P(), which takes all of the result of add, which is sharded over dp"],
    ),
    "constraint on one of two uses": (
        lambda x: (lambda y: (constrained(y * 2), y.sum(1)))(jnp.sin(x)), (ROWS,), None,
        [f"all_gather: {HERE} asks for P(), which takes all of the result of sin, which is sharded over dp"],
    ),
    "constraint in a gradient": (
        jax.grad(lambda x: (constrained(jnp.sin(x), None, "dp") ** 2).sum()), (ROWS,), None,
        [f"all_to_all: {HERE} asks for P(None, 'dp'), which cuts {rows} along another dim than now"],
    ),
    "constraint in a scan": (
        in_a_scan, (placed((3, 8, 16), None, None, "tp"), placed((8, 8))), None,
        [f"all_gather: {HERE} asks for P(), which takes all of the result of dot_general{TP}"],
    ),
    "constraint of a transpose": (
        lambda x: constrained(x.T, "dp"), (ROWS,), None,
        [f"all_to_all: transpose needs {rows} cut along another dim than it is; {HERE} asks for P('dp') of its result"],
    ),
    "constraint of a product": (
        lambda x, w: constrained(jnp.exp(x @ w), "tp"), (ROWS, UP), None,
        [f"all_gather: dot_general needs all of w float32[16, 32] P(None, 'tp'){TP}; {HERE} asks for P('tp') of its "
         "result",
         f"ppermute: dot_general needs {rows} on other ranks than those that have it; {HERE} asks for P('tp') of its "
         "result"],
    ),
    "out_shardings after tanh": (
        lambda x, w: jnp.tanh(x @ w) * 2, (ROWS, UP), ("dp",),
        [f"all_gather: out_shardings asks for P('dp'), which takes all of the result of mul{TP}"],
    ),
    "out_shardings cut otherwise": (
        lambda x: jnp.sin(x) + 1, (ROWS,), (None, "dp"),
        ["all_to_all: out_shardings asks for P(None, 'dp'), which cuts the result of sin along another dim than now"],
    ),
    "out_shardings of JAX's own function": (
        jnp.sin, (ROWS,), (),
        ["all_gather: out_shardings asks for P(), which takes all of the result of sin, which is sharded over dp"],
    ),
    "out_shardings of a sum": (
        lambda x, w: x @ w, (COLUMNS, DOWN), (),
        [f"all_reduce: dot_general of {columns} and w float32[16, 32] P('tp') sums over {PART.format('tp')}"],
    ),
    "out_shardings of a piece of a sum": (
        lambda x, w: jnp.tanh(x @ w), (COLUMNS, DOWN), ("tp",),
        [f"all_reduce: dot_general of {columns} and w float32[16, 32] P('tp') sums over {PART.format('tp')}; each rank "
         "keeps 1/4 of the result: a reduce_scatter on GPUs and TPUs"],
    ),
    "out_shardings that swap": (
        lambda x: x + 1, (placed((16, 16), "dp", "tp"),), ("tp", "dp"),
        ["all_to_all: out_shardings asks for P('tp', 'dp'), which cuts x float32[16, 16] P('dp', 'tp') along another "
         "dim than now",
         "ppermute: out_shardings asks for P('tp', 'dp'), which puts the result of add on other ranks than those that "
         "have it"],
    ),
    "argmax": (
        lambda x: jnp.argmax(x, 1), (X,), None,
        [f"all_gather: argmax of {x_} goes over {PART.format('tp')}"] * 2,
    ),
    "argmin": (
        lambda x: jnp.argmin(x, 1), (X,), None,
        [f"all_gather: argmin of {x_} goes over {PART.format('tp')}"] * 2,
    ),
    "max": (lambda x: x.max(1), (X,), None, [f"all_reduce: reduce_max of {x_} goes over {PART.format('tp')}"]),
    "sum of one element of each rank": (
        lambda x: jnp.sin(x).sum(1), (placed((8, 4), None, "tp"),), None,
        [f"all_reduce: reduce_sum of the result of sin sums over {PART.format('tp')}"],
    ),
    "product over one element of each rank": (
        lambda x, w: jnp.sin(x) @ w, (placed((8, 4), None, "tp"), placed((4, 6), "tp")), None,
        [f"all_reduce: dot_general of the result of sin and w float32[4, 6] P('tp') sums over {PART.format('tp')}"],
    ),
    "sum": (lambda x: x.sum(0), (X,), None, [f"all_reduce: reduce_sum of {x_} sums over {PART.format('dp')}"]),
    "softmax": (
        lambda x: jax.nn.softmax(x, 1), (COLUMNS,), None,
        [f"all_reduce: reduce_max of {columns} goes over {PART.format('tp')}",
         f"all_reduce: reduce_sum of the result of exp sums over {PART.format('tp')}"],
    ),
    "norm": (
        lambda x: x / jnp.sqrt((x**2).mean(1, keepdims=True)), (COLUMNS,), None,
        [f"all_reduce: reduce_sum of the result of integer_pow sums over {PART.format('tp')}"],
    ),
    "cumsum": (lambda x: jnp.cumsum(x, 1), (X,), None, [f"all_gather: cumsum needs all of {x_}{TP}"]),
    "top_k": (lambda x: lax.top_k(x, 2)[0], (COLUMNS,), None, [f"all_gather: top_k needs all of {columns}{TP}"]),
    "sort": (
        lambda x: jnp.sort(x, 1), (X,), None,
        [f"all_to_all: sort needs {x_} cut along another dim than it is",
         f"all_to_all: XLA computes sort {BACK}"],
    ),
    "reshape to one dim": (
        lambda x: x.reshape(128), (X,), None,
        [f"all_gather: reshape needs all of {x_}{TP}: its pieces are no pieces of the new shape [128]"],
    ),
    "reshape that does not divide": (
        lambda x: (x.reshape(3, 4, 8) * 2).sum(0), (placed((12, 8), "tp"),), None,
        [f"all_gather: reshape needs all of x float32[12, 8] P('tp'){TP}: its pieces are no pieces of the new shape "
         "[3, 4, 8]"],
    ),
    "reshape that divides": (lambda x: x.reshape(16, 3) * 2, (placed((8, 6), "tp"),), None, []),
    "roll": (
        lambda x: jnp.roll(x, 1, 1), (COLUMNS,), None,
        [f"ppermute: concatenate needs {columns} on other ranks than those that have it"],
    ),
    "reverse": (
        lambda x: x[::-1], (placed((8, 16), "tp"),), None,
        ["ppermute: rev needs x float32[8, 16] P('tp') on other ranks than those that have it"],
    ),
    "concatenate": (
        lambda x, y: jnp.concatenate([x, y], 1), (COLUMNS, placed((8, 16))), None,
        [f"all_to_all: concatenate needs {columns} cut along another dim than it is",
         f"all_to_all: XLA computes concatenate {BACK}"]
        if jax.__version_info__ >= (0, 8)
        else [f"all_gather: concatenate needs all of {columns}, which is sharded over tp"],
    ),
    "scan": (
        lambda x: lax.scan(lambda sum, row: (sum + row, sum * 2), jnp.zeros(16), x), (ROWS,), None,
        [f"all_gather: scan needs all of {rows}, which is sharded over dp"],
    ),
    "constraint in a loop": (
        lambda x: lax.fori_loop(0, 3, lambda _, x: constrained(constrained(jnp.tanh(x), None, "dp") * 2, "dp"), x),
        (ROWS,), None,
        [f"all_to_all: {HERE} asks for P(None, 'dp'), which cuts {rows} along another dim than now"],
    ),
    "slice whose place is computed": (
        lambda x, i: lax.dynamic_slice_in_dim(x, i, 4, 0), (ROWS, np.int32(1)), None,
        [f"all_gather: dynamic_slice needs all of {rows}, which is sharded over dp"],  # as many rows as a rank had
    ),
    "result that does not divide": (
        lambda x, w: constrained(x @ w, None, "dp"), (ROWS, placed((16, 5))), None,
        [f"all_gather: dot_general needs all of {rows}, which is sharded over dp; {HERE} asks for P(None, 'dp') "
         "of its result",
         "all_gather: the function returns all of the result of dot_general, which is sharded over dp: a result must "
         "be in equal pieces, and 2 does not divide 5"],
    ),
    "product that is asked whole": (
        lambda x, w: constrained(x @ w), (ROWS, placed((16, 16))), None,
        [f"all_gather: dot_general needs all of {rows}, which is sharded over dp; {HERE} asks for P() of its result"],
    ),
    "constraint in what is recomputed": (
        jax.grad(jax.checkpoint(lambda x: (constrained(jnp.tanh(x)) ** 2).sum())), (ROWS,), None,
        [f"all_gather: {HERE} asks for P(), which takes all of {rows}, which is sharded over dp"],
    ),
    "psum": (
        lambda x: jax.shard_map(lambda x: lax.psum(x, "dp"), mesh=jax_mesh(GRID), in_specs=PartitionSpec("dp"),
                                out_specs=PartitionSpec())(x), (ROWS,), None,
        [f"all_reduce: your program has psum of {rows}"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CAUSES)
def test_causes(name):
    """Each was judged by hand."""
    program, given, result, expected = CAUSES[name]
    fn = jax.jit(program) if result is None else jax.jit(program, out_shardings=on(*result))
    found = explain(fn, *given)
    code = inspect.unwrap(program).__code__ if any(HERE in why for why in expected) else None
    where = f"test_explain.py:{code.co_firstlineno + (code.co_name != '<lambda>')}" if code else ""
    expected = [why.replace(HERE, where) for why in expected]
    assert [f"{one.op}: {cause.why}" for one in found for cause in one.causes][: len(expected)] == expected
    assert bool(found) == bool(expected)
    assert not [cause.where for one in found for cause in one.causes if cause.where.startswith("lowered.py")]


def forgetful(x, up, down, *spec):
    h = constrained(jax.nn.gelu(x @ up), *spec)
    return h @ down


def forgetful_twice(x, *spec):
    y = constrained(jnp.exp(x), *spec)
    return constrained(y, "dp", None)  # it would be sent here


ASK = f"test_explain.py:{forgetful.__code__.co_firstlineno + 1}"
WEIGHTS = placed((3, 16, 32), None, None, "tp"), placed((3, 32, 16), None, "tp")
PROGRAMS = {  # a program, which takes a spec last; its arguments; the spec that it asks for; the proposed one
    "before a product": (forgetful, (ROWS, UP, placed((32, 16), "tp")), ("dp", None), ("dp", "tp")),
    "a gradient": (
        lambda x, up, down, *spec: jax.grad(lambda up: forgetful(x, up, down, *spec).sum())(up),
        (ROWS, UP, placed((32, 16), "tp")), ("dp", None), ("dp", "tp"),
    ),
    "both axes": (lambda x, *spec: constrained(jnp.exp(x), *spec) * 2, (X,), (None, None), ("dp", "tp")),
    "a batch": (
        lambda x, *spec: jax.vmap(lambda x: constrained(jnp.exp(x), *spec))(x),
        (placed((3, 8, 16), None, "dp", "tp"),), ("dp", None), ("dp", "tp"),
    ),
    "layers": (
        lambda x, layers, *spec: lax.scan(lambda x, w: (forgetful(x, *w, *spec), None), x, layers)[0],
        (ROWS, WEIGHTS), ("dp", None), ("dp", "tp"),
    ),
    "before broadcasting": (
        lambda x, *spec: constrained(jnp.broadcast_to(jnp.sin(x), (4, 8, 16)), *spec),
        (X,), (None, None, None), (None, "dp", "tp"),
    ),
    "a product's result": (lambda x, w, *spec: constrained(x @ w, *spec), (ROWS, UP), ("dp", None), ("dp", "tp")),
    "a result of an inner jit": (
        lambda x, *spec: jax.jit(jnp.cos, out_shardings=on(*spec))(x) * 2, (X,), (None, "dp"), ("dp", "tp"),
    ),
    "a batch along an axis": (
        lambda x, *spec: jax.vmap(lambda x: constrained(jnp.exp(x), *spec), 1, 1, spmd_axis_name="dp")(x),
        (placed((8, 4, 16), None, "dp", "tp"),), (None, None), (None, "tp"),
    ),
    "a loop that does nothing else": (
        lambda x, *spec: lax.fori_loop(0, 3, lambda _, x: constrained(constrained(x, *spec), "dp", "tp"), x),
        (X,), ("dp", None), ("dp", "tp"),
    ),
    "a branch": (
        lambda x, *spec: lax.cond(True, lambda x: constrained(jnp.exp(x), *spec), jnp.sin, x),
        (X,), ("dp", None), ("dp", "tp"),
    ),
    "rows": (lambda x, *spec: lax.map(lambda x: constrained(jnp.sin(x), *spec), x), (COLUMNS,), (None,), ("tp",)),
    "a transpose": (lambda x, *spec: constrained(x.T, *spec), (X,), ("dp", None), ("tp", "dp")),
    "two of one line": (
        lambda x, *spec: constrained(constrained(jnp.exp(x), *spec), *spec), (X,), ("dp", None), ("dp", "tp"),
    ),
    "nothing is better": (forgetful_twice, (X,), ("dp", None), None),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_proposal_is_what_the_program_sends_with_it(name):
    """And it is less."""
    program, given, asked, better = PROGRAMS[name]
    with_spec = lambda spec: lambda *given: program(*given, *spec)  # noqa: E731
    found = explain(with_spec(asked), *given)
    assert [one.spec for one in found.proposals] == ([better] if better else [])
    for one in found.proposals:
        assert (one.before, one.after) == (found.bytes, explain(with_spec(one.spec), *given).bytes)
        assert one.after < one.before
        assert str(one) in repr(found)


def test_a_constraint_that_forgets_an_axis_is_named():
    """And not what needs the array after it: it would have taken the pieces as they were."""
    found = explain(lambda *given: forgetful(*given, "dp"), ROWS, UP, placed((32, 16), "tp"))
    gather, total = (one.causes[0] for one in found)
    assert gather.where == ASK and gather.why.startswith(
        f"{ASK} asks for P('dp'), which takes all of the result of mul"
    )
    assert total.operation == "dot_general"
    (one,) = found.proposals
    assert " ".join(str(one).split()) == (
        f"{ASK}: with P('dp', 'tp') instead of P('dp') a rank sends at most {one.after:,} B instead of {one.before:,} B"
    )


def test_a_helper_is_not_what_asks():
    """Its caller is, through any number of helpers; what JAX calls is none, and neither is what computes."""

    def as_rows(x):
        return constrained(x, "dp", None)

    def computes(x):
        return as_rows(jnp.sin(x))

    lines = here(-2), here(2)
    calls = lambda x: computes(x)  # noqa: E731
    called = lambda x: as_rows(jnp.sin(x))  # noqa: E731
    for program, line in zip((calls, called), lines, strict=True):
        (gather,) = explain(program, X)
        assert gather.where == line
    (gather,) = explain(as_rows, X)
    assert gather.where == here(-12)


@jax.custom_vjp
def linear(x, w):
    return x @ w


def backward_of_linear(saved, d):
    x, w = saved
    return d @ w.T, x.T @ d


linear.defvjp(lambda x, w: (x @ w, (x, w)), backward_of_linear)


def test_the_backward_function_of_a_custom_vjp_has_its_own_line():
    found = explain(jax.grad(lambda w, x: jnp.sin(linear(x, w)).sum()), placed((16, 4)), ROWS)
    (total,) = found
    assert total.is_backward
    assert total.where == f"test_explain.py:{backward_of_linear.__code__.co_firstlineno + 2}"


def test_out_shardings_of_what_a_scan_has_stacked():
    def layers(x, ws):
        return lax.scan(lambda x, w: (x * w, jnp.tanh(x * w)), x, ws)[1]

    fn = jax.jit(layers, out_shardings=on(None, "dp"))
    found = explain(fn, X, placed((3, 16), None, "tp"))
    assert {cause.why.partition(",")[0] for one in found for cause in one.causes} == {
        "out_shardings asks for P(None"  # 'dp'), which takes ...
    }
    assert [one.spec for one in found.proposals] == [(None, "dp", "tp")]


def test_operations_that_jax_puts_in_are_not_named():
    ids = jax.ShapeDtypeStruct((8,), np.int32, sharding=on("dp"))
    (total,) = explain(lambda table, ids: table[ids], placed((32, 16), "tp"), ids)
    assert total.causes[0].operands == ("table float32[32, 16] P('tp')", "ids int32[8] P('dp')")
    loss = lambda w, x: jax.nn.relu(x @ jax.nn.relu(x @ w).T @ x).mean() + (x @ w * 2).sum()  # noqa: E731
    said = repr(explain(jax.grad(loss), placed((16, 16)), ROWS))
    assert "the result of where" in said
    assert not any(word in said for word in ("add_any", "broadcast_in_dim", "select_n", " made"))


def test_what_few_ranks_send_is_not_added_up():
    """Several hops, of different ranks each: no rank sends all of them."""
    found = explain(lambda x: [half * 2 for half in jnp.split(x, 2, axis=1)], COLUMNS)
    assert {one.op for one in found} == {"ppermute"}
    sent = [sum(one.by_rank[rank] for one in found) for rank in GRID.ranks]
    assert found.bytes == max(sent) < sum(one.bytes for one in found)
    assert f"a rank sends at most {max(sent):,} B" in repr(found)


def test_results_of_one_line_that_are_asked_differently():
    """The collective tells which it is."""
    fn = jax.jit(lambda x, y: (x * 2, y * 2), out_shardings=(on(), on(None, "dp")))
    whole, cut = (one.causes[0].why for one in explain(fn, ROWS, ROWS))
    assert whole.startswith("out_shardings asks for P() of result[0], which takes all of ")
    assert cut.startswith("out_shardings asks for P(None, 'dp') of result[1], which cuts ")


def test_a_sum_of_the_forward_pass_that_is_sent_with_gradients():
    def loss(w, x):
        return lax.pmean(((x @ w) ** 2).mean(), "dp")

    mapped = jax.shard_map(loss, mesh=jax_mesh(GRID), in_specs=(PartitionSpec(), PartitionSpec("dp")),
                           out_specs=PartitionSpec())  # fmt: skip
    (total,) = explain(jax.jit(jax.value_and_grad(mapped)), placed((16, 4)), ROWS)
    whose = "the gradient of " if jax.__version_info__ >= (0, 8) else ""  # XLA named it so since
    assert [cause.why for cause in total.causes] == [
        "your program has psum of the result of div",
        f"{whose}your program has psum of the result of dot_general",
    ]


def test_what_a_rank_keeps_is_not_sent():
    """Ranks 0 and 3 have their pieces already, of two rows each."""
    mesh = Mesh(dp=2, tp=2)
    x = placed((8, 8), ("dp", "tp"), mesh=mesh)
    found = explain(jax.jit(lambda x: x + 1, out_shardings=on(("tp", "dp"), mesh=mesh)), x)
    assert [one.by_rank for one in found] == [(0, 64, 64, 0)]
    assert repr(found).startswith("lambda on Mesh(dp=2, tp=2): a rank sends at most 64 B")


def test_a_piece_of_a_sum_that_all_ranks_take_alike_is_no_reduce_scatter():
    """It has the size of a rank's own piece, but its place is one of the program."""
    product, weight = placed((16, 8), None, "dp"), placed((8, 4), "dp")
    alike = lambda x, w, i: lax.dynamic_slice_in_dim(constrained(x @ w), i, 8, 0)  # noqa: E731
    assert [one.op for one in explain(alike, product, weight, np.int32(1), accelerator=True)] == ["all_reduce"]


def test_what_moves():
    (hop,) = explain(lambda x: jnp.roll(x, 1, 0), placed((8, 16), "dp", mesh=DP))
    assert (hop.op, hop.bytes) == ("ppermute", 16 * 4)
    assert hop.causes[0].why.endswith("needs x float32[8, 16] P('dp') on other ranks than those that have it")


def test_what_is_written_is_said_to_be():
    def program(x):
        return lax.psum(jnp.sin(x) * lax.all_gather(x, "dp").sum(), "dp").sum()

    line = here(-2)
    mapped = jax.shard_map(program, mesh=jax_mesh(DP), in_specs=PartitionSpec("dp"), out_specs=PartitionSpec())
    found = explain(jax.value_and_grad(mapped), placed((8, 16), "dp", mesh=DP))
    forward = {one.op: one for one in found if not one.is_backward}
    assert all(one.is_written and one.where == line for one in found)
    assert forward["all_gather"].causes[0].why == "your program has all_gather of x float32[8, 16] P('dp')"
    (backward,) = [one for one in found if one.is_backward and one.op != "all_reduce"]
    assert (backward.op, backward.bytes) == ("reduce_scatter", 3 * 8 * 16 * 4 // 4)
    assert backward.causes[0].why.startswith("the gradient of your program has reduce_scatter of ")


def test_an_embedding():
    """Each rank finds the rows that it has; the rest are zeros until they are added."""
    ids = jax.ShapeDtypeStruct((8,), np.int32, sharding=on(mesh=DP))
    (total,) = explain(lambda table, ids: table[ids], placed((32, 16), "dp", mesh=DP), ids)
    assert total.causes[0].why.startswith("after gather of table float32[32, 16] P('dp') and ")


def test_what_only_the_running_program_decides():
    x = placed((8, 16), "dp", mesh=DP)
    found = explain(lambda x: lax.while_loop(lambda x: x.sum() < 9, lambda x: x + 1, x), x)
    assert repr(found).splitlines()[0].endswith("each rank sends 0 B, and what only the running program decides")
    assert "\nin a loop: all_reduce along dp, 8 B each\n" in repr(found)
    with pytest.raises(ValueError, match="how often the all_reduce at test_explain"):
        _ = found.bytes
    maybe = explain(lambda x: lax.cond(x[0, 0] > 1, lambda x: x - x.sum(), jnp.sin, x), x)
    assert any(str(one).startswith("at most 1 x all_reduce along dp, 8 B each\n") for one in maybe)


def test_nothing_is_sent():
    assert repr(explain(jnp.sin, np.ones(3, np.float32))) == "sin on Mesh(devices=1): nothing is sent"
    alone = Mesh(dp=4, tp=1)
    assert not explain(lambda x: x.sum(1), placed((8, 16), "dp", "tp", mesh=alone))


def test_arguments_are_named_also_where_some_are_no_arrays():
    layer = {"w": placed((16, 4), "tp"), "activation": jnp.tanh}
    (total,) = explain(lambda layer, x: layer["activation"](x @ layer["w"]), layer, placed((8, 16), None, "tp"))
    assert total.causes[0].operands == ("x float32[8, 16] P(None, 'tp')", "layer['w'] float32[16, 4] P('tp')")


def test_a_ranks_program_of_tplab():
    """In a shard_map of one's own."""
    mlp = lambda x, a, b: lab.all_reduce(jnp.tanh(x @ a) @ b, "tp")  # noqa: E731
    specs = PartitionSpec(), PartitionSpec(None, "tp"), PartitionSpec("tp")
    mapped = jax.shard_map(mlp, mesh=jax_mesh(Mesh(tp=4)), in_specs=specs, out_specs=PartitionSpec())
    (total,) = explain(mapped, *(np.ones(shape, np.float32) for shape in [(2, 8), (8, 16), (16, 8)]))
    assert total.is_written
    if jax.__version_info__ >= (0, 8):  # XLA knew only the innermost line before, which is tplab's
        assert total.where == here(-6)


def test_on_gpus_and_tpus_bfloat16_is_sent_as_such():
    """XLA for CPUs makes float32 of it first. What the program itself makes float32 of stays."""
    shape = lambda dims, *spec: jax.ShapeDtypeStruct(dims, jnp.bfloat16, sharding=on(*spec, mesh=DP))  # noqa: E731
    x, w = shape((8, 16), None, "dp"), shape((16, 4), "dp")

    def product(x, w):
        return x @ w

    for fn, given, num_bytes in [
        (product, (x, w), 2 * 3 * 8 * 4 * 4 // 4),  # a sum
        (jax.jit(lambda x: x * 2, out_shardings=on(mesh=DP)), (x,), 3 * 8 * 16 * 4 // 4),  # a gather
    ]:
        (here_,), (there,) = explain(fn, *given), explain(fn, *given, accelerator=True)
        assert (here_.bytes, here_.causes[0].dtype) == (num_bytes, "float32")
        assert (there.bytes, there.causes[0].dtype) == (num_bytes // 2, "bfloat16")
        assert here_.causes[0].why.endswith("; sent as bfloat16 on GPUs")
        assert trace(fn, *given, accelerator=True).bytes_sent(rank=0) == num_bytes // 2

    wide = jax.jit(lambda x: jnp.sin(x.astype(jnp.float32)).sum(1))
    for accelerator in (False, True):
        (total,) = explain(wide, x, accelerator=accelerator)
        assert (total.bytes, total.causes[0].dtype) == (2 * 3 * 8 * 4 // 4, "float32")
        assert "GPUs" not in total.causes[0].why


def test_on_gpus_and_tpus_sums_of_two_types_are_sent_as_each_is():
    """XLA for CPUs sends them together, as float32."""
    low, high = jnp.bfloat16, jnp.float32
    kinds = [
        ((16, 32), low, (None, "dp")),
        ((32, 32), low, ("dp",)),
        ((16, 32), high, (None, "dp")),
        ((32, 32), high, ("dp",)),
    ]
    given = [jax.ShapeDtypeStruct(shape, dtype, sharding=on(*spec, mesh=DP)) for shape, dtype, spec in kinds]
    narrow, wide = 2 * 3 * 16 * 32 * 2 // 4, 2 * 3 * 16 * 32 * 4 // 4
    programs = {  # and what is sent in bfloat16, and in float32
        lambda a, b, c, d: (a @ b, c @ d): (narrow, wide),
        lambda a, b, c, d: (a @ b, (c @ d).astype(low)): (narrow, wide),
        lambda a, b, c, d: ((a @ b).astype(high), c @ d): (narrow, wide),
        lambda a, b, c, d: (jnp.tanh(a @ b), jnp.exp(c @ d)): (narrow, wide),
        lambda a, b, c, d: (jnp.dot(a, b, preferred_element_type=high), c @ d, a @ b): (narrow, 2 * wide),
        lambda a, b, c, d: (a @ b, jnp.tanh(a) @ b): (2 * narrow, 0),
    }
    for fn, expected in programs.items():
        sent = [e for e in trace(fn, *given, accelerator=True).events if e.rank == 0 and e.kind == "collective"]
        assert tuple(sum(e.bytes for e in sent if e.dtype == dtype) for dtype in ("bfloat16", "float32")) == expected
        assert explain(fn, *given, accelerator=True).bytes == sum(expected)


def test_on_gpus_and_tpus_a_step_of_mixed_precision():
    """Data parallel: gradients of products are summed in bfloat16; those of a gain that is used in float32, the norm of
    all and the loss in float32."""

    def loss(params, x):
        h = jnp.tanh(x.astype(jnp.bfloat16) @ params["w"].astype(jnp.bfloat16)).astype(jnp.float32)
        return jax.nn.log_softmax(h * params["gain"])[:, 0].sum()

    def step(params, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        return value, grads, sum((g**2).sum() for g in grads.values())

    params = {"w": placed((16, 32), mesh=DP), "gain": placed((32,), mesh=DP)}
    found = trace(step, params, placed((64, 16), "dp", mesh=DP), accelerator=True)
    sent = [e for e in found.events if e.rank == 0 and e.kind == "collective"]
    by_dtype = {dtype: sum(e.bytes for e in sent if e.dtype == dtype) for dtype in ("bfloat16", "float32")}
    assert by_dtype["bfloat16"] == found.bytes_sent(rank=0) - by_dtype["float32"] == 2 * 3 * 16 * 32 * 2 // 4
    assert 2 * 3 * 32 * 4 // 4 <= by_dtype["float32"] <= 2 * 3 * 36 * 4 // 4  # the gain's gradient, the loss


def test_on_gpus_and_tpus_a_sum_is_scattered():
    """Where several sums are sent together, each is what it is."""

    def step(w, x):
        value, grad = jax.value_and_grad(lambda w: (jnp.tanh(x @ w) ** 2).sum())(w)
        return w - grad, value

    w, x = placed((16, 32), "dp", mesh=DP), placed((64, 16), "dp", mesh=DP)
    step = jax.jit(step, out_shardings=(on("dp", mesh=DP), on(mesh=DP)))
    found = explain(step, w, x, accelerator=True)
    by_op = {one.op: (one.bytes, [math.prod(cause.shape) for cause in one.causes]) for one in found}
    assert by_op == {
        "all_gather": (3 * 16 * 32 * 4 // 4, [4 * 32]), "reduce_scatter": (3 * 16 * 32 * 4 // 4, [16 * 32]),
        "all_reduce": (8, [1]),
    }  # fmt: skip
    assert "GPUs" not in repr(found)


def test_pmap():
    found = explain(jax.pmap(lambda x, w: jax.lax.psum(x @ w, "r"), "r"), np.ones((4, 2, 8)), np.ones((4, 8, 2)))
    assert [(one.op, one.axis, one.bytes, one.is_written) for one in found] == [("all_reduce", "r", 24, True)]
    (gather,) = explain(jax.pmap(lambda x: jax.lax.all_gather(x, "r"), "r"), np.ones((4, 8), np.float32))
    if jax.__version_info__ >= (0, 8):  # XLA had no names of a pmap's arguments before
        assert found[0].causes[0].why == "your program has psum of the result of dot_general"
        assert gather.causes[0].why == "your program has all_gather of x float32[4, 8] P('r')"


def test_tensors_of_one_cause_are_one_line_that_fits_into_a_notebook():
    def step(params, x):
        return jax.grad(lambda ps: sum((x @ p).sum() for p in ps))(params)

    mesh = jax_mesh(Mesh(dp=2))
    put = lambda shape, *spec: jax.device_put(jnp.ones(shape), NamedSharding(mesh, PartitionSpec(*spec)))  # noqa: E731
    said = str(explain(jax.jit(step), [put((6, 3)), put((6, 3))], put((4, 6), "dp")))
    assert "1 x all_reduce along dp" in said and "2 x " in said.split("\n", 2)[2]
    assert max(map(len, said.splitlines())) <= 80


CUBE = Mesh(a=2, b=2, c=2)
REMATERIALIZED = "an involuntary full rematerialization"


def reordered(given, asked, *, whole_first=False):
    """A program that asks for another sharding of an array than it has, and the array."""

    def program(x):
        y = jnp.sin(x) * 2
        y = lax.with_sharding_constraint(y, on(mesh=CUBE)) if whole_first else y
        return lax.with_sharding_constraint(y * 3, on(*asked, mesh=CUBE))

    return program, placed((16, 32), *given, mesh=CUBE)


@pytest.mark.parametrize(
    ("given", "asked", "share"),
    [
        ((None, ("c", "b")), ("b", None), "1/2"),
        ((("c", "b", "a"), None), (None, "a"), "1/2"),
        ((None, ("c", "b", "a")), (("a", "b"), None), "1/4"),
    ],
)
def test_an_involuntary_full_rematerialization_is_named(given, asked, share, capfd):
    """As XLA itself says, to standard error."""
    found = explain(*reordered(given, asked))
    says_so = "Involuntary full rematerialization" in capfd.readouterr().err
    assert says_so or jax.__version_info__ < (0, 8)  # XLA had other words before
    (cause,) = [cause for one in found for cause in one.causes]
    if says_so:
        assert f"each rank keeps {share} of what it gathers" in cause.why and REMATERIALIZED in cause.why
    have = str(next(name for name in given if name)).replace('"', "'")
    (one,) = found.proposals
    assert f"with P({'' if given[0] else 'None, '}{have}) instead of " in " ".join(str(one).split())
    assert one.after == 0 and not explain(*reordered(given, given))


@pytest.mark.parametrize(
    ("given", "asked", "whole_first"),
    [
        (("a", None), (None, "a"), False),  # an all_to_all
        ((("a", "b"), "c"), (None, ("a", "b")), False),
        ((None, ("c", "b")), (None, None), False),  # whole is what is asked for
        ((None, ("c", "b")), ("b", None), True),
    ],
)
def test_what_is_none_is_not_called_one(given, asked, whole_first, capfd):
    found = explain(*reordered(given, asked, whole_first=whole_first))
    assert found and "Involuntary" not in capfd.readouterr().err
    assert not any("rematerialization" in cause.why for one in found for cause in one.causes)


def test_axes_of_a_dim_are_in_their_order():
    (total,) = explain(lambda x: x.sum(1), placed((8, 16), None, ("tp", "dp")))
    assert total.causes[0].operands == ("x float32[8, 16] P(None, ('tp', 'dp'))",)


class Weights:
    def __init__(self, up):
        self.up = up


jax.tree_util.register_pytree_with_keys(
    Weights, lambda weights: ((("up", weights.up),), None), lambda _, fields: Weights(*fields)
)


def test_fields_whose_keys_are_strings_are_named_as_fields():
    (total,) = explain(lambda x, weights: x @ weights.up, placed((8, 16), "dp", "tp"), Weights(placed((16, 4), "tp")))
    assert total.causes[0].operands[1] == "weights.up float32[16, 4] P('tp')", total.causes[0].operands
