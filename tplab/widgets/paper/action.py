"""The bar of an action of a schedule, on any sheet; static/action.js draws the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tplab.schedules.action import B, F, I, W
from tplab.widgets.paper.palette import DIM, INK, KINDS, PAPER, Colour, mix

SOLID = {F: "F", B: "IW", I: "I", W: "W"}


class Sheet(Protocol):
    """A drawing surface: a `Pen` or a `Scene`."""

    def box(self, x: float, y: float, width: float, height: float, *, fill: Colour | None = None,
            edge: Colour | None = None, radius: float = 0, line: float = 1) -> None: ...  # fmt: skip
    def line(self, points: Sequence[tuple[float, float]], colour: Colour, line: float = 1) -> None: ...
    def area(self, points: Sequence[tuple[float, float]], fill: Colour) -> None: ...
    def hatch(self, x: float, y: float, width: float, height: float, colour: Colour) -> None: ...
    def width_of(self, text: str, size: float = 11, bold: bool = False, mono: bool = False) -> float: ...
    def text(self, x: float, y: float, text: str, *, size: float = 11, bold: bool = False, fill: Colour = INK,
             anchor: str = "mm", mono: bool = False) -> float: ...  # fmt: skip


def draw_action(
    sheet: Sheet,
    kind: int,
    label: str,
    x: float,
    right: float,
    y: float,
    size: float,
    tier: float = 0.0,
    colour: str | None = None,
) -> None:
    """Draw a bar from x to right, in the colours of its kind: a B is an I and a W. Later stages of its rank are
    lighter, up to `tier` 1. With a given `colour`, F is solid, B and I are tinted, W is pale."""
    gap = 1.0 if right - x > 3.5 else 0.0
    x, width = x + gap / 2, max(right - x - gap, 0.7)
    radius = 3 if width > 4 and size > 5 else 0
    share, ink = 1 - 0.45 * tier, INK
    if colour is None and kind in SOLID:
        fills = [mix(KINDS[name], share) for name in SOLID[kind]]
        for place, fill in enumerate(fills):
            sheet.box(x + place * width / len(fills), y, width / len(fills), size, fill=fill, radius=radius)
        if len(fills) == 2 and radius:  # one bar of two halves
            sheet.box(x + width / 2 - 3, y, 3, size, fill=fills[0])
            sheet.box(x + width / 2, y, 3, size, fill=fills[1])
        ink = INK if sum(fills[-1]) > 330 else PAPER
    elif kind == F and colour is not None:
        sheet.box(x, y, width, size, fill=mix(colour, share), radius=radius)
        ink = PAPER
    elif kind in SOLID and colour is not None:
        edge = colour if radius else None
        sheet.box(x, y, width, size, fill=mix(colour, {B: 0.42, I: 0.3}.get(kind, 0.1)), edge=edge, radius=radius)
    else:
        sheet.box(x, y, width, size, fill=mix(DIM, 0.2), edge=DIM if radius else None, radius=radius)
    for text in (label, label[:1] if kind in SOLID else ""):
        if size >= 9 and text and sheet.width_of(text, 9.5, mono=True) < width - 1:
            sheet.text(x + width / 2, y + size / 2, text, size=9.5, fill=ink, mono=True)
            break
