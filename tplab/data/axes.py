"""The axes along which ranks have different data: those that cut parameters, and those that replicate the pieces."""

from __future__ import annotations

from typing import NamedTuple

from tplab.errors import MeshError
from tplab.mesh import Axis, Mesh


def data_axes(
    mesh: Mesh, axis: Axis, replicate_axis: Axis | None = None, reshard_axis: Axis | None = None
) -> tuple[str, ...]:
    """The names in `axis` and `replicate_axis`.

    axis             along which parameters are cut into pieces
    replicate_axis   along which the pieces are replicated
    reshard_axis     along which second pieces are cut, as given to `reshard_after_forward`: a part of `axis`, since
                     ranks along other axes may have other parameters
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


# --- two levels -------------------------------------------------------------------------------------------------------


class Levels(NamedTuple):
    """The R ranks along several axes: I ranks inside each of O nodes.

    inside, across   the axes of each level
    sizes            of all the axes, in the order in which positions are counted
    places           the indices of the axes of `inside`, then of `across`, among all axes: rows in the order of
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
