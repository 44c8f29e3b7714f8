"""The axes of a mesh along which groups of ranks lie."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import permutations

from tplab.jax.tracing.hlo import Groups
from tplab.mesh import Mesh


@lru_cache(maxsize=1024)
def axes_along(mesh: Mesh, groups: Groups, are_pairs: bool = False) -> tuple[str, Sequence[tuple[int, ...]]]:
    """The axes of the mesh along which the ranks of these groups differ, "dp,tp", and the groups; "" where each rank
    is alone. A group may have only some of the ranks along its axes; for pairs it has all of those ranks."""
    places = [[mesh.coordinates(rank) for rank in group] for group in groups]
    names = [name for name in mesh.shape if any(at[name] != group[0][name] for group in places for at in group)]
    if not names:
        return "", ()
    along = mesh.groups(tuple(names))
    is_whole = set(map(frozenset, along)) == set(map(frozenset, groups))
    return ",".join(names), along if are_pairs or is_whole else groups


@lru_cache(maxsize=1024)
def axes_in_order(mesh: Mesh, groups: Groups) -> tuple[str, ...]:
    """The same axes, in the order in which they number the ranks of each group: pieces of a dim that is sharded over
    ("tp", "dp") are in another order than over ("dp", "tp")."""
    names = [name for name in axes_along(mesh, groups)[0].split(",") if name]
    for order in permutations(names) if names else ():
        if all(tuple(group) in mesh.groups(order) for group in groups):
            return order
    return tuple(names)
