"""Sharding: which rank holds which piece, held against JAX's own NamedSharding; split and join; what errors say."""

import copy
import itertools
import json
import math
import pickle
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tplab import Mesh, P
from tplab.errors import ShapeError, SpecError
from tplab.sharding import (
    Rule,
    check_spec,
    cut,
    global_shape,
    join,
    local_shape,
    owners,
    replicas,
    shard_slices,
    share,
    split,
)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], P, Mesh]:
    """(shape, spec, mesh) that fit: 0 to 3 dims, several axes a dim, odd sizes and empty ones."""
    names = draw(st.permutations(("dp", "pp", "tp")))[: draw(st.integers(1, 3))]
    mesh = Mesh(**{name: draw(st.integers(1, 3)) for name in names})
    num_dims = draw(st.integers(0, 3))
    entries: list[list[str]] = [[] for _ in range(num_dims)]
    for name in draw(st.permutations(names)):
        dim = draw(st.integers(-1, num_dims - 1))
        if dim >= 0:
            entries[dim].append(name)
    shape = tuple(math.prod(mesh.shape[name] for name in entry) * draw(st.integers(0, 3)) for entry in entries)
    spec = [None if not entry else entry[0] if len(entry) == 1 else tuple(entry) for entry in entries]
    while spec and spec[-1] is None and draw(st.booleans()):
        spec.pop()
    return shape, P(*spec), mesh


def example(shape: tuple[int, ...]) -> np.ndarray:
    return np.arange(math.prod(shape), dtype=np.float32).reshape(shape)


@given(layouts())
def test_split_and_join_are_inverse(layout: tuple[tuple[int, ...], P, Mesh]):
    shape, spec, mesh = layout
    whole = example(shape)
    pieces = split(whole, spec, mesh)
    assert len(pieces) == mesh.size
    for rank, piece in enumerate(pieces):
        assert isinstance(piece, np.ndarray)
        assert piece.shape == local_shape(shape, spec, mesh)
        assert np.array_equal(piece, whole[shard_slices(shape, spec, mesh, rank)])
    back = join(pieces, spec, mesh)
    assert back.dtype == whole.dtype
    assert back.shape == shape == global_shape(pieces[0].shape, spec, mesh)
    assert np.array_equal(back, whole)


@given(layouts())
def test_torch_tensors_stay_torch_tensors(layout: tuple[tuple[int, ...], P, Mesh]):
    torch = pytest.importorskip("torch")
    shape, spec, mesh = layout
    whole = torch.tensor(example(shape)).to(torch.bfloat16)
    pieces = split(whole, spec, mesh)
    back = join(pieces, spec, mesh)
    assert back.dtype == torch.bfloat16
    assert torch.equal(back, whole)


def test_pieces_are_views_and_the_whole_is_not():
    torch = pytest.importorskip("torch")
    for whole in (np.zeros((4, 2)), torch.zeros(4, 2)):
        pieces = split(whole, P("tp"), Mesh(tp=2))
        pieces[1][...] = 1
        assert whole.sum() == 4
        join(pieces, P("tp"), Mesh(tp=2))[...] = 7
        assert whole.sum() == 4


def test_gradients_go_through_split_and_join():
    torch = pytest.importorskip("torch")
    x = torch.arange(6.0, requires_grad=True)
    joined = join([piece * (rank + 1) for rank, piece in enumerate(split(x, P("tp"), Mesh(tp=3)))], P("tp"), Mesh(tp=3))
    joined.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1, 1, 2, 2, 3, 3]


def test_an_array_without_dims_stays_an_array():
    piece = split(np.array(3.0), P(), Mesh(tp=2))[1]
    assert isinstance(piece, np.ndarray)
    assert join([piece, piece], P(), Mesh(tp=2)).shape == ()


def test_join_takes_the_lowest_copy_and_fills_what_it_is_given():
    mesh = Mesh(dp=2, tp=2)
    pieces = [np.full(2, rank) for rank in mesh.ranks]
    assert join(pieces, P("tp"), mesh).tolist() == [0, 0, 1, 1]
    assert join(pieces, P("dp"), mesh).tolist() == [0, 0, 2, 2]
    assert join(pieces, P("tp"), mesh, empty=lambda shape: np.empty(shape, "float16")).dtype == "float16"


@given(layouts())
def test_owners_hold_everything_once_and_replicas_the_same(layout: tuple[tuple[int, ...], P, Mesh]):
    shape, spec, mesh = layout
    count = np.zeros(shape, int)
    for rank in owners(spec, mesh):
        count[shard_slices(shape, spec, mesh, rank)] += 1
    assert (count == 1).all()
    groups = replicas(spec, mesh)
    assert sorted(itertools.chain(*groups)) == list(mesh.ranks)
    assert [group[0] for group in groups] == owners(spec, mesh)
    # Sizes of 1 a rank, so that pieces which are not copies are never alike.
    unit = tuple(math.prod(mesh.shape[name] for name in P(entry).axis_names) for entry in spec)
    for one, other in itertools.combinations(mesh.ranks, 2):
        alike = shard_slices(unit, spec, mesh, one) == shard_slices(unit, spec, mesh, other)
        assert alike == any(one in group and other in group for group in groups)


