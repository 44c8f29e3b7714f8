"""Bars on any sheet, and the looks of those that are actions of a schedule; static/scene.js paints the same bars."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import Any, Protocol

from tplab.schedules.action import B, F, I, W
from tplab.widgets.paper.palette import DIM, INK, KINDS, PAPER, Colour, hue, lighter, mix, rgb

SOLID = {F: "F", B: "IW", I: "I", W: "W"}
TINTS = {B: 0.42, I: 0.28, W: 0.1}  # of a stage's or a microbatch's colour, in which F is solid
SMALL = 9.5  # of letters


class Sheet(Protocol):
    """A drawing surface: a `Pen` or a `Scene`."""

    def box(self, x: float, y: float, width: float, height: float, *, fill: Colour | None = None,
            edge: Colour | None = None, radius: float = 0, line: float = 1) -> None: ...  # fmt: skip
    def line(self, points: Sequence[tuple[float, float]], colour: Colour, line: float = 1) -> None: ...
    def area(self, points: Sequence[tuple[float, float]], fill: Colour) -> None: ...
    def hatch(self, x: float, y: float, width: float, height: float, colour: Colour) -> None: ...
    def bar(self, x: float, y: float, width: float, height: float, texts: Sequence[str] = (), **look: Any) -> None: ...
    def width_of(self, text: str, size: float = 11, bold: bool = False, mono: bool = False) -> float: ...
    def text(self, x: float, y: float, text: str, *, size: float = 11, bold: bool = False, fill: Colour = INK,
             anchor: str = "mm", mono: bool = False) -> float: ...  # fmt: skip


@cache
def look_of(kind: int, height: float, tier: float = 0.0, colour: str | None = None, outlined: bool = False
            ) -> dict[str, Any]:  # fmt: skip
    """The look of an action's bar.

    tier      the place of its stage among those of its rank, from 0 to 1: later ones are lighter
    colour    of its stage or microbatch; if None, it has the colours of its kind, and a B is an I and a W
    outlined  whether it is only predicted
    """
    letters = {"size": 11 if height >= 18 else SMALL, "mono": True}
    if outlined:
        edge = KINDS[SOLID[kind][0]] if kind in SOLID else hue(-1)
        small = mix(edge, 0.7 if height < 4 else 0.4)
        return {"fill": PAPER, "small": small, "edge": edge, "thin": True, "ink": DIM, **letters}
    if colour is None and kind in SOLID:
        fill, *other = (lighter(KINDS[name], 1 - 0.45 * tier) for name in SOLID[kind])
        return {"fill": fill, "other": next(iter(other), None), **letters}
    edge = colour or hue(-1)
    if kind == F:
        return {"fill": mix(edge, 1 - 0.45 * tier), **letters}
    tint = TINTS.get(kind, 0.28)
    looks = {"fill": mix(edge, tint), "small": mix(edge, tint + 0.15), "edge": edge, "dashes": kind == W, "ink": INK}
    return {**looks, **letters}


def texts_of(kind: int, label: str, height: float) -> tuple[str, ...]:
    """What may be written on an action: its label, or the letter of its kind."""
    return () if height < 9 or not label else (label, label[:1]) if kind in SOLID else (label,)


def draw_action(
    sheet: Sheet, kind: int, label: str, x: float, y: float, width: float, height: float, *how: Any, **more: Any
) -> None:
    """Draw the bar of an action, with a look as in `look_of`."""
    sheet.bar(x, y, width, height, texts_of(kind, label, height), **look_of(kind, height, *how, **more))


def draw_bar(
    sheet: Sheet, x: float, y: float, width: float, height: float, texts: Sequence[str] = (), *,
    fill: Colour | None = None, other: Colour | None = None, small: Colour | None = None, edge: Colour | None = None,
    line: float = 1, ink: Colour | None = None, size: float = SMALL, mono: bool = False, anchor: str = "mm",
    thin: bool = False, dashes: bool = False,
) -> None:  # fmt: skip
    """Draw a bar of boxes and letters, with the first of the texts that has room.

    other  the fill of its right half      small  its fill if it has no room for an edge
    ink    of its text; if None, whatever is easier to read on its fill
    """
    is_large, gap = width > 5 and height > 5.5, 1.0 if width > 3.5 else 0.0
    left, y, wide, height = x + gap / 2, y + 0.5, max(width - gap, 0.8), height - 1
    looks = {"edge": edge if is_large else None, "radius": 3 if is_large else 0, "line": line}
    sheet.box(left, y, wide, height, fill=fill if is_large else small or fill, **looks)
    if other:
        sheet.box(left + wide / 2, y, wide / 2, height, fill=other, radius=looks["radius"])
        sheet.box(left + wide / 2, y, min(3, wide / 2), height, fill=other)
    red, green, blue = ((part / 255) ** 2.2 for part in _rgb(other or fill or PAPER))
    is_light = 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.19
    room, at = (width - 8, left + 5.5) if anchor[0] == "l" else (width - 1.5, left + wide / 2)
    letters = ink or (INK if is_light else PAPER)
    for text, tall in product(filter(None, texts), (size, SMALL)):
        if sheet.width_of(text, tall, mono=mono) <= room:
            sheet.text(at, y + height / 2, text, size=tall, mono=mono, anchor=anchor, fill=letters)
            break


def _rgb(colour: Colour) -> tuple[int, int, int]:
    return rgb(colour) if isinstance(colour, str) else colour
