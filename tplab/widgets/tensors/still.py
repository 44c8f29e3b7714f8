"""The still picture of `shards`."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from tplab.widgets.paper.apng import encode
from tplab.widgets.paper.palette import ACCENT, DIM, INK, LINE, PAPER, SOFT, hue, mix
from tplab.widgets.paper.pen import Pen, text_width
from tplab.widgets.tensors.scene import ranks_text

MARGIN = 18


def still(content: Mapping[str, Any], rank: int = -1) -> bytes:
    """PNG of what `shards` shows, with one rank highlighted."""
    grid = content["ranks"]
    gap = 40
    beside = content["width"] + gap + grid["width"] <= 930
    body = max(content["height"], grid["height"]) if beside else content["height"] + gap / 2 + grid["height"]
    wide = content["width"] + gap + grid["width"] if beside else max(content["width"], grid["width"])
    head = text_width(content["title"], 14, bold=True) + text_width(content["about"], 11) + 130
    width = max(wide, head, 560) + 2 * MARGIN
    lines = textwrap.wrap(content["sentence"], int((width - 2 * MARGIN) / 6.9))
    pen = Pen(width, 54 + body + 22 + 17 * len(lines) + 8)
    pen.box(0.5, 0.5, pen.width - 1, pen.height - 1, edge=LINE, radius=12)
    x = MARGIN + pen.text(MARGIN, 26, content["title"], size=14, bold=True, anchor="lm") + 10
    pen.text(x, 26.5, content["about"], size=11, fill=DIM, anchor="lm")
    note = text_width(content["badge"], 10.5) + 18
    pen.box(pen.width - MARGIN - note, 16, note, 21, edge=LINE, radius=10)
    pen.text(pen.width - MARGIN - note / 2, 26.5, content["badge"], size=10.5, fill=DIM)
    spare = (width - 2 * MARGIN - content["width"] - grid["width"] * beside) / (3 if beside else 2)
    left, top = MARGIN + spare, 50 + (max(0, body - content["height"]) / 2 if beside else 0)
    for drawing in content["drawings"]:
        _tensor(pen, drawing, left, top, rank)
    if beside:
        at = width - MARGIN - spare - grid["width"], 54 + (body - grid["height"]) / 2
    else:
        at = (width - grid["width"]) / 2, 54 + content["height"] + gap / 2
    _ranks(pen, grid, *at, rank)
    for index, line in enumerate(lines):
        pen.text(MARGIN, 54 + body + 22 + 17 * index, line, size=11.5, anchor="lm")
    return encode([pen.image()], [0])


def _tensor(pen: Pen, drawing: Mapping[str, Any], left: float, top: float, rank: int) -> None:
    x, y = drawing["x"] + left, drawing["y"] + top
    pen.text(x + drawing["width"] / 2, y + drawing["height"] + 13, drawing["name"], size=11.5, bold=True)
    pen.text(x + drawing["width"] / 2, y - 10, drawing["above"], size=10, fill=DIM)
    for index, line in enumerate(drawing["beside"].replace(" over", "\nover").split("\n") if drawing["beside"] else []):
        pen.text(x - 8, y + drawing["height"] / 2 - 6 + 13 * index, line, size=10, fill=DIM, anchor="rm")
    for piece in drawing["pieces"]:
        px, py, width, height = x + piece["x"], y + piece["y"], piece["width"], piece["height"]
        colour = hue(piece["hue"])
        chosen = rank < 0 or rank in piece["ranks"]
        pen.box(
            px + 1,
            py + 1,
            width - 2,
            height - 2,
            fill=mix(colour, 0.24 if chosen else 0.08),
            edge=mix(colour, 0.9 if chosen else 0.4),
            radius=4,
        )
        if drawing["summed"]:
            pen.hatch(px + 3, py + 3, width - 6, height - 6, mix(colour, 0.45))
        text = ranks_text(piece["ranks"]) if not drawing["summed"] else "Σ " + ranks_text(piece["ranks"])
        if text_width(text, 10.5) + 8 < width and height > 14:
            if drawing["summed"]:
                room = text_width(text, 10.5, bold=True) + 8
                pen.box(px + width / 2 - room / 2, py + height / 2 - 8, room, 16, fill=PAPER, radius=4)
            pen.text(px + width / 2, py + height / 2, text, size=10.5, bold=True, fill=INK if chosen else DIM)


def _ranks(pen: Pen, grid: Mapping[str, Any], left: float, top: float, rank: int) -> None:
    width, height = grid["size"]
    for x, y, text in grid["labels"]:
        pen.text(left + x, top + y, text, size=10.5, fill=DIM)
    for index, box in enumerate(grid["boxes"]):
        x, y = left + box["x"], top + box["y"]
        pen.box(x, y, width, height, fill=SOFT, edge=ACCENT if index == rank else LINE, radius=8, line=1.2)
        pen.text(x + width / 2, y + 10, f"rank {index}" if grid["few"] else str(index), size=10, bold=True)
        for mini in box["minis"]:
            mx, my, w, h, px, py, pw, ph, colour = mini
            pen.box(left + mx, top + my, w, h, fill=PAPER, edge=LINE, radius=2)
            pen.box(left + px, top + py, max(pw, 2), max(ph, 2), fill=hue(colour), radius=1)
