"""The objects that a widget can show, and its error for anything else."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def check_shown(things: Iterable[Any], *kinds: type) -> None:
    """Raise TypeError unless each is of one of these kinds: "this shows a Trace, not a Result; give its trace"."""
    for thing in things:
        if not isinstance(thing, kinds):
            known = " or ".join(f"a {kind.__name__}" for kind in kinds)
            raise TypeError(f"this shows {known}, not a {type(thing).__name__}{way_out(thing, *kinds)}")


def way_out(thing: Any, *kinds: type) -> str:
    """A hint if it has an attribute of one of these kinds: "; give its trace"."""
    names = [kind.__name__.lower() for kind in kinds]
    return next((f"; give its {name}" for name in names if hasattr(type(thing), name)), "")
