"""A mesh: the ranks of a program, on a grid whose axes have names."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import product
from types import MappingProxyType
from typing import Any, NamedTuple, Never

from tplab.errors import MeshError

Axis = str | tuple[str, ...]
"""One axis by name, or several taken together, the slowest first."""


MOST_RANKS = 1 << 20
"""More than any cluster has. A mesh keeps tables with one row per rank, so a mistyped size could fill the memory."""


class _Places(NamedTuple):
    """Along one axis: the position of each rank, the group it is in, and a list of the groups."""

    indices: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
    each: tuple[tuple[int, ...], ...]


class Mesh:
    """The named grid of ranks that a program runs on.

    `Mesh(dp=2, tp=4)` has 8 ranks; the last axis is the fastest, so ranks 0 to 3 share dp = 0:

               tp=0  tp=1  tp=2  tp=3
        dp=0     0     1     2     3
        dp=1     4     5     6     7

    Meshes are immutable values: they are equal if their axes are equal, and can be used as keys. An `axis` argument
    is one name, or a tuple of names for all the ranks that those axes span (the first one slowest).
    """

    __slots__ = ("_places", "_shape", "_strides")

    def __init__(self, /, *unnamed: Never, **axes: int):
        if unnamed:
            given = ", ".join(map(repr, unnamed))
            named = zip(("pp", "dp", "tp")[-len(unnamed) :], unnamed)
            sizes = ", ".join(f"{name}={size}" for name, size in named if whole_or_none(size))
            raise MeshError(f"every axis of a mesh has a name: write Mesh({sizes or 'tp=4'}), not Mesh({given})")
        if not axes:
            raise MeshError("a mesh needs at least one axis, for example Mesh(tp=4)")
        shape: dict[str, int] = {}
        for name, given in axes.items():
            if not name.isidentifier():
                raise MeshError(f"axis name {name!r} is not an identifier; use letters and digits, as in Mesh(tp=4)")
            size = whole_or_none(given)
            if size is None or size < 1:
                raise MeshError(f"axis {name!r} has size {given!r}; it must be a whole number of ranks, 1 or more")
            shape[name] = size
        strides, stride = {}, 1
        for name in reversed(shape):
            strides[name] = stride
            stride *= shape[name]
        self._shape: Mapping[str, int] = MappingProxyType(shape)
        self._strides = strides
        if stride > MOST_RANKS:
            raise MeshError(f"{self} has {stride:,} ranks, and a mesh has at most {MOST_RANKS:,}; make an axis smaller")
        self._places: dict[Axis, _Places] = {}

    @property
    def shape(self) -> Mapping[str, int]:
        """Axis name -> number of ranks along it."""
        return self._shape

    @property
    def axis_names(self) -> tuple[str, ...]:
        return tuple(self._shape)

    @property
    def size(self) -> int:
        """How many ranks there are in total (the world size)."""
        return math.prod(self._shape.values())

    @property
    def ranks(self) -> range:
        return range(self.size)

    def names(self, axis: Axis) -> tuple[str, ...]:
        """The axis or axes as a tuple of names, each checked. Raises MeshError."""
        if not isinstance(axis, str | tuple | list):
            raise MeshError(f"an axis is a name, or a tuple of names, of {self}; {axis!r} is neither")
        names = (axis,) if isinstance(axis, str) else tuple(axis)
        for name in names:
            if name not in self._shape:
                raise MeshError(f"{self} has no axis {name!r}; its axes are {', '.join(map(repr, self._shape))}")
        if len(set(names)) != len(names) or not names:
            raise MeshError(f"axes {names!r} must be one or more names of {self}, each once")
        return names

    def axis_size(self, axis: Axis) -> int:
        """How many ranks there are along `axis`."""
        return math.prod(self._shape[name] for name in self.names(axis))

    def check_rank(self, rank: int) -> None:
        """Raise MeshError if there is no such rank."""
        if whole_or_none(rank) is None or not 0 <= rank < self.size:
            raise MeshError(f"{self} has ranks 0 to {self.size - 1}, not {rank!r}")

    def coordinates(self, rank: int) -> dict[str, int]:
        """Axis name -> position of `rank` along it."""
        self.check_rank(rank)
        return {name: rank // self._strides[name] % size for name, size in self._shape.items()}

    def rank(self, /, **coordinates: int) -> int:
        """The rank at these coordinates; an axis that is left out counts as 0."""
        rank = 0
        for name, position in coordinates.items():
            (name,) = self.names(name)
            place = whole_or_none(position)
            if place is None or not 0 <= place < self._shape[name]:
                raise MeshError(f"axis {name!r} of {self} has positions 0 to {self._shape[name] - 1}, not {position!r}")
            rank += place * self._strides[name]
        return rank

    def index(self, rank: int, axis: Axis) -> int:
        """The position of `rank` along `axis`."""
        self.check_rank(rank)
        return self._along(axis).indices[rank]

    def group(self, rank: int, axis: Axis) -> tuple[int, ...]:
        """The ranks that differ from `rank` only along `axis`, in the order of their positions."""
        self.check_rank(rank)
        return self._along(axis).groups[rank]

    def groups(self, axis: Axis) -> list[tuple[int, ...]]:
        """Every group along `axis`; each rank is in exactly one of them."""
        return list(self._along(axis).each)

    def neighbor(self, rank: int, axis: Axis, shift: int = 1) -> int:
        """The rank `shift` positions further along the ring of `axis`."""
        group = self.group(rank, axis)
        return group[(self.index(rank, axis) + shift) % len(group)]

    def _along(self, axis: Axis) -> _Places:
        """Where each rank is along `axis`; cached, because collectives ask at every call."""
        key = axis if isinstance(axis, str) else tuple(axis) if isinstance(axis, list) else axis
        found = self._places.get(key)
        if found is None:
            names = self.names(axis)
            offsets = [
                sum(position * self._strides[name] for name, position in zip(names, positions, strict=True))
                for positions in product(*(range(self._shape[name]) for name in names))
            ]
            indices = [-1] * self.size
            groups: list[tuple[int, ...]] = [()] * self.size
            each = []
            for first in self.ranks:
                if indices[first] < 0:  # the lowest rank of a group not seen before: all its axes are 0
                    group = tuple(first + offset for offset in offsets)
                    each.append(group)
                    for index, rank in enumerate(group):
                        indices[rank], groups[rank] = index, group
            found = self._places[key] = _Places(tuple(indices), tuple(groups), tuple(each))
        return found

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mesh) and tuple(self._shape.items()) == tuple(other._shape.items())

    def __hash__(self) -> int:
        return hash(tuple(self._shape.items()))

    def __reduce__(self):
        return partial(Mesh, **self._shape), ()

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{name}={size}' for name, size in self._shape.items())})"


def label_of(ranks: Sequence[int], mesh: Mesh) -> str:
    """A group's name in a trace: the axis of the mesh that it runs along, or its ranks."""
    names = mesh.axis_names
    for first in range(len(names)):
        for last in range(first + 1, len(names) + 1):
            if mesh.group(ranks[0], names[first:last]) == tuple(ranks):
                return ",".join(names[first:last])
    return APART + ",".join(map(str, ranks))


