"""What operations cost on the modelled clock, compared with rooflines that are worked out by hand.

seconds = launch + max(FLOPs / peak of the dtype, bytes / memory bandwidth)
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import tplab.jax as lab  # before JAX is used
from tplab import Mesh, P
from tplab.cost import Chip, Cluster, Link
from tplab.jax.ranks.devices import jax_mesh
from tplab.jax.tracing.hlo import Module
from tplab.jax.tracing.unroll import unrolled
from tplab.trace.recorder import Recorder
from tplab.trace.trace import Trace

RATES = {"float32": 67e12, "bfloat16": 989e12, "float16": 989e12, "float8_e4m3fn": 1979e12, "int8": 1979e12}
BANDWIDTH, LAUNCH = 3.35e12, 5e-6
SHEET = Cluster("sheet", Chip("chip", RATES, BANDWIDTH, 80e9, LAUNCH), Link("wire", 1e-6, 450e9))
WIDTH = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int8": 1, "int32": 4}
ONE = Mesh(tp=1)
FLOATS = ["float32", "bfloat16", "float16", "float8_e4m3fn"]


def seconds(flops: float, num_bytes: float, dtype: str) -> float:
    return LAUNCH + max(flops / RATES[dtype], num_bytes / BANDWIDTH)


def shape(*dims: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, jnp.dtype(dtype))


def compiled(fn: Callable[..., Any], *args: Any, donated: tuple[int, ...] = ()) -> Trace:
    """What XLA made of it."""
    return lab.trace(jax.jit(fn, donate_argnums=donated), *args, cluster=SHEET)


def walked(fn: Callable[..., Any], *args: Any) -> Trace:
    """What JAX traced."""
    return lab.run(fn, ONE, *args, cluster=SHEET).trace


def costs(trace: Trace) -> list[tuple[str, str, int]]:
    """What rank 0 computes: operation, dtype of its result, and bytes. Index arithmetic, which is on whole numbers
    without a table, is left out."""
    found = [e for e in trace.events if e.rank == 0 and e.kind == "compute"]
    return [(e.op, e.dtype, e.bytes) for e in found if not e.dtype.startswith(("int", "uint", "bool"))]


# ----------------------------------------------------------------------------------------------- the dtype of a product


@pytest.mark.parametrize("dtype", [*FLOATS, "int8"])
def test_a_product_runs_at_the_rate_of_its_operands(dtype):
    """4096^3 over 4 ranks: in bfloat16 35 us, whatever XLA's CPU computes with."""
    mesh = Mesh(tp=4)
    on = lambda *spec: NamedSharding(jax_mesh(mesh), PartitionSpec(*spec))  # noqa: E731
    x = jax.ShapeDtypeStruct((4096, 4096), jnp.dtype(dtype), sharding=on("tp"))
    w = jax.ShapeDtypeStruct((4096, 4096), jnp.dtype(dtype), sharding=on())
    wanted = ("dot_general", dtype, (2 * 1024 * 4096 + 4096 * 4096) * WIDTH[dtype])
    expected = seconds(2 * 1024 * 4096 * 4096, wanted[2], dtype)
    product = lambda x, w: x @ w  # noqa: E731
    given = shape(4096, 4096, dtype=dtype)
    run = lab.run(product, mesh, given, given, in_specs=(P("tp"), P()), out_specs=P("tp"), cluster=SHEET).trace
    for found in (lab.trace(product, x, w, cluster=SHEET), run):
        events = [e for e in found.events if e.rank == 0]
        assert [(e.op, e.dtype, e.bytes) for e in events] == [wanted]
        assert found.makespan == pytest.approx(expected, rel=1e-9)
    assert dtype != "bfloat16" or 34e-6 < expected - LAUNCH < 36e-6


