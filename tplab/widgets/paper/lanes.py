"""Lanes over time: the ground that all of them have, and the critical path through their bars."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tplab.widgets.paper.palette import ACCENT, DIM, HATCH, SOFT
from tplab.widgets.paper.scene import Scene

TOP = 6  # above the lanes
Bar = tuple[float, float, float, float]
"""When it begins, its upper side, how long it is, and its height."""


def draw_lane(sheet: Scene, name: str, y: float, height: float, end: float, idle: float = 0, busy: float = 0) -> None:
    """The name of a lane beside its first `busy` pixels, and its ground until `end`, of which `idle` are hatched."""
    begin = sheet.time.begin if sheet.time else 0
    sheet.text(0, y + (busy or idle or height) / 2, name, size=10.5, fill=DIM, anchor="lm")
    with sheet.in_time():
        sheet.box(begin, y, end - begin, height, fill=SOFT)
        if idle:
            sheet.hatch(begin, y, end - begin, idle, HATCH)


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
