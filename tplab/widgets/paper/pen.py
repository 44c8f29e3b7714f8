"""Drawing on a Pillow image as if it were a sheet of CSS pixels; used for the still pictures.

Pillow does not smooth edges, so everything is drawn three times as large and scaled down at the end. The typeface is
the one that ships with matplotlib. We do not import matplotlib itself: that takes longer than all the drawing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from tplab.widgets.paper.action import draw_bar
from tplab.widgets.paper.letters import one_line
from tplab.widgets.paper.palette import INK, PAPER, Colour

_SCALE = 3


@cache
def _font(size: float, bold: bool, mono: bool) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    spec = find_spec("matplotlib")
    name = f"DejaVuSans{'Mono' * mono}{'-Bold' * bold}.ttf"
    for folder in (spec.submodule_search_locations or []) if spec else []:
        file = Path(folder) / "mpl-data" / "fonts" / "ttf" / name
        if file.exists():
            return ImageFont.truetype(str(file), size * _SCALE)
    return ImageFont.load_default(size * _SCALE)


class Pen:
    """A sheet of `width` x `height` pixels. Coordinates of shapes are their upper left corner, width and height."""

    def __init__(self, width: float, height: float, image: Image.Image | None = None):
        self.width, self.height = math.ceil(width), math.ceil(height)
        self._image = image or Image.new("RGB", (self.width * _SCALE, self.height * _SCALE), PAPER)
        self._draw = ImageDraw.Draw(self._image)

    def copy(self) -> Pen:
        return Pen(self.width, self.height, self._image.copy())

    def image(self) -> Image.Image:
        return self._image.reduce(_SCALE)

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *,
        fill: Colour | None = None,
        edge: Colour | None = None,
        radius: float = 0,
        line: float = 1,
    ) -> None:
        corners = [x * _SCALE, y * _SCALE, (x + width) * _SCALE - 1, (y + height) * _SCALE - 1]
        if corners[2] < corners[0] or corners[3] < corners[1]:
            return
        width_px = round(line * _SCALE) if edge else 0
        self._draw.rounded_rectangle(corners, radius * _SCALE, fill=fill, outline=edge, width=width_px)

    def line(self, points: Sequence[tuple[float, float]], colour: Colour, line: float = 1) -> None:
        scaled = [(x * _SCALE, y * _SCALE) for x, y in points]
        self._draw.line(scaled, fill=colour, width=max(1, round(line * _SCALE)), joint="curve")

    def area(self, points: Sequence[tuple[float, float]], fill: Colour) -> None:
        """A filled shape with these corners."""
        if len(points) > 2:
            self._draw.polygon([(x * _SCALE, y * _SCALE) for x, y in points], fill=fill)

    def hatch(self, x: float, y: float, width: float, height: float, colour: Colour) -> None:
        """Slanted lines, for idle time."""
        offset = -height + (-x) % 6
        while offset < width:
            a, b = max(offset, 0), min(offset + height, width)
            if a < b:
                self.line([(x + a, y + height - (a - offset)), (x + b, y + height - (b - offset))], colour, 1)
            offset += 6

    def bar(self, x: float, y: float, width: float, height: float, texts: Sequence[str] = (), **look: Any) -> None:
        draw_bar(self, x, y, width, height, texts, **look)

    def width_of(self, text: str, size: float = 11, bold: bool = False, mono: bool = False) -> float:
        return text_width(text, size, bold, mono)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 11,
        bold: bool = False,
        fill: Colour = INK,
        anchor: str = "mm",
        mono: bool = False,
    ) -> float:
        """Write `text`; anchor as in Pillow: l m r, then a m s (top, middle, baseline). Returns the text's width.

        mono: in a monospaced font, which distinguishes I from 1.
        """
        font, text = _font(size, bold, mono), one_line(text)
        self._draw.text((x * _SCALE, y * _SCALE), text, font=font, fill=fill, anchor=anchor)
        return font.getlength(text) / _SCALE


def text_width(text: str, size: float = 11, bold: bool = False, mono: bool = False) -> float:
    return _font(size, bold, mono).getlength(one_line(text)) / _SCALE
