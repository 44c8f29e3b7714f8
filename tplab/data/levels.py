"""Two levels: first among the ranks of a node, then across nodes, or the reverse. Which axes belong to which level."""

from __future__ import annotations

from typing import NamedTuple

from tplab.errors import MeshError
from tplab.mesh import Axis, Mesh


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