@given(st.integers(0, 50), st.integers(1, 9))
def test_even_pieces_are_those_of_numpy(size: int, parts: int):
    assert [list(piece) for piece in cut(size, parts, "even")] == [
        piece.tolist() for piece in np.array_split(np.arange(size), parts)
    ]


@given(st.integers(1, 50), st.integers(1, 9))
def test_ceil_pieces_are_those_of_torch_and_then_empty_ones(size: int, parts: int):
    torch = pytest.importorskip("torch")
    pieces = [list(piece) for piece in cut(size, parts, "ceil")]
    chunks = [chunk.tolist() for chunk in torch.arange(size).chunk(parts)]
    assert pieces == chunks + [[]] * (parts - len(chunks))


@given(st.integers(0, 9), st.integers(1, 9))
def test_equal_pieces_are_all_of_one_size_and_follow_one_another(each: int, parts: int):
    pieces = cut(each * parts, parts, "equal")
    assert [len(piece) for piece in pieces] == [each] * parts == [share(each * parts, parts, "the size is")] * parts
    assert list(itertools.chain(*pieces)) == list(range(each * parts))


def test_the_table_of_rules_is_what_cut_does():
    def drawn(size: int, parts: int, rule: Rule) -> str:
        return " ".join(str(len(piece)) for piece in cut(size, parts, rule))

    assert cut.__doc__ is not None
    rows = (
        "equal    ShapeError; 12: " + drawn(12, 4, "equal"),
        f"ceil     {drawn(10, 4, 'ceil')}; 9: {drawn(9, 4, 'ceil')}",
        f"even     {drawn(10, 4, 'even')}",
    )
    for row in rows:
        assert row in cut.__doc__
    with pytest.raises(ShapeError):
        cut(10, 4, "equal")


ORACLE = """
import json, os, sys
os.environ["JAX_PLATFORMS"] = "cpu"
import jax
import numpy as np
jax.config.update("jax_num_cpu_devices", 8)
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tplab import Mesh as OurMesh, P
from tplab.sharding import join, split

cases, answers = json.load(sys.stdin), []
for axes, entries, shape in cases:
    entries = [tuple(entry) if isinstance(entry, list) else entry for entry in entries]
    devices = np.array(jax.devices()[: int(np.prod(list(axes.values())))]).reshape(list(axes.values()))
    sharding = NamedSharding(Mesh(devices, tuple(axes)), PartitionSpec(*entries))
    places = sharding.devices_indices_map(tuple(shape))
    answers.append([[slice_.indices(n)[:2] for slice_, n in zip(places[d], shape)] for d in devices.flat])

whole = jnp.arange(24).reshape(4, 6).astype(jnp.bfloat16)
mesh, spec = OurMesh(dp=2, tp=3), P("dp", "tp")
pieces = split(whole, spec, mesh)
back = join(pieces, spec, mesh)
assert all(isinstance(array, jax.Array) for array in (back, *pieces)), type(back)
assert back.dtype == whole.dtype and bool((back == whole).all())
json.dump(answers, sys.stdout)
"""