@pytest.mark.parametrize("given, result", [("bfloat16", "float32"), ("float8_e4m3fn", "float32"), ("int8", "int32")])
def test_a_wider_result_does_not_slow_a_product(given, result):
    n = 1024
    fn = lambda x, w: jnp.matmul(x, w, preferred_element_type=jnp.dtype(result))  # noqa: E731
    x = shape(n, n, dtype=given)
    num_bytes = n * n * (2 * WIDTH[given] + WIDTH[result])
    for found in (compiled(fn, x, x), walked(fn, x, x)):
        (event,) = [e for e in found.events if e.rank == 0]
        assert (event.op, event.dtype, event.bytes) == ("dot_general", result, num_bytes)
        assert event.end - event.start == pytest.approx(seconds(2 * n**3, num_bytes, given), rel=1e-9)


def test_what_the_program_makes_wider_is_wide():
    """Its own converts are work, and the product of what they return is one of float32."""
    n = 1024
    x = shape(n, n, dtype="bfloat16")
    fn = lambda x, w: x.astype(jnp.float32) @ w.astype(jnp.float32)  # noqa: E731
    once = n * n * (2 + 4)
    wanted = 2 * seconds(0, once, "float32") + seconds(2 * n**3, 3 * n * n * 4, "float32")
    for found in (compiled(fn, x, x), walked(fn, x, x)):
        assert sorted(dtype for _, dtype, _ in costs(found)) == ["float32"] * 3
        assert sorted(num_bytes for *_, num_bytes in costs(found)) == [once, once, 3 * n * n * 4]
        assert found.makespan == pytest.approx(wanted, rel=1e-9)


def test_what_the_program_makes_narrower_is_narrow():
    """Weights in float32, a product in bfloat16: reading the weights is work, what the CPU adds after it is not."""
    n = 1024
    x = shape(n, n)
    fn = lambda x, w: x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)  # noqa: E731
    once = n * n * (4 + 2)
    for found in (compiled(fn, x, x), walked(fn, x, x)):
        assert [(dtype, num_bytes) for _, dtype, num_bytes in costs(found)] == [
            ("bfloat16", once), ("bfloat16", once), ("bfloat16", 3 * n * n * 2),
        ]  # fmt: skip
        assert found.makespan == pytest.approx(
            2 * seconds(0, once, "bfloat16") + seconds(2 * n**3, 3 * n * n * 2, "bfloat16"), rel=1e-9
        )


