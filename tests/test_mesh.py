"""Mesh: ranks and coordinates, groups, neighbours, and what it says when it cannot."""

import copy
import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tplab import Mesh
from tplab.errors import MeshError, TplabError

NAMES = ("dp", "pp", "tp", "ep")


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    """1 to 4 axes of 1 to 4 ranks, in any order of names."""
    names = draw(st.permutations(NAMES))[: draw(st.integers(1, 4))]
    return Mesh(**{name: draw(st.integers(1, 4)) for name in names})


@st.composite
def meshes_with_axis(draw: st.DrawFn) -> tuple[Mesh, tuple[str, ...]]:
    mesh = draw(meshes())
    names = draw(st.permutations(mesh.axis_names))
    return mesh, tuple(names[: draw(st.integers(1, len(names)))])


def test_what_the_docstring_draws():
    mesh = Mesh(dp=2, tp=4)
    assert [[mesh.rank(dp=dp, tp=tp) for tp in range(4)] for dp in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert mesh.coordinates(6) == {"dp": 1, "tp": 2}
    assert mesh.groups("tp") == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert mesh.groups("dp") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert mesh.groups(("tp", "dp")) == [(0, 4, 1, 5, 2, 6, 3, 7)]  # tp is the slower one here
    assert mesh.neighbor(3, "tp") == 0
    assert mesh.neighbor(4, "tp", -1) == 7
    assert (mesh.axis_names, dict(mesh.shape), mesh.size) == (("dp", "tp"), {"dp": 2, "tp": 4}, 8)


@given(meshes())
def test_ranks_and_coordinates_are_one_to_one(mesh: Mesh):
    assert mesh.size == math.prod(mesh.shape.values()) == len(mesh.ranks)
    seen = [tuple(mesh.coordinates(rank).values()) for rank in mesh.ranks]
    # The last axis is the fastest: ranks count as NumPy lays out an array.
    assert seen == list(np.ndindex(*mesh.shape.values()))
    assert [mesh.rank(**mesh.coordinates(rank)) for rank in mesh.ranks] == list(mesh.ranks)


@given(meshes_with_axis())
def test_groups_partition_the_ranks(case: tuple[Mesh, tuple[str, ...]]):
    mesh, axis = case
    groups = mesh.groups(axis)
    assert sorted(rank for group in groups for rank in group) == list(mesh.ranks)
    assert {len(group) for group in groups} == {mesh.axis_size(axis)}
    assert groups == sorted(groups)
    for group in groups:
        assert [mesh.group(rank, axis) for rank in group] == [group] * len(group)
        others = [name for name in mesh.axis_names if name not in axis]
        assert len({tuple(mesh.coordinates(rank)[name] for name in others) for rank in group}) == 1


@given(meshes_with_axis())
def test_the_place_in_a_group_is_the_index_the_first_name_slowest(case: tuple[Mesh, tuple[str, ...]]):
    mesh, axis = case
    for rank in mesh.ranks:
        positions = [mesh.coordinates(rank)[name] for name in axis]
        index = int(np.ravel_multi_index(positions, [mesh.shape[name] for name in axis]))
        assert mesh.index(rank, axis) == index
        assert mesh.group(rank, axis)[index] == rank


@given(meshes_with_axis(), st.integers(-9, 9))
def test_neighbors_make_rings(case: tuple[Mesh, tuple[str, ...]], shift: int):
    mesh, axis = case
    for rank in mesh.ranks:
        other = mesh.neighbor(rank, axis, shift)
        assert mesh.index(other, axis) == (mesh.index(rank, axis) + shift) % mesh.axis_size(axis)
        assert mesh.group(other, axis) == mesh.group(rank, axis)
        assert mesh.neighbor(other, axis, -shift) == rank


@given(meshes_with_axis())
def test_a_name_a_tuple_and_a_list_of_one_are_the_same_axis(case: tuple[Mesh, tuple[str, ...]]):
    mesh, (name, *_) = case
    for rank in mesh.ranks:
        assert mesh.group(rank, name) == mesh.group(rank, (name,)) == mesh.group(rank, [name])  # type: ignore[arg-type]


@given(meshes())
def test_a_mesh_is_a_value(mesh: Mesh):
    twin = Mesh(**mesh.shape)
    assert twin == mesh
    assert hash(twin) == hash(mesh)
    assert eval(repr(mesh)) == mesh
    mesh.group(0, mesh.axis_names)  # what it keeps for itself is no part of the value
    for other in (copy.deepcopy(mesh), pickle.loads(pickle.dumps(mesh))):
        assert other == mesh
        assert other.group(0, other.axis_names) == mesh.group(0, mesh.axis_names)


def test_the_order_of_axes_and_their_names_count():
    assert Mesh(dp=2, tp=4) != Mesh(tp=4, dp=2)
    assert Mesh(dp=2) != Mesh(tp=2)
    assert Mesh(dp=2) != 2


def test_a_mesh_cannot_be_changed():
    with pytest.raises(TypeError):
        Mesh(tp=2).shape["tp"] = 3  # type: ignore[index]


def test_sizes_and_ranks_may_come_from_numpy():
    mesh = Mesh(tp=np.int64(4))  # type: ignore[arg-type]
    assert repr(mesh) == "Mesh(tp=4)"
    assert mesh.neighbor(np.int32(3), "tp") == 0  # type: ignore[arg-type]
    assert mesh.rank(tp=np.int64(2)) == 2  # type: ignore[arg-type]


def test_any_identifier_is_a_name():
    assert Mesh(self=2, rank=3).rank(self=1, rank=2) == 5


def test_a_large_axis_is_no_trouble():
    mesh = Mesh(dp=2, tp=4096)
    assert mesh.group(5000, "tp") is mesh.group(4999, "tp")  # shared: 8,192 tuples of 4,096 would not fit
    assert mesh.index(5000, "tp") == 5000 - 4096
    largest = Mesh(dp=1 << 18, tp=4)
    assert largest.group(largest.size - 1, "tp") == tuple(range(largest.size - 4, largest.size))


MESH = Mesh(dp=2, tp=4)
FAULTS = {
    "a mesh needs at least one axis, for example Mesh(tp=4)": lambda: Mesh(),
    "every axis of a mesh has a name: write Mesh(tp=4), not Mesh(4)": lambda: Mesh(4),  # type: ignore
    "every axis of a mesh has a name: write Mesh(dp=2, tp=4), not Mesh(2, 4)": lambda: Mesh(2, 4),  # type: ignore
    "every axis of a mesh has a name: write Mesh(tp=4), not Mesh({'tp': 2})": lambda: Mesh({"tp": 2}),  # type: ignore
    "Mesh(dp=10, tp=1000000) has 10,000,000 ranks, and a mesh has at most 1,048,576; make an axis smaller":
        lambda: Mesh(dp=10, tp=10**6),
    "axis 'tp' has size 0; it must be a whole number of ranks, 1 or more": lambda: Mesh(tp=0),
    "axis 'tp' has size 2.0; it must be a whole number of ranks, 1 or more": lambda: Mesh(tp=2.0),  # type: ignore
    "axis 'tp' has size True; it must be a whole number of ranks, 1 or more": lambda: Mesh(tp=True),
    "axis name 'a,b' is not an identifier; use letters and digits, as in Mesh(tp=4)": lambda: Mesh(**{"a,b": 2}),
    "Mesh(dp=2, tp=4) has no axis 'pp'; its axes are 'dp', 'tp'": lambda: MESH.group(0, "pp"),
    "an axis is a name, or a tuple of names, of Mesh(dp=2, tp=4); 1 is neither": lambda: MESH.axis_size(1),  # type: ignore
    "axes ('tp', 'tp') must be one or more names of Mesh(dp=2, tp=4), each once": lambda: MESH.groups(("tp", "tp")),
    "axes () must be one or more names of Mesh(dp=2, tp=4), each once": lambda: MESH.index(0, ()),
    "Mesh(dp=2, tp=4) has ranks 0 to 7, not 8": lambda: MESH.coordinates(8),
    "Mesh(dp=2, tp=4) has ranks 0 to 7, not -1": lambda: MESH.neighbor(-1, "tp"),
    "Mesh(dp=2, tp=4) has ranks 0 to 7, not 1.5": lambda: MESH.index(1.5, "tp"),  # type: ignore
    "axis 'tp' of Mesh(dp=2, tp=4) has positions 0 to 3, not 4": lambda: MESH.rank(dp=1, tp=4),
    "axis 'dp' of Mesh(dp=2, tp=4) has positions 0 to 1, not -1": lambda: MESH.rank(dp=-1),
}  # fmt: skip


@pytest.mark.parametrize("message", FAULTS)
def test_what_it_says(message: str):
    with pytest.raises(MeshError) as caught:
        FAULTS[message]()
    assert str(caught.value) == message
    assert isinstance(caught.value, TplabError)
    assert isinstance(caught.value, ValueError)
