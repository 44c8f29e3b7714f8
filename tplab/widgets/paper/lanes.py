"""Lanes over time: the ground that all of them have, and the critical path through their bars."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from tplab.widgets.paper.palette import ACCENT, DIM, HATCH, SOFT
from tplab.widgets.paper.scene import Scene, Time

TOP = 6  # above the lanes
Bar = tuple[float, float, float, float]
"""When it begins, its upper side, how long it is, and its height."""


def lanes(
    width: float, height: float, label: str, begin: float, end: float, right: float, ranks: int, unit: str
) -> Scene:
    """A scene for the lanes of so many ranks, with room for their names."""
    return Scene(width, height, label, Time(begin, max(end, begin + 1e-12), 58 if ranks <= 16 else 34, right, unit))


def draw_lane(
    sheet: Scene, row: int, name: int, y: float, pitch: float, height: float, end: float, idle: float,
    word: str = "rank",
) -> bool:  # fmt: skip
    """The name of a lane, if there is room for it, and its ground until `end`, of which `idle` pixels are hatched."""
    begin, is_named = sheet.time.begin if sheet.time else 0, row % math.ceil(12 / pitch) == 0
    text = (f"{word} {name}" if sheet.time and sheet.time.left > 50 else f"{name}") if is_named else ""
    sheet.text(0, y + (pitch - 4) / 2, text, size=10.5, fill=DIM, anchor="lm")
    with sheet.in_time():
        sheet.box(begin, y, end - begin, height, fill=SOFT)
        if idle:
            sheet.hatch(begin, y, end - begin, idle, HATCH)
    return is_named


def draw_path(sheet: Scene, paler: Iterable[Bar], chain: Iterable[tuple[Bar, Callable[[], Any]]]) -> None:
    """Make these boxes paler, but for the bars of a chain, each with its drawing, and connect each with the next."""
    before = None
    with sheet.in_time():
        for box in paler:
            sheet.veil(*box)
        for (x, y, width, height), draw in chain:
            draw()
            sheet.bar(x, y, width, height, edge=ACCENT, line=2)
            if before and abs(before[1] - y - height / 2) > 1:
                sheet.line([before, (x, y + height / 2)], ACCENT, 2)
            before = x + width, y + height / 2