@pytest.mark.skipif(jax.__version_info__ < (0, 8), reason="XLA of jaxlib 0.7 adds up in rounds of 32, each by itself")
def test_a_sum_in_float32_of_what_is_narrow():
    x = shape(4096, 512, dtype="bfloat16")
    found = compiled(lambda x: x.astype(jnp.float32).sum(0), x)
    assert [(dtype, num_bytes) for _, dtype, num_bytes in costs(found)] == [("float32", 4096 * 512 * 2 + 512 * 4)]


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_sharded_mlp_with_its_layouts(dtype):
    """Transposes, a batch dim and an activation are between the products."""
    B, S, D, F = 4, 64, 96, 160
    x, a, b = shape(B, S, D, dtype=dtype), shape(F, D, dtype=dtype), shape(D, F, dtype=dtype)
    fn = lambda x, a, b: jnp.einsum("bsf,df->dbs", jnp.tanh(jnp.einsum("bsd,fd->bsf", x, a)), b)  # noqa: E731
    for found in (compiled(fn, x, a, b), walked(fn, x, a, b)):
        products = [e for e in found.events if e.rank == 0 and e.flops >= 2 * B * S * D * F]
        # a flattened operand has the same size
        sizes = sorted([B * S * D + F * D + B * S * F, B * S * F + D * F + B * S * D])
        assert [e.dtype for e in products] == [dtype, dtype]
        assert sorted(e.bytes for e in products) == [size * WIDTH[dtype] for size in sizes]
        others = [e for e in found.events if e.rank == 0 and e not in products]
        assert {e.dtype for e in others} <= {dtype}  # tanh, copies into another layout


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_whose_sum_over_ranks_is_sent(dtype):
    """CPUs sum over ranks in float32, and make it narrow after that."""
    mesh = Mesh(tp=4)

    def placed(*dims, spec):
        on = NamedSharding(jax_mesh(mesh), PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(dims, jnp.dtype(dtype), sharding=on)

    x, a, b = placed(64, 96, spec=()), placed(96, 32, spec=(None, "tp")), placed(32, 96, spec=("tp",))
    one, two = (lambda x, a, b: jnp.tanh(x @ a) @ b), (lambda x, a, b: (jnp.tanh(x @ a) @ b, jnp.sin(x @ a) @ b))
    num_bytes = (64 * 96 + 96 * 8 + 64 * 8) * WIDTH[dtype]
    for fn, count in ((one, 2), (two, 3)):
        products = [e for e in lab.trace(fn, x, a, b, cluster=SHEET).events if e.rank == 0 and "dot" in e.op]
        assert [(e.dtype, e.bytes) for e in products] in ([(dtype, num_bytes)] * n for n in (count, count + 1))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention(dtype):
    B, H, S, D = 2, 4, 128, 64

    def attention(q, k, v):
        scores = jnp.einsum("bhqd,bhkd->bhqk", q, k)
        return jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores, -1), v)

    x = shape(B, H, S, D, dtype=dtype)
    num_bytes = B * H * (2 * S * D + S * S) * WIDTH[dtype]
    for found in (compiled(attention, x, x, x), walked(attention, x, x, x)):
        events = [e for e in found.events if e.rank == 0]
        products = [e for e in events if e.op == "dot_general"]
        assert [(e.dtype, e.bytes) for e in products] == [(dtype, num_bytes)] * 2
        for event in products:
            assert 1 <= event.flops / (2 * B * H * S * S * D) < 1.05  # a part of the softmax may be fused into it
            assert event.end - event.start == pytest.approx(seconds(event.flops, num_bytes, dtype), rel=1e-9)
    assert all(e.flops for e in compiled(attention, x, x, x).events)  # no convert is an operation of its own


def test_layers_in_a_loop():
    """XLA makes all weights wide before the loop; the products are narrow, and each iteration reads one layer."""
    L, B, D, F = 3, 64, 96, 32
    weights = shape(L, D, F, dtype="bfloat16"), shape(L, F, D, dtype="bfloat16")

    def layers(x, weights):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w[0]) @ w[1], None), x, weights)[0]

    step = jax.grad(lambda w, x: layers(x, w).astype(jnp.float32).sum())
    x = shape(B, D, dtype="bfloat16")
    for found, num_products in ((compiled(layers, x, weights), 2), (compiled(step, weights, x), 6)):
        events = [e for e in found.events if e.rank == 0]
        products = [e for e in events if e.op == "dot_general"]
        assert len(products) == num_products * L
        assert {(e.dtype, e.bytes) for e in products} == {("bfloat16", 2 * (B * D + D * F + B * F))}
        # of the weights and what is kept for the backward pass, an iteration touches its own piece
        pieces = [e.bytes for e in events if e.op in ("dynamic_slice", "dynamic_update_slice", "convert_element_type")]
        assert max(pieces, default=0) <= 2 * 2 * B * D + 8


# ------------------------------------------------------------------------------------------- parts of arrays: gathering

ROWS, COLUMNS, PICKED = 65_536, 4096, 2048


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("fn", [lambda e, i: e[i], lambda e, i: jnp.take(e, i, axis=0)], ids=["index", "take"])
def test_a_gather_reads_and_writes_rows(fn, dtype):
    """Of a table of 1.1 GB, 34 MB are read."""
    num_bytes = 2 * PICKED * COLUMNS * WIDTH[dtype] + 4 * PICKED
    table, ids = shape(ROWS, COLUMNS, dtype=dtype), shape(PICKED, dtype="int32")
    assert [(kind, num) for _, kind, num in costs(compiled(fn, table, ids))] == [(dtype, num_bytes)]
    gathers = [e for e in walked(fn, table, ids).events if e.op == "gather"]
    assert [(e.dtype, e.bytes, e.flops) for e in gathers] == [(dtype, num_bytes, 0)]
    assert gathers[0].end - gathers[0].start == pytest.approx(seconds(0, num_bytes, "float32"), rel=1e-9)


