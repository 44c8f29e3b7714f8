"""The frame of a still picture: a card with its heading, legend, pictures and sentence, as a PNG."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from tplab.widgets.paper.apng import encode
from tplab.widgets.paper.frame import draw_edge, draw_head
from tplab.widgets.paper.legend import SIZE, Key, draw_legend, legend_height
from tplab.widgets.paper.palette import DIM
from tplab.widgets.paper.pen import Pen, text_width
from tplab.widgets.paper.scene import Scene

MARGIN, LINE_HEIGHT, WIDEST = 20, 17, 930


def still(
    title: str,
    sentence: str,
    scenes: Sequence[Scene],
    position: float = 0,
    *,
    about: str = "",
    badge: str = "",
    legend: Sequence[Key] = (),
    note: str = "",
    gap: float = 15,
) -> bytes:
    """The scenes at a position of the playhead, side by side, or below each other if they are too wide for that.
    `note` is at the end of the legend's line."""
    beside = sum(scene.width for scene in scenes) + gap * (len(scenes) - 1)
    across = beside <= WIDEST
    inside = beside if across else max(scene.width for scene in scenes)
    inside = max(inside, 40 + text_width(title, 14, bold=True) + text_width(about + badge, 11), 520)
    body, keys = [scene.height for scene in scenes], legend_height(legend, inside - text_width(note, SIZE), text_width)
    lines, top = textwrap.wrap(sentence, int(inside / 6.52)), 48 + keys
    bottom = top + (max(body) if across else sum(body) + gap * (len(body) - 1))
    pen = Pen(inside + 2 * MARGIN, bottom + LINE_HEIGHT * len(lines) + 18)
    draw_edge(pen, pen.width, pen.height)
    draw_head(pen, pen.width, title, about, badge, MARGIN)
    draw_legend(pen, legend, MARGIN, 50, inside - text_width(note, SIZE))
    pen.text(MARGIN + inside, 50, note, size=SIZE, fill=DIM, anchor="rm")
    x, y = MARGIN + (inside - beside) / 2, float(top)
    for scene in scenes:
        if across:
            scene.paint(pen, position, x, top + (bottom - top - scene.height) / 2)
        else:
            scene.paint(pen, position, MARGIN + (inside - scene.width) / 2, y)
        x, y = x + scene.width + gap, y + scene.height + gap
    for number, line in enumerate(lines):
        pen.text(MARGIN, bottom + 16 + LINE_HEIGHT * number, line, size=11.5, anchor="lm")
    return encode([pen.image()], [0])
