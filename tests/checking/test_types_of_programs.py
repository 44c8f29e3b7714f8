"""run(types=True): the type of each tensor at each line, the same in torch and JAX, and what types forbid."""

import jax
import numpy as np
import pytest

from tests.frameworks import FRAMEWORKS, Framework
from tplab import Mesh, P
from tplab.checking.steps import reshaped
from tplab.checking.types import Type
from tplab.trace import Trace
from tplab.widgets import timeline
from tplab.widgets.paper.wire import unpack

RANKS = [2, 3, 4]
X, A, B, BIAS = P(), P(None, "tp"), P("tp", None), P()


@pytest.fixture(params=FRAMEWORKS)
def fw(request) -> Framework:
    return FRAMEWORKS[request.param]()


def tanh(fw):
    """The framework's own, so that no line of ours is between."""
    import jax
    import torch

    return torch.tanh if fw.name == "torch" else jax.numpy.tanh


def arrays(fw, *shapes):
    draw = np.random.default_rng(0)
    return [fw.array(draw.standard_normal(shape).astype(np.float32)) for shape in shapes]


def types_of(fw, program, mesh, shapes, specs):
    return fw.lab.run(program, mesh, *arrays(fw, *shapes), in_specs=specs, types=True).types


def column_and_row(fw):
    def program(x, a, b, bias):
        h = tanh(fw)(fw.lab.copy_to(x, "tp") @ a)
        y = h @ b
        z = fw.lab.all_reduce(y, "tp")
        return z + bias

    return program, Mesh(tp=2), [(4, 6), (6, 8), (8, 6), (6,)], (X, A, B, BIAS)


def sequence(fw):
    def program(x, a, b):
        whole = fw.lab.all_gather(x, "tp", 1)
        heads = (whole @ a).reshape(4, 6, 4, 2)
        h = tanh(fw)(heads).reshape(4, 6, 8)
        y = h @ b
        piece = fw.lab.reduce_scatter(y, "tp", 1)
        return fw.lab.gather_from(piece, "tp", 1)

    return program, Mesh(tp=2), [(4, 6, 3), (3, 16), (16, 3)], (P(None, "tp"), A, B)


def two_axes(fw):
    def program(x, a, b):
        h = tanh(fw)(x @ a)
        y = fw.lab.all_reduce(h @ b, "tp")
        loss = (y * y).mean()
        return fw.lab.all_reduce(loss, "dp", "mean")

    return program, Mesh(dp=2, tp=3), [(4, 6), (6, 9), (9, 2)], (P("dp"), A, B)


def root(fw):
    def program(x, a, b):
        piece = fw.lab.scatter(x, "tp", 1, 1)
        y = piece @ fw.lab.scatter(a, "tp", 1, 0)
        total = fw.lab.reduce(y, "tp", 1)
        whole = fw.lab.gather(piece, "tp", 0, 1)
        return fw.lab.broadcast(total, "tp", 1) + fw.lab.broadcast(whole, "tp") @ b

    return program, Mesh(tp=2), [(4, 6), (6, 8), (6, 8)], (X, X, X)


PROGRAMS = [column_and_row, sequence, two_axes, root]


def text_of(fw, made):
    program, mesh, shapes, specs = made(fw)
    return str(types_of(fw, program, mesh, shapes, specs))


@pytest.mark.parametrize("made", PROGRAMS)
def test_the_same_text_in_both_frameworks(made):
    texts = [text_of(FRAMEWORKS[name](), made) for name in FRAMEWORKS]
    assert texts[0] == texts[1]
    assert texts[0].endswith("no faults")


def test_what_a_root_gets_differs_and_what_it_gives_is_cut(fw):
    program, mesh, shapes, specs = root(fw)
    types = types_of(fw, program, mesh, shapes, specs)
    assert [str(types.of(name).types["tp"]) for name in ("piece", "y", "total", "whole")] == ["V(1)", "P", "V", "V"]