def test_pieces_lie_where_jax_puts_them():
    """Every spec over every mesh of up to 8 devices, 1 to 3 dims, against NamedSharding.devices_indices_map."""
    pytest.importorskip("jax")
    cases = []
    for axes in ({"tp": 1}, {"tp": 3}, {"dp": 2, "tp": 4}, {"tp": 3, "dp": 2}, {"pp": 2, "dp": 2, "tp": 2}):
        choices = [None, *(c for n in range(1, len(axes) + 1) for c in itertools.permutations(axes, n))]
        for num_dims in (1, 2, 3):
            for entries in itertools.product(choices, repeat=num_dims):
                used = [name for entry in entries if entry for name in entry]
                if len(set(used)) == len(used):
                    shape = [math.prod(axes[n] for n in entry or ()) * (dim + 1) for dim, entry in enumerate(entries)]
                    cases.append((axes, entries, shape))
    run = subprocess.run([sys.executable, "-c", ORACLE], input=json.dumps(cases), capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    answers = json.loads(run.stdout)
    assert len(answers) == len(cases) > 200
    for (axes, entries, shape), answer in zip(cases, answers, strict=True):
        mesh = Mesh(**axes)
        for rank, places in enumerate(answer):
            ours = [[piece.start, piece.stop] for piece in shard_slices(shape, P(*entries), mesh, rank)]
            assert ours == places, (mesh, entries, shape, rank)


def test_p_has_one_form():
    assert P(("tp",)) == P("tp")
    assert P(()) == P(None)
    assert P(["dp", "tp"]) == P(("dp", "tp"))  # type: ignore[arg-type]
    assert repr(P(None, "tp", ("dp", "pp"))) == "P(None, 'tp', ('dp', 'pp'))"
    assert P(("dp", "pp"), None, "tp").axis_names == ("dp", "pp", "tp")
    for spec in (P(), P(None, "tp"), P(("dp", "tp"))):
        assert eval(repr(spec)) == spec
        assert pickle.loads(pickle.dumps(spec)) == copy.deepcopy(spec) == spec
        assert type(pickle.loads(pickle.dumps(spec))) is P
        assert {spec: 1}[P(*spec)] == 1


MESH = Mesh(dp=2, tp=4)
FAULTS = [
    (SpecError, "an entry of P is None, an axis name or a tuple of axis names, not 3", lambda: P(3)),  # type: ignore
    (SpecError, "an entry of P is None, an axis name or a tuple of axis names, not (None, 'tp')",
     lambda: P((None, "tp"))),  # type: ignore
    (SpecError, "P('tp', ('dp', 'tp')) names axis 'tp' twice; an axis can split only one dim, once",
     lambda: P("tp", ("dp", "tp"))),
    (SpecError, "a spec is a tplab.P, for example P(None, 'tp'), and 'tp' is of type str; P(*entries) makes one",
     lambda: split(np.ones(4), "tp", MESH)),  # type: ignore
    (SpecError, "P('pp') names axis 'pp', which Mesh(dp=2, tp=4) does not have; its axes are 'dp', 'tp'",
     lambda: local_shape((4,), P("pp"), MESH)),
    (SpecError, "P('pp') names axis 'pp', which Mesh(dp=2, tp=4) does not have; its axes are 'dp', 'tp'",
     lambda: replicas(P("pp"), MESH)),
    (SpecError, "P(None, 'tp') has 2 entries, and the tensor of shape (4,) has 1 dims; give at most one entry per dim",
     lambda: check_spec((4,), P(None, "tp"), MESH)),
    (SpecError, "P(None, 'tp') has 2 entries, and each rank's piece of shape (4,) has 1 dims; "
     "give at most one entry per dim", lambda: global_shape((4,), P(None, "tp"), MESH)),
    (ShapeError, "dim 1 has size 10, which the 4 ranks of axis 'tp' cannot share equally;\n"
     "pad it to 12, or use a mesh whose 'tp' divides 10", lambda: split(np.ones((2, 10)), P(None, "tp"), MESH)),
    (ShapeError, "dim 0 has size 3, which the 8 ranks of axes 'dp' x 'tp' cannot share equally;\n"
     "pad it to 8, or use a mesh whose 'dp' x 'tp' divides 3", lambda: local_shape((3,), P(("dp", "tp")), MESH)),
    (ShapeError, "num_heads is 6, which 4 ranks cannot share equally: heads are sharded whole;\n"
     "pad it to 8, or take a number of ranks that divides 6",
     lambda: share(6, 4, "num_heads is", why="heads are sharded whole")),
    (ShapeError, "the batch has size 7, which 0 microbatches cannot share equally;\n"
     "pad it to 7, or take a number of microbatches that divides 7",
     lambda: share(7, 0, "the batch has size", sharers="microbatches")),
    (ShapeError, "hidden is 0, which the 4 ranks of axis 'tp' cannot share equally;\nmake it 4",
     lambda: share(0, 4, "hidden is", axis="tp", least=1)),
    (ShapeError, "the size is 10, which 4 parts cannot share equally;\n"
     "pad it to 12, or take a number of parts that divides 10", lambda: cut(10, 4, "equal")),
    (ValueError, "rule is 'odd'; it must be 'equal', 'ceil' or 'even'", lambda: cut(10, 4, "odd")),  # type: ignore
    (ShapeError, "Mesh(dp=2, tp=4) has 8 ranks, but there are 2 pieces; give one per rank",
     lambda: join([np.ones(2)] * 2, P(), MESH)),
    (ShapeError, "the pieces of P() must have one shape, but have these: rank 0 (2,), rank 1 (3,)",
     lambda: join([np.ones(2), np.ones(3)], P(), Mesh(tp=2))),
    (ValueError, "Mesh(dp=2, tp=4) has ranks 0 to 7, not 8", lambda: shard_slices((4,), P(), MESH, 8)),
]  # fmt: skip


@pytest.mark.parametrize("kind, message, fault", FAULTS, ids=range(len(FAULTS)))
def test_what_it_says(kind, message, fault):
    with pytest.raises(kind) as caught:
        fault()
    assert str(caught.value) == message
