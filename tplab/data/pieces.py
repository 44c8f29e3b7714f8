"""Which elements of each parameter a rank holds if ranks share parameters (ZeRO), along which axes, and what they
send."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

from tplab.errors import MeshError, one_of
from tplab.mesh import Axis, Mesh
from tplab.sharding import cut

OPS = ("sum", "mean")
"""How gradients are combined."""


@dataclass(frozen=True)
class Pieces:
    """Some parameters, each cut into one piece per rank. R ranks.

    Each parameter is flattened, and `cut(size, R, "ceil")` says which rank holds which elements: 10 numbers over 4
    ranks are 3 3 3 1, and 3 numbers over 4 ranks are 1 1 1 0. So parameters of any shape can be shared.

    All parameters are sent in one message, [R, width]: row r has rank r's piece of each parameter, one after the other,
    and each piece is padded to the longest. In an all_gather of the rows, or a reduce_scatter to them, each rank sends
    (R-1) * width elements.

        Pieces(((2, 5), (3,)), 4)       a weight of 10 numbers, a bias of 3

        rank 0   0 1 2 | 0          the numbers are indices into the parameter
        rank 1   3 4 5 | 1
        rank 2   6 7 8 | 2
        rank 3   9 . . | .          a dot is padding
    """

    shapes: tuple[tuple[int, ...], ...]
    num_ranks: int

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each parameter."""
        return tuple(math.prod(shape) for shape in self.shapes)

    @cached_property
    def ranges(self) -> tuple[tuple[range, ...], ...]:
        """The elements of each parameter that each rank holds."""
        return tuple(cut(size, self.num_ranks, "ceil") for size in self.sizes)

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """The elements of each parameter in one row of the message: as many as rank 0 holds, the most of any rank."""
        return tuple(len(ranges[0]) for ranges in self.ranges)

    @cached_property
    def columns(self) -> tuple[slice, ...]:
        """Where each parameter is in a row."""
        return tuple(slice(end - width, end) for end, width in zip(accumulate(self.widths), self.widths))

    @property
    def width(self) -> int:
        """How many elements a row has."""
        return sum(self.widths)

    def num_held(self, index: int) -> int:
        """How many elements the rank at position `index` holds, without padding."""
        return sum(len(ranges[index]) for ranges in self.ranges)

    def __str__(self) -> str:
        lines = []
        for index in range(self.num_ranks):
            each = [[*map(str, ranges[index]), *"." * (len(ranges[0]) - len(ranges[index]))] for ranges in self.ranges]
            lines.append(f"rank {index}   " + " | ".join(map(" ".join, each)))
        return "\n".join(lines)


# --- the axes along which ranks have different data -------------------------------------------------------------------


def data_axes(
    mesh: Mesh, axis: Axis, replicate_axis: Axis | None = None, reshard_axis: Axis | None = None
) -> tuple[str, ...]:
    """The names in `axis` and `replicate_axis`.

    axis             the axis along which parameters are cut into pieces
    replicate_axis   the axis along which the pieces are replicated
    reshard_axis     the axis of the second pieces, as given to `reshard_after_forward`: a part of `axis`, since ranks
                     along other axes may have other parameters
    Raises MeshError if they do not fit together.
    """
    names = mesh.names(axis)
    if reshard_axis is not None and not set(mesh.names(reshard_axis)) <= set(names):
        raise MeshError(
            f"reshard_after_forward is {reshard_axis!r}, and axis is {axis!r}: it must name axes that are part of "
            "axis, as in axis=('node', 'gpu'), reshard_after_forward='gpu', or be True or False"
        )
    if replicate_axis is None:
        return names
    copies = mesh.names(replicate_axis)
    if not set(copies).isdisjoint(names):
        raise MeshError(
            f"replicate_axis is {replicate_axis!r}, and axis is {axis!r}: pieces have copies along axes that are not "
            "in axis, as in axis='gpu', replicate_axis='node', or none at all"
        )
    return names + copies


def check_copies(mesh: Mesh, axis: Axis, copies: Axis, replicate_axis: Axis | None) -> None:
    """Raise MeshError unless parameters that only some ranks replicate, such as experts, can be cut.

    copies           the axis along which they are replicated: `axis`, or a part of it
    replicate_axis   must be None: gradients would be summed along it, where such parameters may differ
    """
    way = 'as in axis=("dp", "ep") for experts that are cut along "ep", and have copies along "dp"'
    if not copies:
        raise MeshError(
            f"parameters that are cut along all of axis={axis!r} have no copies, so there is nothing to divide: step "
            "them with an optimizer of their own, or add an axis to the mesh, of size 1 if need be, " + way
        )
    if not set(mesh.names(copies)) <= set(mesh.names(axis)):
        raise MeshError(f"copies along {copies!r} are divided only if {copies!r} is a part of axis={axis!r}, {way}")
    if replicate_axis is not None:
        raise MeshError(
            f"gradients are added up along replicate_axis={replicate_axis!r}, and parameters with an axis of their own "
            f"may be different ones there. Name all axes in axis, {way}"
        )


@dataclass(frozen=True)
class UnitOptions:
    """How parameters are shared and what a unit of ZeRO stage 3 sends: the options of `shard_parameters`."""

    axis: Axis
    op: str
    reshard_after_forward: bool | Axis
    replicate_axis: Axis | None
    compute_dtype: Any
    reduce_dtype: Any
    gather: Callable[..., Any]
    reduce: Callable[..., Any]

    def __post_init__(self) -> None:
        one_of("op", self.op, OPS)

    @property
    def secondary_axis(self) -> Axis | None:
        """The axis of the second pieces, for the second gather."""
        return None if isinstance(self.reshard_after_forward, bool) else self.reshard_after_forward

    def names_on(self, mesh: Mesh) -> tuple[str, ...]:
        """The axes along which ranks have different data."""
        return data_axes(mesh, self.axis, self.replicate_axis, self.secondary_axis)


# --- two levels -------------------------------------------------------------------------------------------------------


class Levels(NamedTuple):
    """The R ranks along several axes: I ranks inside each of O nodes.

    inside, across   the axes of each level
    sizes            of all the axes, in the order in which positions are counted
    places           the indices, among all axes, of the axes of `inside`, then of `across`: rows in the order of
                     positions [R, n], reshaped to [*sizes, n] and permuted by `places`, are [inside, across, n]
    """

    inside: tuple[str, ...]
    across: tuple[str, ...]
    sizes: tuple[int, ...]
    places: tuple[int, ...]

    @property
    def inner_sizes(self) -> tuple[int, ...]:
        """The sizes in the order of `places`."""
        return tuple(self.sizes[place] for place in self.places)

    @property
    def back(self) -> tuple[int, ...]:
        """The permutation that undoes `places`."""
        return tuple(self.places.index(place) for place in range(len(self.places)))


def levels_of(mesh: Mesh, axis: Axis, inside: Axis) -> Levels:
    """The two levels of `axis`: `inside` names the axes along which ranks share a node.

        levels_of(Mesh(node=2, gpu=4), ("node", "gpu"), inside="gpu")

    Raises MeshError if `inside` is not a part of `axis`.
    """
    names, inner = mesh.names(axis), mesh.names(inside)
    if not set(inner) < set(names):
        raise MeshError(
            f"inside is {inside!r}, and axis is {axis!r}: inside must name some of the axes, those whose ranks share a "
            f"node, and not all of them, as in axis=('node', 'gpu'), inside='gpu'"
        )
    across = tuple(name for name in names if name not in inner)
    places = tuple(names.index(name) for name in (*inner, *across))
    return Levels(inner, across, tuple(mesh.shape[name] for name in names), places)
