"""The still picture of stacked areas: the card as a PNG."""

from __future__ import annotations

import textwrap

from tplab.trace.memory import KINDS
from tplab.widgets.paper.apng import encode
from tplab.widgets.paper.palette import DIM, HUES, INK, LINE, WORK, mix
from tplab.widgets.paper.pen import Pen
from tplab.widgets.stacks.layout import BOTTOM, HEIGHT, HUE, LABEL, TOP, WIDTH, Panel, Picture, name_of

MARGIN, HEAD = 20, 68


def still(picture: Picture, rank: int, title: str, about: str, sentence: str) -> bytes:
    """One rank's picture, with the heading, the legend and the sentence of the card."""
    lines = textwrap.wrap(sentence, 140)
    pen = Pen(WIDTH + 2 * MARGIN, HEAD + HEIGHT + 14 + 17 * len(lines) + 8)
    pen.box(0.5, 0.5, pen.width - 1, pen.height - 1, edge=LINE, radius=12)
    x = MARGIN + pen.text(MARGIN, 26, title, size=14, bold=True, anchor="lm") + 10
    pen.text(x, 26.5, about, size=11, fill=DIM, anchor="lm")
    _legend(pen, picture, rank)
    for y, text in picture.ticks:
        pen.text(MARGIN + picture.panels[0].x - 8, HEAD + y, text, size=10, fill=DIM, anchor="rm")
    for panel in picture.panels:
        _panel(pen, panel, rank, picture)
    for number, line in enumerate(lines):
        pen.text(MARGIN, HEAD + HEIGHT + 14 + 17 * number, line, size=11.5, anchor="lm")
    return encode([pen.image()], [0])


def _legend(pen: Pen, picture: Picture, rank: int) -> None:
    x, y = MARGIN, 52
    for kind in picture.kinds:
        pen.box(x, y - 5, 18, 11, fill=mix(_tint(kind), 0.3), edge=_tint(kind), radius=3)
        x += 24 + pen.text(x + 24, y, name_of(kind), size=10.5, fill=DIM, anchor="lm") + 16
    if any(panel.predicted[rank] is not None for panel in picture.panels):
        _dashed(pen, x, x + 18, y)
        pen.text(x + 24, y, "predicted", size=10.5, fill=DIM, anchor="lm")
    pen.text(MARGIN + WIDTH - 8, y, f"rank {rank}", size=10.5, bold=True, anchor="rm")


def _panel(pen: Pen, panel: Panel, rank: int, picture: Picture) -> None:
    left, right, base = MARGIN + panel.x, MARGIN + panel.x + panel.width, HEAD + HEIGHT - BOTTOM
    pen.text(left, HEAD + TOP - 16, panel.title, size=10.5, bold=True, anchor="lm")
    for y, _ in picture.ticks:
        pen.line([(left, HEAD + y), (right, HEAD + y)], LINE, 0.7)
    area = panel.areas[rank]
    xs, tops = (MARGIN + area.xs).tolist(), (HEAD + area.tops).tolist()
    for kind in reversed(range(len(KINDS))):  # each covers the lower part of the one above it
        edge: list[tuple[float, float]] = []
        for stop, heights in enumerate(tops):
            edge += [(xs[stop], heights[kind]), (xs[stop + 1], heights[kind])]
        lower = [tops[stop][kind - 1] if kind else base for stop in range(len(tops))]
        if all(y0 - heights[kind] < 0.05 for y0, heights in zip(lower, tops)):
            continue
        pen.area([(xs[0], base), *edge, (xs[-1], base)], mix(_tint(kind), 0.3))
        pen.line(edge, _tint(kind), 1)
    for name, x, y in area.labels:
        pen.text(MARGIN + x, HEAD + y, name, size=LABEL)
    pen.line([(left, base), (right, base)], LINE, 1)
    for x, text in panel.ticks:
        pen.text(min(MARGIN + x, right - 8), base + 12, text, size=10, fill=DIM)
    pen.text((left + right) / 2, base + 29, picture.along, size=10, fill=DIM)
    predicted = panel.predicted[rank]
    if predicted is not None:
        _dashed(pen, left, right, HEAD + predicted[0])


def _dashed(pen: Pen, left: float, right: float, y: float) -> None:
    x = left
    while x < right:
        pen.line([(x, y), (min(x + 5, right), y)], INK, 1.4)
        x += 8


def _tint(kind: int) -> str:
    hue = HUE[KINDS[kind]]
    return WORK if hue < 0 else HUES[hue]
