"""A scene as an SVG document, for exported pictures. The reader's own fonts draw its letters."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from tplab.widgets.paper.action import draw_bar
from tplab.widgets.paper.letters import one_line
from tplab.widgets.paper.palette import HATCH, PAPER, Colour
from tplab.widgets.paper.scene import Part, Scene

_ANCHOR = {"l": "start", "m": "middle", "r": "end"}
_MONO = "ui-monospace, Menlo, Consolas, DejaVu Sans Mono, monospace"
_HATCH = (
    '<defs><pattern id="idle" width="6" height="6" patternUnits="userSpaceOnUse" '
    f'patternTransform="rotate(45)"><path d="M0 0V6" stroke="{HATCH}" stroke-width="1.6"/></pattern></defs>'
)


def svg(scene: Scene, title: str) -> str:
    """The scene without a playhead. `title` describes it for screen readers."""
    size = f'width="{scene.width:g}" height="{scene.height:g}" viewBox="0 0 {scene.width:g} {scene.height:g}"'
    font = 'font-family="Inter, system-ui, DejaVu Sans, sans-serif"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size} {font}>'
    ground = f'<rect width="{scene.width:g}" height="{scene.height:g}" fill="{PAPER}"/>'
    flat = Scene(scene.width, scene.height)
    scene.paint(flat)
    drawn = [_element(part, dict(part.look)) for part in flat.parts]
    return "\n".join([head, f"<title>{escape(one_line(title))}</title>", _HATCH, ground, *drawn, "</svg>\n"])


def _element(part: Part, look: Mapping[str, Any]) -> str:
    stroke = f'stroke="{_colour(look.get("colour") or look.get("edge"))}" stroke-width="{look.get("line", 1):g}"'
    fill = f'fill="{_colour(look.get("fill"))}"'
    if part.points:
        shape = "polyline" if part.method == "line" else "polygon"
        path = " ".join(f"{x:.2f},{y:.2f}" for x, y in part.points)
        return f'<{shape} points="{path}" {fill}{f" {stroke}" * (part.method == "line")}/>'
    if part.method == "text":
        x, y = part.place
        face = ' font-weight="600"' * bool(look.get("bold")) + f' font-family="{_MONO}"' * bool(look.get("mono"))
        return (
            f'<text x="{x:.2f}" y="{y:.2f}" font-size="{look["size"]:g}"{face} {fill} '
            f'text-anchor="{_ANCHOR[look["anchor"][0]]}" dominant-baseline="central">{escape(part.text)}</text>'
        )
    x, y, width, height = part.place
    if part.method == "bar":
        boxes = Scene(0, 0)
        draw_bar(boxes, x, y, width, height, part.text.split("\n"), **look)
        return "".join(_element(box, dict(box.look)) for box in boxes.parts)
    where = f'x="{x:.2f}" y="{y:.2f}" width="{max(width, 0):.2f}" height="{max(height, 0):.2f}"'
    if part.method == "hatch":
        return f'<rect {where} fill="url(#idle)"/>'
    corners = f' rx="{look["radius"]:g}"' if look.get("radius") else ""
    return f"<rect {where}{corners} {fill}{f' {stroke}' if look.get('edge') else ''}/>"


def _colour(colour: Colour | None) -> str:
    if colour is None:
        return "none"
    return colour if isinstance(colour, str) else f"rgb({','.join(map(str, colour))})"