def test_the_text():
    text = text_of(FRAMEWORKS["torch"](), column_and_row)
    rows = {line[6:].rpartition("   ")[0].strip(): line.rpartition("   ")[2] for line in text.splitlines()[1:]}
    assert rows["def program(x, a, b, bias):"] == "x [4, 6]  tp: I"
    assert rows['h = tanh(fw)(fw.lab.copy_to(x, "tp") @ a)'] == "h [4, 4]  tp: V(1)"
    assert rows["return z + bias"] == "[4, 6]  tp: I"
    assert "y [4, 6]  tp: P\n" in text and "z [4, 6]  tp: I\n" in text and "a [6, 4]  tp: V(1)\n" in text


def test_an_axis_with_one_rank_has_no_types(fw):
    program, _, shapes, specs = two_axes(fw)
    types = types_of(fw, program, Mesh(dp=1, tp=3), shapes, specs)
    assert set(types.of("loss").types) == {"tp"} and not types.faults
    alone = types_of(fw, program, Mesh(dp=1, tp=1), shapes, specs)
    assert not alone.faults and str(alone).endswith("no faults")


@pytest.mark.parametrize("num_ranks", RANKS)
def test_types_of_a_sequence_that_is_cut(fw, num_ranks):
    """Cuts survive reshapes that merge dims and split them again."""

    def program(x, w):
        y = x.reshape(-1, 3) @ w
        z = y.reshape(2, 4, 5)
        return tanh(fw)(z)

    types = types_of(fw, program, Mesh(tp=num_ranks), [(2, 4 * num_ranks, 3), (3, 5)], (P(None, "tp"), P()))
    assert str(types.of("y").types["tp"]) == "V(0)"
    assert str(types.of("z").types["tp"]) == "V(1)"
    assert not types.faults


