"""Folding: attention and experts lay their own axes over the same ranks, and both are axes of one finer mesh.

A layer's attention may run on dp x cp x tp ranks, and its experts on edp x ep x etp ranks, which are the same ranks
(Liu et al. 2025, arXiv:2504.14960). Counting from the fastest axis on, an axis ends after as many ranks as the product
of the sizes so far. The ends of both layouts together are the ends of a finer mesh's axes:

    attention         dp=4   tp=2     ends after 2, 8 ranks
    experts    edp=2   ep=4           ends after 4, 8 ranks
    mesh       edp=2  dp_ep=2  tp=2   ends after 2, 4, 8 ranks

Each axis of either layout is a run of the mesh's axes: dp = (edp, dp_ep) and ep = (dp_ep, tp). Every collective accepts
a tuple of names as its axis, so nothing else is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul

from tplab.errors import MeshError
from tplab.mesh import Axis, Mesh


@dataclass(frozen=True)
class Folded:
    """Two layouts of the same ranks.

    mesh         the finer mesh, on which a program runs
    attention    the axes of the first layout, each as a name or a tuple of names of that mesh
    experts      the axes of the second one
    """

    mesh: Mesh
    attention: Mapping[str, Axis]
    experts: Mapping[str, Axis]


def fold(attention: Mapping[str, int], experts: Mapping[str, int]) -> Folded:
    """The coarsest mesh in which the axes of both layouts are runs of axes. The last axis of each is the fastest.

    An axis of the mesh that is a whole axis of either layout has its name; others are named after both, as "dp_ep".
    Raises MeshError if the layouts have different numbers of ranks, or if one axis ends after a number of ranks that
    does not divide the number after which another one ends.
    """
    first, second = Mesh(**attention), Mesh(**experts)
    if first.size != second.size:
        raise MeshError(
            f"attention has {first.size} ranks ({first}) and the experts have {second.size} ({second}); both are laid "
            "over the same ranks"
        )
    ends = _ends(first), _ends(second)
    owners = {1: ""}
    for layout, found, whose in ((first, ends[0], "of attention"), (second, ends[1], "of the experts")):
        owners |= {end: f"{name}={layout.shape[name]} {whose}" for end, name in found.items()}
    for lower, upper in pairwise(sorted(owners)):
        if upper % lower:
            raise MeshError(
                f"axis {owners[lower]} ends after {lower} ranks, which does not divide the {upper} after which axis "
                f"{owners[upper]} ends; no mesh has both: put the axes in another order, or change a size"
            )
    axes: dict[str, int] = {}
    runs: tuple[dict[str, tuple[str, ...]], ...] = ({}, {})
    for lower, upper in reversed(list(pairwise(sorted(owners)))):
        size = upper // lower
        a, e = (found[min(end for end in found if end >= upper)] for found in ends)  # the axes with this step
        if first.shape[a] == size and (a == e or a not in second.shape):
            name = a
        elif second.shape[e] == size and e not in first.shape:
            name = e
        else:
            name = f"{a}_{e}"
        axes[name] = size
        for run, axis in zip(runs, (a, e)):
            run[axis] = (*run.get(axis, ()), name)
    axes |= {name: 1 for layout in (first, second) for name, size in layout.shape.items() if size == 1}
    whole = [
        {name: found[0] if len(found := run.get(name, (name,))) == 1 else found for name in layout.shape}
        for run, layout in zip(runs, (first, second))
    ]
    return Folded(Mesh(**axes), *whole)


def _ends(layout: Mesh) -> dict[int, str]:
    """After how many ranks each axis of several ranks ends: the distance of its ranks times their number."""
    wide = [(name, size) for name, size in reversed([*layout.shape.items()]) if size > 1]
    return dict(zip(accumulate((size for _, size in wide), mul), (name for name, _ in wide)))
