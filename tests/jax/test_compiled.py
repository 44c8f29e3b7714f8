"""`collectives_in`: what XLA made of a program, and the text it is read from."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import tplab.jax as lab  # before JAX is used
from tplab import Mesh, P
from tplab.jax import collectives_in
from tplab.jax.ranks.devices import jax_mesh
from tplab.jax.tracing.compiled import CompiledCollective, collectives_in_text, temporary_bytes

GRID = Mesh(dp=2, tp=4)


def test_a_ranks_program():
    """The arguments are those of run. Ranks are numbered as in the mesh; a loop of known length is counted out."""

    def program(x):
        x = jax.lax.fori_loop(0, 5, lambda _, x: lab.ring_shift(x, "tp"), lab.copy_to(x, ("dp", "tp")))
        gathered = lab.all_gather(x, "dp")
        return lab.all_reduce(x, "tp"), gathered, lab.reduce_scatter(gathered, ("dp", "tp")), lab.all_to_all(x, "tp")

    found = collectives_in(program, GRID, np.ones((16, 4), np.float32))
    rows, columns = ((0, 1, 2, 3), (4, 5, 6, 7)), ((0, 4), (1, 5), (2, 6), (3, 7))
    ring = tuple((rank, GRID.neighbor(rank, "tp")) for rank in GRID.ranks)
    assert sorted((c.op, c.shape, c.dtype, c.bytes, c.groups, c.count, c.is_async) for c in found) == [
        ("all_gather", (32, 4), "float32", 256, columns, 1, False),
        ("all_reduce", (16, 4), "float32", 2 * 3 * 256 // 4, rows, 1, False),
        ("all_to_all", (4, 4, 4), "float32", 3 * 256 // 4, rows, 1, False),
        ("ppermute", (16, 4), "float32", 256, ring, 5, False),
        ("reduce_scatter", (4, 4), "float32", 7 * 512 // 8, (tuple(range(8)),), 1, False),
    ]
    (hop,) = [c for c in found if c.op == "ppermute"]
    assert hop.origin.startswith("jit(program)/")
    assert str(hop) == "5 x ppermute float32[16, 4], 256 bytes, ranks 0->1 1->2 2->3 3->0 4->5 5->6 6->7 7->4"
    assert len(repr(found).splitlines()) == 5


def test_what_jit_inserted():
    """Nobody wrote an all_reduce: a product over a dim that is sharded on both sides needs one."""
    mesh = jax_mesh(GRID)
    x = jax.device_put(np.ones((16, 4), np.float32), NamedSharding(mesh, PartitionSpec("dp", "tp")))
    w = jax.device_put(np.ones((4, 8), np.float32), NamedSharding(mesh, PartitionSpec("tp")))
    layer = lambda x, w: jnp.tanh(x @ w)  # noqa: E731
    for fn in (layer, jax.jit(layer)):
        (collective,) = collectives_in(fn, x, w)
        assert (collective.op, collective.shape, collective.count) == ("all_reduce", (8, 8), 1)
        assert collective.groups == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert repr(collectives_in(layer, np.ones((2, 2)), np.ones((2, 2)))) == "no collectives"


def test_the_memory_of_a_ranks_program():
    """A backward pass keeps what each layer computed; each rank has its part of it."""
    x, one = np.ones((64, 64), np.float32), 64 * 64 * 4

    def gradient(num_layers):
        def loss(x):
            for _ in range(num_layers):
                x = jnp.tanh(x @ x.T) @ x
            return x.sum()

        return jax.grad(loss)

    few, many = (temporary_bytes(gradient(n), Mesh(tp=2), x) for n in (2, 12))
    assert many - few >= 10 * 2 * one  # tanh's result and the input, of ten layers more
    assert temporary_bytes(gradient(12), Mesh(tp=2), x, in_specs=P("tp")) < many
    assert temporary_bytes(jax.jit(gradient(12)), x) == pytest.approx(many, rel=0.2)


def test_a_loop_of_unknown_length():
    def program(x):
        return jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: lab.all_reduce(x, "tp"), x)

    (collective,) = collectives_in(program, Mesh(tp=2), np.ones(2), out_specs=P())
    assert collective.count is None
    assert str(collective).startswith("in a loop all_reduce float32[2]")


def test_a_condition_runs_once_more_than_its_loop_and_a_branch_perhaps_not_at_all():
    def program(x):
        def body(n, x):
            return jax.lax.cond(lab.all_reduce(x, "tp").sum() > n, lambda x: lab.all_reduce(x, "tp"), jnp.sin, x)

        x = jax.lax.fori_loop(0, 4, body, x)
        return jax.lax.while_loop(lambda x: lab.all_reduce(x[:3], "tp").sum() < 9, lambda x: x + 1, x)

    found = collectives_in(program, Mesh(tp=2), np.ones(4, np.float32))
    assert sorted((c.shape, c.count or -1, c.at_most or -1, str(c).split(" all")[0]) for c in found) == [
        ((3,), -1, -1, "in a loop"), ((4,), -1, 4, "at most 4 x"), ((4,), 4, 4, "4 x"),
    ]  # fmt: skip


# What the CPU's compiler never writes, as those for GPUs and TPUs do.
TEXT = """\
HloModule jit_step, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  ROOT %sum = f32[] add(%a, %b)
}