FAULTS = {
    "tanh": (lambda fw, x, a, b, bias: fw.lab.all_reduce(tanh(fw)(x @ a @ b), "tp"), "not linear"),
    "bias": (lambda fw, x, a, b, bias: fw.lab.all_reduce(x @ a @ b + bias, "tp"), "count once for each"),
    "number": (lambda fw, x, a, b, bias: fw.lab.all_reduce(x @ a @ b + 1, "tp"), "count once for each"),
    "square": (lambda fw, x, a, b, bias: (lambda y: fw.lab.all_reduce(y * y, "tp"))(x @ a @ b), "partial"),
    "mean of a sum": (lambda fw, x, a, b, bias: fw.lab.all_reduce(x @ a @ b, "tp", "mean"), "1/R"),
    "sum of means": (lambda fw, x, a, b, bias: fw.lab.all_reduce((x @ a).mean(), "tp"), "R times the mean"),
    "twice": (lambda fw, x, a, b, bias: fw.lab.all_reduce(fw.lab.all_reduce(x @ a @ b, "tp"), "tp"), "R times that"),
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("num_ranks", RANKS)
def test_what_a_type_forbids_is_named_at_its_line(fw, name, num_ranks):
    wrong, words = FAULTS[name]
    shapes = [(4, 6), (6, 12), (12, 6), (6,)]
    types = types_of(fw, lambda *xs: wrong(fw, *xs), Mesh(tp=num_ranks), shapes, (X, A, B, BIAS))
    (fault,) = types.faults
    assert words in fault.words and fault.axis == "tp" and fault.way_out
    assert fault.where == f"{__file__.rpartition('/')[2]}:{wrong.__code__.co_firstlineno}"


RIGHT = {
    "bias after": lambda fw, x, a, b, bias: tanh(fw)(fw.lab.all_reduce(x @ a @ b, "tp") + bias),
    "scaled": lambda fw, x, a, b, bias: fw.lab.all_reduce(2 * (x @ a @ b) / 3, "tp"),
    "divided by hand": lambda fw, x, a, b, bias: fw.lab.all_reduce((x @ a).sum() / 7, "tp", "mean"),
    "a mean of means": lambda fw, x, a, b, bias: fw.lab.all_reduce((x @ a).mean(), "tp", "mean"),
    "a share each": lambda fw, x, a, b, bias: fw.lab.all_reduce((x @ a).mean() / 5, "tp"),
    "zeros": lambda fw, x, a, b, bias: fw.lab.all_reduce(x @ a @ b + 0, "tp"),
    "a mean by hand": lambda fw, x, a, b, bias: fw.lab.all_reduce((x @ a).mean(), "tp") / 3,
    "largest": lambda fw, x, a, b, bias: tanh(fw)(fw.lab.all_reduce((x @ a).max(), "tp", "max")),
    "a counter": lambda fw, x, a, b, bias: fw.lab.all_reduce(fw.array(np.ones(1, np.float32)), "tp"),
    "around a ring": lambda fw, x, a, b, bias: tanh(fw)(fw.lab.ring_all_reduce(x @ a @ b, "tp")),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_has_no_fault(fw, name):
    shapes = [(4, 6), (6, 12), (12, 6), (6,)]
    assert not types_of(fw, lambda *xs: RIGHT[name](fw, *xs), Mesh(tp=3), shapes, (X, A, B, BIAS)).faults


# ------------------------------------------------------------------------------------------------------ torch only


def torch_types(program, mesh, shapes, specs):
    torch = FRAMEWORKS["torch"]()
    given = [x.requires_grad_() for x in arrays(torch, *shapes)]
    return torch.lab.run(program, mesh, *given, in_specs=specs, types=True).types


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("is_right", [True, False])
def test_a_gradient_that_nobody_adds_up(num_ranks, is_right):
    """In JAX this cannot be: the types add up the gradient of what is invariant."""
    from tplab.torch import (
        all_reduce,
        average_gradients,  # noqa: F401
    )

    def program(x, w):
        loss = (x @ w).tanh().mean()
        loss.backward()
        if is_right:
            w.grad = all_reduce(w.grad, "dp", "mean")

    types = torch_types(program, Mesh(dp=num_ranks), [(12, 6), (6, 2)], (P("dp"), P()))
    assert len(types.faults) == (not is_right)
    for fault in types.faults:
        assert (fault.op, fault.axis) == ("gradient", "dp") and fault.words.startswith("w is the same")
    assert str({one.name: one for one in types.gradients}["w"].types["dp"]) == ("I" if is_right else "P")


@pytest.mark.parametrize("is_right", [True, False])
def test_a_copy_to_that_is_missing(is_right):
    from tplab.torch import all_reduce, copy_to

    def program(x, w, a, b):
        y = all_reduce(x @ w, "tp")
        h = (copy_to(y, "tp") if is_right else y) @ a
        z = all_reduce(h.tanh() @ b, "tp")
        (z * z).sum().backward()

    specs = (P(None, "tp"), B, A, B)
    types = torch_types(program, Mesh(tp=2), [(4, 6), (6, 6), (6, 8), (8, 6)], specs)
    assert len(types.faults) == (not is_right)
    for fault in types.faults:
        line = program.__code__.co_firstlineno + 1
        assert fault.where.endswith(f":{line}") and "copy_to" in fault.way_out


def test_what_looks_the_same_by_chance_is_not_replicated():
    """Ones are the same on all ranks, whatever they will be later: only a second run with other numbers tells."""
    import torch

    from tplab.torch import ring_shift, run

    def program(x, y):
        return ring_shift(x, "tp"), ring_shift(y, "tp") - ring_shift(y, "tp")

    specs = (P("tp"), P("tp"))
    types = run(program, Mesh(tp=2), torch.ones(4), torch.zeros(4), in_specs=specs, types=True).types
    assert [str(one.types["tp"]) for one in types.results] == ["V", "V"]


def test_what_types_cannot_be_asked_for(fw):
    with pytest.raises(ValueError, match="give types=True"):
        _ = fw.lab.run(lambda: None, Mesh(tp=2)).types
    if fw.name == "torch":
        for options in ({"count_memory": True}, {"on": "processes"}):
            with pytest.raises(ValueError, match="two runs"):
                fw.lab.run(lambda: None, Mesh(tp=2), types=True, **options)


@pytest.mark.parametrize(
    "cut, before, after, want",
    [
        (Type("V", 1), (2, 4, 3), (8, 3), Type("V", 0, top=4)),
        (Type("V", 0, top=4), (8, 5), (2, 4, 5), Type("V", 1)),
        (Type("V", 0), (2, 4, 3), (8, 3), Type("V", 0)),
        (Type("V", 0), (8, 3), (2, 4, 3), Type("V", 0)),
        (Type("V", 1), (8, 6), (8, 2, 3), Type("V", 1)),
        (Type("V", 2), (2, 3, 4), (2, 3, 1, 4), Type("V")),
    ],
)
def test_where_a_cut_is_after_a_reshape(cut, before, after, want):
    assert reshaped(cut, before, after) == want


# ----------------------------------------------------------------------------------------------------------- traces


def test_the_trace_has_types_where_they_were_asked(fw):
    """They are data: in JSON, in the hint of each bar, and nowhere in a trace of a run without types."""
    program, mesh, shapes, specs = sequence(fw)
    out = fw.lab.run(program, mesh, *arrays(fw, *shapes), in_specs=specs, types=True)
    shown = {(event.op, event.types) for event in out.trace.events if event.kind == "collective"}
    assert shown == {
        ("all_gather", "tp: V(1) → R"),
        ("reduce_scatter", "tp: P → V(1)"),
        # before jax 0.10 the pieces are added up, each in its place
        ("all_reduce", "tp: V → I")
        if fw.name == "jax" and jax.__version_info__ < (0, 10)
        else ("all_gather", "tp: V(1) → I"),
    }
    assert Trace.from_json(out.trace.to_json()) == out.trace
    assert ["types", "tp: P → V(1)"] in unpack(timeline(out.trace).score)[0]["hints"]
    plain = fw.lab.run(program, mesh, *arrays(fw, *shapes), in_specs=specs).trace
    assert {event.types for event in plain.events} == {""}
    assert not any(text for what, text in unpack(timeline(plain).score)[0]["hints"] if what == "types")


@pytest.mark.parametrize("num_ranks", RANKS)
def test_the_types_of_a_backward_pass_are_the_duals(num_ranks):
    """Megatron's f and g, each the other's backward pass: I → R and P → I forward, P → I and nothing backward."""
    import torch

    from tplab.torch import all_reduce, copy_to, run

    def program(x, a, b):
        y = all_reduce((copy_to(x, "tp") @ a).tanh() @ b, "tp")
        (y * y).sum().backward()

    given = [x.requires_grad_() for x in map(torch.randn, [(4, 6), (6, 12), (12, 6)])]
    out = run(program, Mesh(tp=num_ranks), *given, in_specs=(P(), A, B), types=True)
    met = [(event.phase, event.types) for event in out.trace.select(kind="collective", rank=0).events]
    assert met == [("forward", "tp: P → I"), ("backward", "tp: P → I")]
    assert not out.types.faults


# ---------------------------------------------------------------------------------------------------------- scripts

SCRIPT = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = torch.nn.Linear(8, 4)
ddp = DistributedDataParallel(model) if {wraps} else model
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
for batch in torch.randn(2, 12, 8):
    x = batch[rank::world]
    loss = ddp(x).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    if {sums}:
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
    optimizer.step()
"""


@pytest.mark.parametrize("wraps, sums", [(True, False), (False, True), (False, False)])
def test_a_script_whose_gradients_nobody_adds_up(tmp_path, wraps, sums):
    from tplab.torch import launch

    path = tmp_path / "train.py"
    path.write_text(SCRIPT.format(wraps=wraps, sums=sums), encoding="utf8")
    types = launch(path, mesh=Mesh(dp=2), types=True).types
    assert str(types.of("x").types["dp"]) == "V(0)"
    assert "a script runs once" in str(types)
    if wraps or sums:
        assert not types.faults
    else:
        (fault,) = types.faults
        step = next(n for n, text in enumerate(SCRIPT.splitlines(), 1) if "optimizer.step" in text)
        assert fault.where == f"train.py:{step}" and "nothing has added them up" in fault.words


LARGE = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("gloo")
world = dist.get_world_size()
tp = {tp}
mesh = init_device_mesh("cpu", (world // tp, tp), mesh_dim_names=("dp", "tp"))
assert world < 16, "it ran on all of them"
torch.manual_seed(0)
w = torch.randn(8, 8).chunk(tp, 0)[mesh["tp"].get_local_rank()]
x = torch.randn(world // tp, 8)[mesh["dp"].get_local_rank()].chunk(tp)[mesh["tp"].get_local_rank()]
y = x @ w
dist.all_reduce(y, group=mesh["tp"].get_group())
"""


def test_a_script_is_typed_for_256_ranks_on_four(tmp_path, capsys):
    from tplab.torch import launch
    from tplab.torchrun import main

    path = tmp_path / "train.py"
    path.write_text(LARGE.format(tp="world // 2"), encoding="utf8")
    small, large = (launch(path, mesh=Mesh(dp=dp, tp=tp), types=True).types for dp, tp in ((2, 2), (32, 8)))
    assert large.lines == small.lines and large.casts == small.casts
    assert "typed on Mesh(dp=2, tp=2) instead of Mesh(dp=32, tp=8)" in large.note and "instead of" not in small.note
    flags = ["--nnodes", "32", "--nproc-per-node", "8", "--mesh", "dp=32,tp=8", "--spmd-types", str(path)]
    assert main(flags) == 0
    said = capsys.readouterr().out
    assert "each rank sent" not in said and 'all_reduce(..., "tp", src=' in said
    path.write_text(LARGE.format(tp=8), encoding="utf8")
    assert main(flags) == 1
    assert "If the script has sizes of its own, give those of Mesh(dp=2, tp=2)" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------- spmd_types


def annotations(fw, build):
    program, mesh, shapes, specs = build(fw)
    said = types_of(fw, program, mesh, shapes, specs).as_spmd_types().splitlines()[1:]
    column = max(line.index("assert_type") for line in said if "assert_type" in line)
    return [" ".join(line[column:].split()) for line in said if line[column:].strip()]


def test_types_are_annotations_of_spmd_types(fw):
    """Its own checker accepts them: tried with spmd_types 0.3.1 on torch's fake process group."""
    assert annotations(fw, column_and_row) == [
        'assert_type(x, {"tp": I})',
        'assert_type(a, {"tp": S(1)})',
        'assert_type(b, {"tp": S(0)})',
        'assert_type(bias, {"tp": I})',
        'convert(..., "tp", src=I, dst=R) # I -> R, backward P -> I',
        'assert_type(h, {"tp": S(1)})',
        'assert_type(y, {"tp": P})',
        'all_reduce(..., "tp", src=P, dst=I) # P -> I, backward I -> R',
        'assert_type(z, {"tp": I})',
        'assert_type(..., {"tp": I})',
    ]
    found = annotations(fw, sequence)
    assert [one for one in found if not one.startswith("assert_type")] == [
        'all_gather(..., "tp", src=S(1), dst=R) # S(1) -> R, backward P -> S(1)',
        'reduce_scatter(..., "tp", src=P, dst=S(1)) # P -> S(1), backward S(1) -> R',
        'all_gather(..., "tp", src=S(1), dst=I) # S(1) -> I, backward I -> S(1)',
    ]


def test_what_spmd_types_has_no_word_for(fw):
    """A dim that two axes cut has an order there; a mean over part of a batch, and a hop, have no function."""

    def program(x):
        mean = x.mean(0)
        hop = fw.lab.ring_shift(x, "tp")
        return mean, hop

    types = types_of(fw, program, Mesh(dp=2, tp=2), [(8, 4)], (P(("dp", "tp")),))
    said = types.as_spmd_types()
    assert 'assert_type(x, {"dp": V, "tp": V})' in said
    assert str(types.of("mean").types["dp"]) == "P(mean)" and 'assert_type(mean, {"dp": V, "tp": V})' in said
    assert "# ring_shift: S(0) -> V, backward V -> S(0)" in said
