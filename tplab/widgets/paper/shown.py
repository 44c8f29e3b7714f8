"""The objects that a widget can show, and its error for anything else."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np


def check_shown(things: Iterable[Any], *kinds: type) -> None:
    """Raise TypeError unless each is of one of these kinds: "this shows a Trace, not a Result; give its trace"."""
    for thing in things:
        if not isinstance(thing, kinds):
            known = " or ".join(map(a, kinds))
            raise TypeError(f"this shows {known}, not {a(type(thing))}{way_out(thing, *kinds)}")


def check_is(name: str, thing: Any, *kinds: type) -> None:
    """Raises TypeError unless an argument is of one of these kinds: "plan is 'dp8'; it must be a Plan"."""
    if not isinstance(thing, kinds):
        raise TypeError(f"{name} is {thing!r:.60}; it must be {' or '.join(map(a, kinds))}")


def a(kind: type) -> str:
    """ "a Trace", "an int", "None"."""
    name = kind.__name__
    return "None" if kind is type(None) else f"a{'n' * (name[0] in 'aeioAEIO')} {name}"


def numbers(name: str, given: Any, num_dims: int | None = None, length: int | None = None, least: float = -np.inf
            ) -> np.ndarray:  # fmt: skip
    """An argument as an array of floats. Raises ValueError where it holds anything but numbers from `least` on, in as
    many dims and as many of them as are asked for; NaN only where any number will do."""
    try:
        found = np.asarray(given, float) if given is not None else None
    except (TypeError, ValueError):  # rows of different lengths, too
        found = None
    if found is None or num_dims not in (None, found.ndim):
        raise ValueError(
            f"{name} is {given!r:.60}; give {'a list of ' * (num_dims == 1)}numbers, in rows of one length"
        )
    if length is not None and len(found) != length:
        raise ValueError(f"{name} has {len(found)} of {length} numbers, one for each x")
    if least > -np.inf and (wrong := found[~(found >= least)]).size:
        raise ValueError(f"{name} has {wrong[0]:g}; give numbers from {least:g}")
    return found


def way_out(thing: Any, *kinds: type) -> str:
    """A hint if it has an attribute of one of these kinds: "; give its trace"."""
    names = [kind.__name__.lower() for kind in kinds]
    return next((f"; give its {name}" for name in names if hasattr(type(thing), name)), "")
