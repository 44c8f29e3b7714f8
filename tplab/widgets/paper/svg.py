"""Drawing as SVG text, with the same calls as on a `Pen`; used for exported pictures."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from tplab.widgets.paper.letters import about_width, one_line
from tplab.widgets.paper.palette import INK, PAPER, Colour

_ANCHOR = {"l": "start", "m": "middle", "r": "end"}


class SvgPen:
    """A sheet of `width` x `height` pixels, like `Pen`."""

    def __init__(self, width: float, height: float):
        self.width, self.height = width, height
        self._parts: list[str] = []

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
        outline = f' stroke="{_colour(edge)}" stroke-width="{line:g}"' if edge else ""
        round_ = f' rx="{radius:g}"' if radius else ""
        self._parts.append(
            f'<rect x="{x:.2f}" y="{y:.2f}" width="{max(width, 0):.2f}" height="{max(height, 0):.2f}"{round_} '
            f'fill="{_colour(fill)}"{outline}/>'
        )

    def line(self, points: Sequence[tuple[float, float]], colour: Colour, line: float = 1) -> None:
        path = " ".join(f"{x:.2f},{y:.2f}" for x, y in points)
        stroke = f'stroke="{_colour(colour)}" stroke-width="{line:g}"'
        self._parts.append(f'<polyline points="{path}" fill="none" {stroke}/>')

    def area(self, points: Sequence[tuple[float, float]], fill: Colour) -> None:
        path = " ".join(f"{x:.2f},{y:.2f}" for x, y in points)
        self._parts.append(f'<polygon points="{path}" fill="{_colour(fill)}"/>')

    def hatch(self, x: float, y: float, width: float, height: float, colour: Colour) -> None:
        if width > 0 and height > 0:
            self._parts.append(
                f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" fill="url(#idle)" '
                f'color="{_colour(colour)}"/>'
            )

    def width_of(self, text: str, size: float = 11, bold: bool = False, mono: bool = False) -> float:
        """The approximate width: the reader's own fonts draw the text."""
        return about_width(text, size, bold, mono)

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
        face = ' font-weight="600"' if bold else ""
        face += ' font-family="ui-monospace, Menlo, Consolas, DejaVu Sans Mono, monospace"' if mono else ""
        self._parts.append(
            f'<text x="{x:.2f}" y="{y:.2f}" font-size="{size:g}"{face} fill="{_colour(fill)}" '
            f'text-anchor="{_ANCHOR[anchor[0]]}" dominant-baseline="central">{escape(one_line(text))}</text>'
        )
        return self.width_of(text, size, bold, mono)

    def document(self, title: str) -> str:
        """The whole SVG. `title` is what it shows, for screen readers."""
        size = f'width="{self.width:g}" height="{self.height:g}" viewBox="0 0 {self.width:g} {self.height:g}"'
        hatch = (
            '<defs><pattern id="idle" width="6" height="6" patternUnits="userSpaceOnUse" '
            'patternTransform="rotate(45)"><path d="M0 0V6" stroke="currentColor" stroke-width="1.6"/></pattern></defs>'
        )
        ground = f'<rect width="{self.width:g}" height="{self.height:g}" fill="{PAPER}"/>'
        font = 'font-family="Inter, system-ui, DejaVu Sans, sans-serif"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size} {font}>'
        return "\n".join([head, f"<title>{escape(one_line(title))}</title>", hatch, ground, *self._parts, "</svg>\n"])


def _colour(colour: Colour | None) -> str:
    if colour is None:
        return "none"
    return colour if isinstance(colour, str) else f"rgb({','.join(map(str, colour))})"
