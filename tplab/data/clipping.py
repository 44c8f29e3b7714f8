"""Clipping by the global norm: checks of its arguments, and the axes that a spec cuts along."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from tplab.errors import SpecError
from tplab.mesh import Mesh
from tplab.sharding import P

EPSILON = 1e-6
"""Added to the norm before dividing by it, as torch.nn.utils.clip_grad_norm_ does."""


def check_norm_type(norm_type: Any) -> float:
    """The p of a p-norm: above 0, or infinity. Raises ValueError."""
    p = float(norm_type)
    if not p > 0:
        raise ValueError(
            f"norm_type is {norm_type!r}; it must be above 0: 2 for the Euclidean norm, inf for the maximum"
        )
    return p


def check_max_norm(max_norm: Any) -> float:
    """The largest norm that is allowed. Raises ValueError if it is negative or not a number."""
    most = float(max_norm)
    if not most >= 0:
        raise ValueError(f"max_norm is {max_norm!r}; it must be the largest norm that is left alone, 0 or more")
    return most


def spec_of(name: Any, specs: Mapping[Any, Any] | None, what: str) -> P:
    """How a parameter is sharded; replicated if there are no specs. Raises SpecError."""
    if specs is None:
        return P()
    spec = specs.get(name)
    if not isinstance(spec, P):
        raise SpecError(
            f"specs say nothing of {what}; give a P for every parameter that is trained, P() for one that every rank "
            "holds whole, or its pieces would be counted wrong"
        )
    return spec


def specs_in(specs: Any) -> list[Any]:
    """The values of {name: P}, if it is given. Raises SpecError if it is not a mapping."""
    if specs is None:
        return []
    if not isinstance(specs, Mapping):
        raise SpecError(
            f"specs is {specs!r}; give a P by the name of each parameter, {{'weight': P()}}; for Stages, by stage and "
            "name, {0: {'weight': P()}}"
        )
    return list(specs.values())


def cut_along(specs: Iterable[Any], mesh: Mesh, more: Iterable[str] = ()) -> tuple[str, ...]:
    """The axes along which ranks hold different elements, in the mesh's order. Raises SpecError, MeshError."""
    named = set(more)
    for spec in specs:
        if not isinstance(spec, P):
            raise SpecError(f"specs has {spec!r} where a P belongs; P() stands for all of it on every rank")
        named |= set(spec.axis_names)
    if named:
        mesh.names(tuple(named))  # are there such axes?
    return tuple(name for name in mesh.axis_names if name in named)


def root(total: Any, p: float) -> Any:
    """The norm from a sum of p-th powers. For p = infinity the total is a maximum, and is the norm itself."""
    return total if math.isinf(p) else total ** (1 / p)
