"""The frame of a still picture: a card with its heading, legend, pictures and sentence, as a PNG."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from tplab.widgets.paper.apng import encode
from tplab.widgets.paper.palette import DIM, LINE
from tplab.widgets.paper.pen import Pen, text_width
from tplab.widgets.paper.scene import Key, Scene

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
    body = [scene.height for scene in scenes]
    lines, top = textwrap.wrap(sentence, int(inside / 6.52)), 66 if legend else 48
    bottom = top + (max(body) if across else sum(body) + gap * (len(body) - 1))
    pen = Pen(inside + 2 * MARGIN, bottom + LINE_HEIGHT * len(lines) + 18)
    pen.box(0.5, 0.5, pen.width - 1, pen.height - 1, edge=LINE, radius=12)
    x, right = MARGIN + pen.text(MARGIN, 26, title, size=14, bold=True, anchor="lm") + 10, MARGIN + inside
    pen.text(x, 26.5, about, size=11, fill=DIM, anchor="lm")
    if badge:
        room = text_width(badge, 10.5) + 18
        pen.box(right - room, 16, room, 21, edge=LINE, radius=10)
        pen.text(right - room / 2, 26.5, badge, size=10.5, fill=DIM)
    x = float(MARGIN)
    for key in legend:
        key.draw(pen, x, 45)
        x += 24 + pen.text(x + 24, 50, key.text, size=10.5, fill=DIM, anchor="lm") + 16
    pen.text(right, 50, note, size=10.5, fill=DIM, anchor="rm")
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