def test_a_small_table_is_read_once():
    """16 rows, of which 2,048 are taken."""
    num_bytes = (16 + PICKED) * COLUMNS * 4 + 4 * PICKED
    table, ids = shape(16, COLUMNS), shape(PICKED, dtype="int32")
    assert [num for *_, num in costs(compiled(lambda e, i: e[i], table, ids))] == [num_bytes]
    assert [e.bytes for e in walked(lambda e, i: e[i], table, ids).events if e.op == "gather"] == [num_bytes]


def test_a_slice_reads_what_it_takes():
    for fn in (lambda x: jnp.tanh(x[10:20]), lambda x: jnp.tanh(lax.dynamic_slice(x, (x.shape[0] // 2, 0), (10, 512)))):
        (found,) = costs(compiled(fn, shape(4096, 512)))
        assert found[2] == 2 * 10 * 512 * 4


# ------------------------------------------------------------------------------------------- parts of arrays: updating

WHOLE = ROWS * COLUMNS


def update(cache, row, n):
    return lax.dynamic_update_slice(cache, row, (n, 0))


def put(cache, rows, ids):
    return cache.at[ids].set(rows)


def add(cache, rows, ids):
    return cache.at[ids].add(rows)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_update_in_place(dtype):
    """Of a donated cache only the row is written; one that is kept is copied first."""
    width = WIDTH[dtype]
    given = shape(ROWS, COLUMNS, dtype=dtype), shape(1, COLUMNS, dtype=dtype), shape(dtype="int32")
    row, copied = 2 * COLUMNS * width, 2 * WHOLE * width
    total = lambda trace: sum(num for *_, num in costs(trace))  # noqa: E731
    assert total(compiled(update, *given, donated=(0,))) == pytest.approx(row, abs=8)
    assert total(compiled(update, *given)) == pytest.approx(row + copied, abs=8)
    assert total(walked(update, *given)) == pytest.approx(row + copied, abs=8)
    # what is computed is the program's own, so it may be overwritten, unless it is needed once more
    for fn in (lambda c, *rest: update(c * 2, *rest), lambda c, *rest: (update(d := c * 2, *rest), d)):
        expected = copied + row + (copied if isinstance(fn(*(np.ones((2, 4), np.float32),) * 2, 0), tuple) else 0)
        assert total(walked(fn, *given)) == pytest.approx(expected, abs=8)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fn, times", [(put, 2), (add, 3)])
def test_rows_that_are_scattered(fn, times, dtype):
    """Rows are read and written, and read once more where they are added to what is there."""
    width = WIDTH[dtype]
    given = shape(ROWS, COLUMNS, dtype=dtype), shape(PICKED, COLUMNS, dtype=dtype), shape(PICKED, dtype="int32")
    rows, copied = times * PICKED * COLUMNS * width + 4 * PICKED, 2 * WHOLE * width
    assert sum(num for *_, num in costs(walked(fn, *given))) == rows + copied
    (event,) = costs(compiled(fn, *given, donated=(0,)))
    assert event[1] == dtype and event[0].startswith("scatter")
    assert rows * 0.99 <= event[2] <= 5 * PICKED * COLUMNS * width + 64 * PICKED  # older XLAs write a loop over rows
    if dtype == "float32":  # a loop for bfloat16 gets a converted cache, which is no copy
        assert sum(num for *_, num in costs(compiled(fn, *given))) == copied + event[2]
    own = [num for op, _, num in costs(walked(lambda c, *rest: fn(c * 2, *rest), *given)) if op.startswith("scatter")]
    assert own == [rows]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_cache_that_a_loop_carries(dtype):
    """Each iteration writes one row; before the first, the cache that the caller keeps is copied."""
    width, times = WIDTH[dtype], 5
    given = shape(ROWS, COLUMNS, dtype=dtype), shape(1, COLUMNS, dtype=dtype)
    fn = lambda c, row: lax.fori_loop(0, times, lambda n, c: update(c, jnp.tanh(row), n), c)  # noqa: E731
    for found, copied in (
        (compiled(fn, *given, donated=(0,)), 0),
        (compiled(fn, *given), 2 * WHOLE * width),
        (walked(fn, *given), 2 * WHOLE * width),
    ):
        total = sum(num for *_, num in costs(found))
        assert 0 <= total - copied <= times * 4 * COLUMNS * width + 64 * times


def test_what_each_iteration_updates_anew_is_copied_by_each():
    given, times = (shape(64, 32), shape(1, 32)), 5

    def program(x, row):
        table = jnp.tanh(x)
        return lax.fori_loop(0, times, lambda n, total: total + update(table, row, n)[n], row[0])

    found = walked(program, *given)
    updates = [e.bytes for e in found.events if e.op == "dynamic_update_slice"]
    assert updates == [2 * 64 * 32 * 4 + 2 * 32 * 4] * times


def test_the_gradient_of_an_embedding_writes_the_table_once():
    """Zeros, to which the rows are added."""
    table, ids = shape(ROWS, COLUMNS), shape(PICKED, dtype="int32")
    step = jax.grad(lambda e, i: (e[i] * 3).sum())
    expected = WHOLE * 4 + 3 * PICKED * COLUMNS * 4 + 4 * PICKED
    for found in (compiled(step, table, ids), walked(step, table, ids)):
        adding = [e for e in costs(found) if e[0].startswith("scatter") or e[2] >= WHOLE * 4]
        total = sum(num for *_, num in adding)
        zeros = 0 if any(num >= WHOLE * 4 for *_, num in adding) else WHOLE * 4  # part of no fusion, they are free
        assert total + zeros == pytest.approx(expected, rel=1e-3)


def test_a_loop_that_xla_makes_of_a_scatter_is_one_operation():
    """As XLA's before 0.10 do for CPUs; each of its iterations would be a launch."""
    given = shape(64, 16), shape(5, 16), shape(5, dtype="int32")
    events = compiled(put, *given, donated=(0,)).events
    assert [e.op for e in events if e.op.startswith("scatter") or e.bytes >= 16 * 4] == ["scatter"]


SCATTERED = """\
HloModule jit_put, is_scheduled=true, input_output_alias={ {}: (0, {}, may-alias) }

%set (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  ROOT %b = f32[] parameter(1)
}

%add (c: f32[], d: f32[]) -> f32[] {
  %c = f32[] parameter(0)
  %d = f32[] parameter(1)
  ROOT %e = f32[] add(%c, %d)
}

%wide (w: TYPE[1024,64]) -> f32[1024,64] {
  %w = TYPE[1024,64]{1,0} parameter(0)
  ROOT %wc = f32[1024,64]{1,0} convert(%w)
}

%narrow (n: f32[1024,64]) -> TYPE[1024,64] {
  %n = f32[1024,64]{1,0} parameter(0)
  ROOT %nc = TYPE[1024,64]{1,0} convert(%n)
}

%wrapped (x: f32[1024,64], y: s32[32,1], z: TYPE[32,64]) -> f32[1024,64] {
  %x = f32[1024,64]{1,0} parameter(0)
  %y = s32[32,1]{1,0} parameter(1)
  %z = TYPE[32,64]{1,0} parameter(2)
  %zc = f32[32,64]{1,0} convert(%z)
  ROOT %sc = f32[1024,64]{1,0} scatter(%x, %y, %zc), update_window_dims={1}, to_apply=%set, metadata={op_name="scatter"}
}

ENTRY %main (p0: TYPE[1024,64], p1: s32[32,1], p2: TYPE[32,64]) -> TYPE[1024,64] {
  %p0 = TYPE[1024,64]{1,0} parameter(0)
  %p1 = s32[32,1]{1,0} parameter(1)
  %p2 = TYPE[32,64]{1,0} parameter(2)
  %f0 = f32[1024,64]{1,0} fusion(%p0), kind=kLoop, calls=%wide
  %f1 = f32[1024,64]{1,0} fusion(%f0, %p1, %p2), kind=kLoop, calls=%wrapped
  ROOT %f2 = TYPE[1024,64]{1,0} fusion(%f1), kind=kLoop, calls=%narrow
}
"""


@pytest.mark.parametrize("seen", ["%p0", "%f0", "%view"])
def test_what_is_needed_after_its_update_is_copied(seen):
    """Whether the array itself is read later, or what it was converted to before, or a view of it."""
    text = SCATTERED.replace("TYPE", "bf16").replace("ROOT %f2", "%f2")
    text = text.replace("  %f1 = ", "  %view = bf16[65536]{0} bitcast(%p0)\n  %f1 = ")
    events = []
    for name in (seen, "%f2"):  # the update is what is read, and then nothing needs the old array
        last = f"  ROOT %neg = bf16[1024,64]{{1,0}} negate({name})\n}}\n"
        events.append(costs(unrolled(Module(text.rstrip()[:-1] + last), Recorder(ONE, "put", "jax"), SHEET)))
    (kept, _), (overwritten, _) = events
    assert kept[:2] == overwritten[:2] == ("scatter", "bfloat16")
    assert kept[2] - overwritten[2] == 2 * 1024 * 64 * 2


BROADCAST = """\
HloModule jit_f, is_scheduled=true

ENTRY %main (p0: bf16[1,64], p1: bf16[64,8]) -> bf16[32,8] {
  %p0 = bf16[1,64]{1,0} parameter(0)
  %p1 = bf16[64,8]{1,0} parameter(1)
  %c0 = f32[1,64]{1,0} convert(%p0)
  %c1 = f32[64,8]{1,0} convert(%p1), metadata={op_name="jit(f)/NAME"}
  %b = f32[32,64]{1,0} broadcast(%c0), dimensions={0,1}
  %t = f32[64,8]{0,1} transpose(%c1), dimensions={0,1}
  %k = f32[64,8]{1,0} copy(%t)
  %d = f32[32,8]{1,0} dot(%b, %k), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %r = bf16[32,8]{1,0} convert(%d)
}
"""


def test_what_is_between_a_convert_and_a_product():
    """As older XLAs write it, without fusions. A convert of the program is one of its operations."""

    def found(name):
        trace = unrolled(Module(BROADCAST.replace("NAME", name)), Recorder(ONE, "f", "jax"), SHEET)
        return [(e.op, e.dtype, e.bytes) for e in trace.events]

    weight, product = 64 * 8, 32 * 64 + 32 * 8
    moved = [("transpose", "bfloat16", 2 * 2 * weight), ("copy", "bfloat16", 2 * 2 * weight)]
    assert found("dot_general") == [*moved, ("dot", "bfloat16", 2 * (product + weight))]
    wide = [(op, "float32", 2 * num_bytes) for op, _, num_bytes in moved]
    converted = ("convert_element_type", "float32", (2 + 4) * weight)
    assert found("convert_element_type") == [converted, *wide, ("dot", "bfloat16", 2 * product + 4 * weight)]


@pytest.mark.parametrize("is_donated", [True, False])
@pytest.mark.parametrize("combine, times", [("set", 2), ("add", 3)])
def test_a_scatter_between_converts(combine, times, is_donated):
    """As XLA 0.10 writes it for CPUs, in bfloat16. What is not donated is copied on GPUs, and not converted."""
    text = SCATTERED.replace("TYPE", "bf16").replace("to_apply=%set", f"to_apply=%{combine}")
    text = text if is_donated else text.replace("input_output_alias={ {}: (0, {}, may-alias) }", "")
    found = unrolled(Module(text), Recorder(ONE, "put", "jax"), SHEET)
    copied = 0 if is_donated else 2 * 1024 * 64 * 2
    assert costs(found) == [("scatter", "bfloat16", times * 32 * 64 * 2 + 32 * 4 + copied)]


# What the CPU's compiler never writes: several results of one fusion, of which one is updated in place; a table that
# is read by rows and also as a whole.
TEXT = """\
HloModule jit_step, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias) }, num_partitions=1

%fused (q0: bf16[1024,64], q1: bf16[1,64], q2: s32[], q3: bf16[512,64], q4: s32[32]) -> (bf16[1024,64], bf16[32,64]) {
  %q0 = bf16[1024,64]{1,0} parameter(0)
  %q1 = bf16[1,64]{1,0} parameter(1)
  %q2 = s32[] parameter(2)
  %q3 = bf16[512,64]{1,0} parameter(3)
  %q4 = s32[32]{0} parameter(4)
  %zero = s32[] constant(0)
  %u = bf16[1024,64]{1,0} dynamic-update-slice(%q0, %q1, %q2, %zero)
  %b = s32[32,1]{1,0} bitcast(%q4)
  %g = bf16[32,64]{1,0} gather(%q3, %b), offset_dims={1}, collapsed_slice_dims={0}, slice_sizes={1,64}
  ROOT %t = (bf16[1024,64]{1,0}, bf16[32,64]{1,0}) tuple(%u, %g)
}

%both (r0: bf16[512,64], r1: s32[32]) -> bf16[512,64] {
  %r0 = bf16[512,64]{1,0} parameter(0)
  %r1 = s32[32]{0} parameter(1)
  %s = bf16[1,64]{1,0} dynamic-slice(%r0, %r1, %r1), dynamic_slice_sizes={1,64}
  %w = bf16[512,64]{1,0} broadcast(%s), dimensions={0,1}
  ROOT %m = bf16[512,64]{1,0} multiply(%r0, %w)
}

ENTRY %main (p0: bf16[1024,64], p1: bf16[1,64], p2: s32[], p3: bf16[512,64], p4: s32[32]) -> (bf16[1024,64]) {
  %p0 = bf16[1024,64]{1,0} parameter(0)
  %p1 = bf16[1,64]{1,0} parameter(1)
  %p2 = s32[] parameter(2)
  %p3 = bf16[512,64]{1,0} parameter(3)
  %p4 = s32[32]{0} parameter(4)
  %f = (bf16[1024,64]{1,0}, bf16[32,64]{1,0}) fusion(%p0, %p1, %p2, %p3, %p4), kind=kLoop, calls=%fused
  %c = bf16[1024,64]{1,0} get-tuple-element(%f), index=0
  %d = bf16[512,64]{1,0} fusion(%p3, %p4), kind=kLoop, calls=%both
  %mm = bf16[512,512]{1,0} custom-call(%d, %d), custom_call_target="__cublas$gemm"
  ROOT %r = (bf16[1024,64]{1,0}) tuple(%c)
}
"""


def test_fusions_of_other_compilers():
    found = unrolled(Module(TEXT), Recorder(ONE, "step", "jax"), SHEET)
    events = [e for e in found.events if e.kind == "compute"]
    row, rows, table = 64 * 2, 32 * 64 * 2, 512 * 64 * 2
    assert [e.bytes for e in events] == [2 * row + 4 + 2 * rows + 32 * 4, 2 * table + 32 * 4, 2 * table + 512 * 512 * 2]
    kept = TEXT.replace("input_output_alias={ {0}: (0, {}, may-alias) }, ", "")
    again = unrolled(Module(kept), Recorder(ONE, "step", "jax"), SHEET)
    assert next(e.bytes for e in again.events) == events[0].bytes + 2 * 1024 * 64 * 2
