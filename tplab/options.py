"""Checks of arguments for `run` in both frameworks."""

from __future__ import annotations

from typing import Any

import numpy as np

from tplab.errors import SpecError
from tplab.mesh import Mesh


def check_run(fn: Any, mesh: Any, *, seed: Any, keep_values: Any) -> None:
    """Raise TypeError unless `run` was given a function and a mesh, and ValueError if a number is invalid."""
    if not isinstance(mesh, Mesh) or not callable(fn):
        raise TypeError(f"run takes a function and a mesh, as run(f, Mesh(tp=4), ...), not {fn!r} and {mesh!r}")
    check_counts(seed=seed, keep_values=keep_values)


def check_counts(**given: Any) -> None:
    """Raise ValueError unless each of these is a whole number, 0 or more."""
    for name, number in given.items():
        if isinstance(number, bool) or not isinstance(number, int | np.integer) or number < 0:
            raise ValueError(f"{name} is {number!r}; it must be a whole number, 0 or more")


def check_entries(specs: Any, count: int, name: str, what: str) -> None:
    """Raise SpecError unless the specs are a sequence with one entry for each of `count` things."""
    if not isinstance(specs, tuple | list):
        raise SpecError(f"{name} is {specs!r}; give a P, or a tuple with one P for each of the {count} {what}")
    if len(specs) != count:
        raise SpecError(f"{name} has {len(specs)} entries, but there are {count} {what}; give one for each")


def no_out_specs() -> SpecError:
    """The error for reading the whole result of a run without `out_specs`."""
    return SpecError(
        "run was given no out_specs, so it does not know how the ranks' results make a whole; "
        "give out_specs (P() where all ranks return the same), or read .per_rank"
    )