%async_computation (p: bf16[64,8]) -> bf16[8,8] {
  %p = bf16[64,8]{1,0} parameter(0)
  ROOT %rs = bf16[8,8]{1,0} reduce-scatter(%p), channel_id=3, replica_groups=[1,8]<=[8], dimensions={0}, to_apply=%add
}

%body (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %x = f32[4]{0} get-tuple-element(%p), index=1
  %inner = (s32[], f32[4]{0}) while(%p), condition=%cond, body=%inner_body, \
backend_config={"known_trip_count":{"n":"3"}}
  ROOT %t = (s32[], f32[4]{0}) tuple(%i, %x)
}

%inner_body (p.1: (s32[], f32[4])) -> (s32[], f32[4]) {
  %y = f32[4]{0} all-reduce(%x), replica_groups={}, to_apply=%add
}

%cond (p.3: (s32[], f32[4])) -> pred[] {
  %v = u8[3]{0} all-reduce(%x), replica_groups={}, to_apply=%add
}

%branch (p.2: f32[2]) -> f32[2] {
  %z = f32[2]{0} collective-broadcast(%p.2), replica_groups={{0,1,2,3},{4,5,6,7}}
}

ENTRY %main (p0: f32[16,4], p1: bf16[64,8]) -> f32[16,4] {
  %s = (f32[16,4]{1,0}, f32[16,4]{1,0:T(8,128)}, u32[], u32[]) collective-permute-start(%p0), \
source_target_pairs={{0,1},{1,0}}, metadata={op_name="jit(step)/shift"}
  %d = f32[16,4]{1,0} collective-permute-done(%s)
  %gs = (f32[2,4]{1,0}, f32[8,4]{1,0}) all-gather-start(%p2), replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}
  %gd = f32[8,4]{1,0} all-gather-done(%gs)
  %as = (f8e4m3fn[16]{0}, pred[5]{0}) all-reduce-start(%p3, %p4), \
replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add
  %ad = (f8e4m3fn[16]{0}, pred[5]{0}) all-reduce-done(%as)
  %rs = ((bf16[64,8]{1,0}), bf16[8,8]{1,0}, s32[]) async-start(%p1), calls=%async_computation
  %rd = bf16[8,8]{1,0} async-done(%rs)
  %w = (s32[], f32[4]{0}) while(%init), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"2"}}
  %c = f32[2]{0} conditional(%i, %p5, %p5), branch_computations={%branch, %add}
  ROOT %r = f32[16,4]{1,0} copy(%d)
}
"""


def test_the_text_of_other_compilers():
    everyone, pairs = (tuple(range(8)),), ((0, 1), (2, 3), (4, 5), (6, 7))
    odd_and_even = ((0, 2, 4, 6), (1, 3, 5, 7))
    assert list(collectives_in_text(TEXT)) == [
        CompiledCollective("ppermute", (16, 4), "float32", 256, ((0, 1), (1, 0)), 1, 1, True, "jit(step)/shift"),
        CompiledCollective("all_gather", (8, 4), "float32", 3 * 32, odd_and_even, 1, 1, True, ""),
        CompiledCollective("all_reduce", (16,), "float8_e4m3fn", 16, pairs, 1, 1, True, ""),
        CompiledCollective("all_reduce", (5,), "bool", 5, pairs, 1, 1, True, ""),
        CompiledCollective("reduce_scatter", (8, 8), "bfloat16", 7 * 128, everyone, 1, 1, True, ""),
        CompiledCollective("all_reduce", (3,), "uint8", 6, everyone, 3, 3, False, ""),
        CompiledCollective("all_reduce", (3,), "uint8", 6, everyone, 8, 8, False, ""),
        CompiledCollective("all_reduce", (4,), "float32", 32, everyone, 6, 6, False, ""),
        CompiledCollective("broadcast", (2,), "float32", 8, ((0, 1, 2, 3), (4, 5, 6, 7)), None, 1, False, ""),
    ]


@pytest.mark.parametrize(
    "name, dtype",
    [
        ("f32", "float32"),
        ("bf16", "bfloat16"),
        ("s8", "int8"),
        ("u64", "uint64"),
        ("c64", "complex64"),
        ("pred", "bool"),
        ("f8e5m2", "float8_e5m2"),
    ],
)
def test_names_of_types(name, dtype):
    line = f"  %x = {name}[3]{{0}} all-reduce(%p), replica_groups={{{{0,1}}}}"
    (found,) = collectives_in_text(f"ENTRY %m (p: f32[]) -> f32[] {{\n{line}\n}}")
    assert (found.dtype, found.shape) == (dtype, (3,))
