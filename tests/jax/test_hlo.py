"""The text of a compiled module: every way to write groups of ranks, and what CPUs never write."""

import pytest

import tplab.jax  # noqa: F401  # before JAX is used
from tplab import Mesh
from tplab.cost import Chip, Cluster, Link
from tplab.errors import TraceError
from tplab.jax.tracing.compiled import collectives_in_text
from tplab.jax.tracing.flow import axes_along
from tplab.jax.tracing.hlo import Array, Module
from tplab.jax.tracing.sending import Carried, merged
from tplab.jax.tracing.unroll import unrolled
from tplab.trace.recorder import Recorder

TOY = Cluster("toy", Chip("counter", {"float32": 1.0, "bfloat16": 1.0}, 1e9, 1e9), Link("wire", 0.0, 1.0))


def one_collective(groups, op="all-reduce"):
    line = f"  %x = f32[8]{{0}} {op}(%p), channel_id=1, {groups}, use_global_device_ids=true, to_apply=%add"
    return f"HloModule m, num_partitions=8\n\nENTRY %m (p: f32[8]) -> f32[8] {{\n{line}\n}}"


@pytest.mark.parametrize(
    "written, groups",
    [
        ("replica_groups={{0,2},{1,3},{4,6},{5,7}}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("replica_groups={}", (tuple(range(8)),)),
        ("replica_groups=[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("replica_groups=[4,2]<=[2,2,2]T(0,2,1)", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("replica_groups=mesh['a'=2,'b'=4] {'b'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("replica_groups=mesh['a'=2,'b'=4] {'a'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("replica_groups=mesh['a'=2,'b'=4] {'b','a'}", ((0, 4, 1, 5, 2, 6, 3, 7),)),
        ("replica_groups=mesh['a'=2,'one'=1,'b'=4] {'one'}", tuple((rank,) for rank in range(8))),
        ("replica_groups=mesh['a'=2,'b'=4] {'b':(1)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("replica_groups=mesh['a'=8] {'a':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("replica_groups=mesh['a'=8] {'a':(4)2,'a':(1)2}", ((0, 4, 1, 5), (2, 6, 3, 7))),
        ("replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("replica_groups=mesh['a'=4,'b'=2], device_ids=([2,2,2]T(0,2,1)) {'a':(2)2}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("replica_groups=mesh['a'=2,'b'=4], device_ids=(7,6,5,4,3,2,1,0) {'b'}", ((7, 6, 5, 4), (3, 2, 1, 0))),
    ],
)
def test_groups(written, groups):
    module = Module(one_collective(written))
    assert module.groups(module.computations["m"][0]) == groups


def test_a_group_of_replicas_has_all_partitions():
    text = one_collective("replica_groups={{0}}").replace(", use_global_device_ids=true", "")
    module = Module(text)
    assert module.groups(module.computations["m"][0]) == (tuple(range(8)),)


def test_the_list_of_collectives_knows_groups_by_axes():
    """They were taken for all the ranks together, which sends more."""
    (found,) = collectives_in_text(one_collective("replica_groups=mesh['a'=4,'b'=2] {'b'}"))
    assert (found.bytes, found.groups[0]) == (2 * 1 * 32 // 2, (0, 1))


def test_other_groups_are_refused():
    with pytest.raises(TraceError, match=r"the groups of x in a way that tplab does not know: torus<2,4>"):
        collectives_in_text(one_collective("replica_groups=torus<2,4>"))


@pytest.mark.parametrize(
    "groups, axis, first",
    [
        (((0, 1, 2, 3), (4, 5, 6, 7)), "tp", (0, 1, 2, 3)),
        (((3, 2, 1, 0), (7, 6, 5, 4)), "tp", (0, 1, 2, 3)),  # in the mesh's order
        (((0, 4), (1, 5), (2, 6), (3, 7)), "dp", (0, 4)),
        ((tuple(range(8)),), "dp,tp", tuple(range(8))),
        (((0, 2), (1, 3), (4, 6), (5, 7)), "tp", (0, 2)),  # half of the ranks along it
        (((0, 5), (1, 4), (2, 7), (3, 6)), "dp,tp", (0, 5)),
        (tuple((rank,) for rank in range(8)), "", None),
    ],
)
def test_the_axes_of_groups(groups, axis, first):
    found, along = axes_along(Mesh(dp=2, tp=4), groups)
    assert found == axis
    assert first is None or along[0] == first


# What the CPU's compiler never writes, as those for GPUs and TPUs do.
TEXT = """\
HloModule jit_step, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%async (p: bf16[8,4]) -> bf16[2,4] {
  %p = bf16[8,4]{1,0} parameter(0)
  ROOT %rs = bf16[2,4]{1,0} reduce-scatter(%p), replica_groups=[1,4]<=[4], dimensions={0}, to_apply=%add
}

%fused (q: f32[4,8]) -> f32[4,8] {
  %q = f32[4,8]{1,0} parameter(0)
  ROOT %inner = f32[4,8]{1,0} all-reduce(%q), replica_groups={{0,3},{1,2}}, to_apply=%add
}

ENTRY %main (p0: f32[4,8], p1: bf16[8,4]) -> (f32[4,8], bf16[2,4]) {
  %p0 = f32[4,8]{1,0} parameter(0)
  %p1 = bf16[8,4]{1,0} parameter(1)
  %s = (f32[4,8]{1,0}, f32[4,8]{1,0:T(8,128)}, u32[], u32[]) collective-permute-start(%p0), \
source_target_pairs={{0,1},{1,0},{2,3},{3,3}}, metadata={op_name="jit(step)/shift" source_file="/a/b.py" source_line=7}
  %mm = f32[4,4]{1,0} custom-call(%p0, %p0), custom_call_target="__cublas$gemm", metadata={op_name="jit(step)/dot"}
  %d = f32[4,8]{1,0} collective-permute-done(%s)
  %rs = ((bf16[8,4]{1,0}), bf16[2,4]{1,0}, s32[]) async-start(%p1), calls=%async
  %rd = bf16[2,4]{1,0} async-done(%rs)
  %g = ((bf16[2,4]{1,0}), bf16[8,4]{1,0}, s32[]) all-gather-start(%rd), replica_groups={{0,1},{2,3}}, dimensions={0}
  %gd = bf16[8,4]{1,0} all-gather-done(%g)
  %odd = f32[4,8]{1,0} fusion(%d), kind=kCustom, calls=%fused
  %t = ((f32[4,8]{1,0}), f32[4,8]{1,0}, s32[]) all-to-all-start(%odd), replica_groups={}, dimensions={0}
  %td = f32[4,8]{1,0} all-to-all-done(%t)
  %c = f32[4,8]{1,0} collective-broadcast(%td), replica_groups={{0,1},{2,3}}
  ROOT %r = (f32[4,8]{1,0}, bf16[2,4]{1,0}) tuple(%c, %rd)
}
"""


def test_the_text_of_other_compilers():
    """A product beside a message that has been started; a collective in a fusion; groups that are no whole axis."""
    found = unrolled(Module(TEXT), Recorder(Mesh(dp=2, tp=2), "step", "jax"), TOY)
    of_rank = found.select(rank=0)
    (product,) = of_rank.select(kind="compute").events
    assert (product.op, product.flops, product.start) == ("dot", 2 * 4 * 4 * 8, 0)
    (message,) = of_rank.select(kind="send").events
    assert (message.peer, message.axis, message.bytes, message.where, message.start) == (1, "tp", 128, "b.py:7", 0)
    by_op = {e.op: e for e in of_rank.select(kind="collective").events}
    assert {op: (e.axis, e.group, e.shape, e.dtype, e.bytes) for op, e in by_op.items()} == {
        "reduce_scatter": ("dp,tp", (0, 1, 2, 3), (8, 4), "bfloat16", 3 * 64 // 4),
        "all_gather": ("tp", (0, 1), (2, 4), "bfloat16", 16),
        "all_reduce": ("dp,tp", (0, 3), (4, 8), "float32", 2 * 128 // 2),
        "all_to_all": ("dp,tp", (0, 1, 2, 3), (4, 8), "float32", 3 * 128 // 4),
        "broadcast": ("tp", (0, 1), (4, 8), "float32", 128),
    }
    assert by_op["all_gather"].start >= by_op["reduce_scatter"].end
    assert by_op["broadcast"].start >= by_op["all_to_all"].end >= by_op["all_reduce"].end >= message.end
    lasting = found.select(rank=3, kind="send")
    assert len(lasting) == 0  # to itself


def test_what_is_sent_together():
    """One message per operation and dtype."""
    wide, narrow = Array("float32", (4, 2)), Array("bfloat16", (3,))
    given = [("all_reduce", wide), ("all_reduce", narrow), ("all_reduce", wide), ("reduce_scatter", wide)]
    assert list(merged(Carried(*each) for each in given)) == [
        ("all_reduce", Array("float32", (16,))), ("all_reduce", narrow), ("reduce_scatter", wide),
    ]  # fmt: skip


def test_numbers_that_share_a_byte():
    """Layouts with E(4) have two numbers in a byte; without, XLA gives each number a byte of its own."""
    packed = TEXT.replace("bf16[8,4]{1,0}", "s4[8,4]{1,0:T(8,128)E(4)}").replace("bf16[2,4]{1,0}", "s4[2,4]{1,0:E(4)}")
    plain = TEXT.replace("bf16", "s4")
    for text, per_byte in ((packed, 2), (plain, 1)):
        found = unrolled(Module(text), Recorder(Mesh(dp=2, tp=2), "step", "jax"), TOY).select(rank=0, kind="collective")
        sent = {e.op: (e.bytes, e.shape, e.dtype) for e in found.events}
        assert sent["reduce_scatter"] == (3 * 32 // 4 // per_byte, (8, 4), "int4")
        assert sent["all_gather"] == (8 // per_byte, (2, 4), "int4")
        listed = {one.op: one.bytes for one in collectives_in_text(text)}
        assert (listed["reduce_scatter"], listed["all_gather"]) == (3 * 8 // per_byte, 16 // per_byte)
    assert Array("int4", (5,), 4).num_bytes == 3


def test_half_a_message_is_refused():
    text = TEXT.replace("custom-call(%p0, %p0), custom_call_target", "send(%p0, %p0), channel_id=1, a")
    with pytest.raises(TraceError, match="one half of a message"):
        unrolled(Module(text), Recorder(Mesh(tp=4)))


def test_lines_are_the_users():
    """Of the frames the innermost that is in no installed package."""
    head = "\n".join(
        [
            "HloModule m, num_partitions=2",
            "",
            "FileNames",
            '1 "/somewhere/train.py"',
            '2 "/venv/lib/python3.12/site-packages/flax/linear.py"',
            "",
            "FileLocations",
            "1 {file_name_id=1 function_name_id=1 line=3 column=1}",
            "2 {file_name_id=1 function_name_id=1 line=9 column=1}",
            "3 {file_name_id=2 function_name_id=1 line=400}",
            "",
            "StackFrames",
            "1 {file_location_id=1 parent_frame_id=1}",
            "2 {file_location_id=2 parent_frame_id=2}",
            "3 {file_location_id=3 parent_frame_id=3}",
            "",
            "",
        ]
    )
    line = '  %x = f32[8]{0} all-reduce(%p), replica_groups={}, metadata={op_name="a" stack_frame_id=3}'
    for shift in (
        head,
        head.replace("parent_frame_id=1", "parent_frame_id=0")
        .replace("parent_frame_id=2", "parent_frame_id=1")
        .replace("parent_frame_id=3", "parent_frame_id=2"),
    ):
        module = Module(f"{shift}ENTRY %m (p: f32[8]) -> f32[8] {{\n{line}\n}}")
        assert module.where(module.computations["m"][0]) == "train.py:9"


def test_numbers_of_ranks():
    assert Module("HloModule m, replica_count=4\n").num_ranks == 4
    assert Module("HloModule m\n").num_ranks == 1
    assert Module("HloModule m, num_partitions=8, replica_count=1\n").num_ranks == 8
