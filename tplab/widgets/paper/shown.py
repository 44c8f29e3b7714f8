"""What a widget can show, and what it says of anything else."""

from __future__ import annotations

from typing import Any


def check_shown(thing: Any, *kinds: type) -> None:
    """Raises TypeError unless it is one of these kinds: "this shows a Trace, not a Result; give its trace"."""
    if not isinstance(thing, kinds):
        names = [f"a {kind.__name__}" for kind in kinds]
        raise TypeError(f"this shows {' or '.join(names)}, not a {type(thing).__name__}{way_out(thing, *kinds)}")


def way_out(thing: Any, *kinds: type) -> str:
    """Where it has something of one of these kinds: "; give its trace"."""
    names = [kind.__name__.lower() for kind in kinds]
    return next((f"; give its {name}" for name in names if hasattr(type(thing), name)), "")
