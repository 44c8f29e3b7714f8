"""The legend of a picture, drawn by Python for both the page and the still picture."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from tplab.schedules.action import B, F, I, W
from tplab.widgets.paper.action import Sheet, draw_action
from tplab.widgets.paper.measured import draw_diamond
from tplab.widgets.paper.palette import DIM, HATCH, HUES, INK, KINDS, LINE, OPS, SOFT, WORK, Colour, mix

WIDE, TALL, LINE_HEIGHT = 18, 11, 18
SIZE = 10.5  # of the letters
_ACTIONS = {"F": F, "B": B, "I": I, "W": W}


class Key(NamedTuple):
    """An entry of a legend: a text, and a sample of the mark that it explains.

    sign    "box"; "border", with a thick edge; in its colour "hatch", "dashes", "dashed", "stair"; in the fill's
            "cross", "disc", "strip"; "parts", segments of a sum; "hues", several colours; "later", a rank's stages;
            "diamond", a measurement; "F", "B", "I", "W", an action, in its own or the fill's colour; "" only a text
    """

    text: str
    fill: Colour | None = None
    edge: Colour | None = None
    sign: str = "box"

    def draw(self, sheet: Sheet, x: float, y: float) -> None:
        """Draw the mark in a box of 18 x 11 pixels."""
        edge, middle = self.edge or INK, y + TALL / 2
        if self.sign == "diamond":
            draw_diamond(sheet, x + 9, middle)
        elif self.sign == "disc":
            sheet.box(x + 5, middle - 4, 8, 8, fill=self.fill, edge=self.edge, radius=4)
        elif self.sign == "cross":
            for up in (-3.2, 3.2):
                sheet.line([(x + 5.8, middle - up), (x + 12.2, middle + up)], self.fill or INK, 1.6)
        elif self.sign == "stair":
            sheet.line([(x, y + 2), (x + 9, y + 2), (x + 9, y + 9), (x + 18, y + 9)], edge, 1)
        elif self.sign == "dashes":
            dashes(sheet, x, x + WIDE, middle)
        elif self.sign == "dashed":
            dashed(sheet, x + 0.5, y + 0.5, WIDE - 1, TALL - 1, edge, 1.6)
        elif self.sign in _ACTIONS:
            draw_action(sheet, _ACTIONS[self.sign], "", x, y, WIDE + 1, TALL, colour=str(self.fill or "") or None)
        elif self.sign in _STRIPS:
            for begin, end, fill in _STRIPS[self.sign]:
                sheet.box(x + begin * WIDE, y, (end - begin) * WIDE, TALL, fill=fill)
        elif self.sign in ("strip", "parts"):
            for begin, end in ((0, 1),) if self.sign == "strip" else ((0, 0.31), (0.35, 0.65), (0.69, 1)):
                fill, low = (LINE if begin > 0.5 else self.fill), y + (4 if self.sign == "strip" else 7)
                sheet.box(x + begin * WIDE, low, (end - begin) * WIDE, y + TALL - low, fill=fill)
        elif self.sign:
            looks = {} if self.sign == "hatch" else {"edge": self.edge, "radius": 3}
            sheet.box(x, y, WIDE, TALL, fill=self.fill, line=2 if self.sign == "border" else 1, **looks)
            if self.sign == "hatch":
                sheet.hatch(x, y, WIDE, TALL, edge)


_STRIPS = {
    "hues": [(place / 4, (place + 1) / 4, HUES[place]) for place in range(4)],
    "later": [(0, 0.5, KINDS["F"]), (0.5, 1, mix(KINDS["F"], 0.55))],
}
IDLE = Key("idle", SOFT, HATCH, "hatch")
WORKS = {kind: (mix(colour, 0.55), colour) for kind, colour in OPS.items()}
"""The fill and the outline of computing on a timeline, by kind. Collectives, by their effect, are paler."""
WORKS |= {kind: (mix(OPS[kind], 0.24), OPS[kind]) for kind in ("combines", "moves")}
OTHER_WORK = Key("other work", mix(WORK, 0.42), WORK)


def actions(kinds: Iterable[int], colour: Colour | None = None) -> list[Key]:
    """The entries for the kinds of a schedule's actions that occur."""
    says = {"F": "F forward", "B": "B backward: I, then W", "I": "I input gradient", "W": "W weight gradient"}
    there = {*kinds}
    return [Key(text, colour, None, sign) for sign, text in says.items() if _ACTIONS[sign] in there]


def draw_legend(sheet: Sheet, keys: Sequence[Key], left: float, y: float, width: float) -> None:
    """Draw the legend in as many lines as necessary; y is the middle of the first."""
    for key, (x, line) in zip(keys, _places(keys, width, sheet.width_of)):
        x, middle = left + x, y + LINE_HEIGHT * line
        key.draw(sheet, x, middle - TALL / 2)
        sheet.text(x + 24 * bool(key.sign), middle, key.text, size=SIZE, fill=DIM, anchor="lm")


def legend_height(keys: Sequence[Key], width: float, width_of: Callable[..., float]) -> float:
    return LINE_HEIGHT * (1 + max((line for _, line in _places(keys, width, width_of)), default=-1))


def _places(keys: Sequence[Key], width: float, width_of: Callable[..., float]) -> list[tuple[float, int]]:
    places: list[tuple[float, int]] = []
    x, line = 0.0, 0
    for key in keys:
        room = 24 * bool(key.sign) + width_of(key.text, SIZE)
        if x and x + room > width:
            x, line = 0.0, line + 1
        places.append((x, line))
        x += room + 16
    return places


def dashes(sheet: Sheet, left: float, right: float, y: float) -> None:
    """A dashed line, for a limit."""
    for x in np.arange(left, right, 8.0).tolist():
        sheet.line([(x, y), (min(x + 5, right), y)], INK, 1.4)


def dashed(sheet: Sheet, x: float, y: float, width: float, height: float, colour: Colour, line: float = 1) -> None:
    """The outline of a box, in dashes."""
    right, low = x + width, y + height
    for x0, y0, x1, y1 in ((x, y, right, y), (x, low, right, low), (x, y, x, low), (right, y, right, low)):
        count = max(2, round(math.hypot(x1 - x0, y1 - y0) / 5))
        for dash in range(count):
            ends = [(dash + part) / count for part in (0.22, 0.78)]
            sheet.line([(x0 + (x1 - x0) * at, y0 + (y1 - y0) * at) for at in ends], colour, line)
