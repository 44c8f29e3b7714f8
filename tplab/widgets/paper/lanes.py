"""Lanes over time: the ground that all of them have, and a chain of their bars."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

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


def draw_chain(sheet: Scene, chain: Sequence[Bar]) -> None:
    """Outline the bars of a chain, and connect each with the next."""
    sheet.bars(np.reshape(chain, (-1, 4)), [_OUTLINE] * len(chain), [()] * len(chain), -1)
    for (x, y, width, height), (begin, low, _, tall) in pairwise(chain):
        ends = (x + width, y + height / 2), (begin, low + tall / 2)
        if abs(ends[0][1] - ends[1][1]) > 1:
            sheet.line(ends, ACCENT, 2)


_OUTLINE = {"edge": ACCENT, "line": 2}
