"""Published measurements to show beside modelled values, always with their source."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from tplab.units import time_text
from tplab.widgets.paper.action import Sheet
from tplab.widgets.paper.palette import INK, PAPER


def check_measured(name: str, amount: float, by: str) -> None:
    """Raise ValueError for a measured amount without a source, or one that is impossible."""
    if not by:
        raise ValueError(f"{name!r} has a measured value; say in `by` who measured it, and where it is published")
    if not 0 <= amount < math.inf:
        raise ValueError(f"{name!r} has {amount} as its measured value; give a number from 0")


@dataclass(frozen=True)
class Durations:
    """Published durations, each from the start of what a trace shows.

    seconds   what was measured -> how long it took
    by        who measured it
    """

    seconds: Mapping[str, float] = field(default_factory=dict)
    by: str = ""

    def __post_init__(self) -> None:
        for name, duration in self.seconds.items():
            check_measured(name, duration, self.by)

    @property
    def longest(self) -> float:
        return max(self.seconds.values(), default=0.0)

    @property
    def rows(self) -> list[tuple[str, float, str]]:
        """(name, seconds, the seconds as text)."""
        return [(name, duration, time_text(duration, "s")) for name, duration in self.seconds.items()]

    @property
    def sentence(self) -> str:
        """ "Measured by the NCCL team: step 2.4 ms.", or nothing if nothing was measured."""
        return (
            f"Measured by {self.by}: {', '.join(f'{name} {text}' for name, _, text in self.rows)}." if self.rows else ""
        )


def draw_diamond(sheet: Sheet, x: float, y: float) -> None:
    """The mark of a measurement."""
    for radius, fill in ((6.2, PAPER), (5.2, INK)):
        sheet.area([(x, y - radius), (x + radius, y), (x, y + radius), (x - radius, y)], fill)
