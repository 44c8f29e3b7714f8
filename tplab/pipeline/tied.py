"""Tied parameters, which several stages share: how they are listed, and checks of such a list."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from tplab.errors import ScheduleError

Tied = Sequence[Sequence[tuple[int, str]]]
"""Groups of tied parameters; each parameter is given by its place, (stage, name)."""


def check_tied(tied: Any, num_stages: int) -> None:
    """Raise ScheduleError unless `tied` lists (stage, name) for stages that exist."""
    for tie in tied if _is_list(tied) else [tied]:
        for place in tie if _is_list(tie) else [tie]:
            if not (_is_list(place) and len(place) == 2 and isinstance(place[0], int) and isinstance(place[1], str)):
                raise ScheduleError(
                    f"tied has {place!r} where it must say (stage, name), a list of them for each parameter that is "
                    'one, as [[(0, "embedding.weight"), (3, "head.weight")]]'
                )
            if not 0 <= place[0] < num_stages:
                raise ScheduleError(f"tied names stage {place[0]}; there are stages 0 to {num_stages - 1}")


def check_tied_name(stage: int, name: str, names: Collection[str]) -> None:
    """Raise ScheduleError if a stage has no parameter of this name."""
    if name not in names:
        raise ScheduleError(
            f"tied names parameter {name!r} of stage {stage}, which it does not have; it has "
            f"{', '.join(names) or 'no parameters'}"
        )


def _is_list(x: Any) -> bool:
    return isinstance(x, Sequence) and not isinstance(x, str)