def ranks_of(label: str) -> tuple[int, ...]:
    """The ranks of a group that is not an axis, from its name in a trace; () for any other name."""
    numbers = label.removeprefix(APART).split(",")
    is_apart = label.startswith(APART) and all(map(str.isdecimal, numbers))
    return tuple(map(int, numbers)) if is_apart else ()


APART = "ranks "
"""In a trace, the name of a group that is not an axis begins with this, followed by its ranks."""

DIM = "mesh_"
"""The name that torch's DeviceMesh gives a group begins with this, followed by the dim's name."""


def mesh_of_dims(groups: Iterable[tuple[str, Sequence[int]]], world: int) -> Mesh | None:
    """The mesh of a program's DeviceMesh, as far as its groups reveal it: the groups of the dim "tp" are called
    "mesh_tp". The ranks of an inner dim are closer together. None if the groups do not form a mesh of all ranks.

    groups   the name of each group, and its ranks
    """
    dims: dict[str, tuple[int, int]] = {}  # name -> distance between its ranks, number of them
    for description, ranks in groups:
        name = description.removeprefix(DIM)
        if name != description and name.isidentifier() and len(ranks) > 1:
            distance = ranks[1] - ranks[0]
            if distance > 0 and tuple(ranks) == tuple(range(ranks[0], ranks[-1] + 1, distance)):
                dims.setdefault(name, (distance, len(ranks)))
    axes = _axes(dims, 1, world)
    return Mesh(**{name: dims[name][1] for name in reversed(axes)}) if axes else None


def _axes(dims: Mapping[str, tuple[int, int]], distance: int, world: int) -> list[str]:
    """The dims, innermost first, that together form a mesh of `world` ranks; ranks along the innermost are `distance`
    apart. [] if there are none. If dims were flattened into one, the original dims are used instead of it."""
    found: list[str] = []
    for name, (step, size) in dims.items():
        if step == distance:
            outer = _axes(dims, distance * size, world)
            if distance * size == world or outer:
                found = max(found, [name, *outer], key=len)
    return found


def whole_or_none(value: Any) -> int | None:
    """`value` as a plain int, also from NumPy; None if it is not a whole number. A bool does not count as one."""
    if type(value) is int:
        return value
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None
