"""The pictures of `shards`: tensors cut into pieces, and the ranks. To point at a piece or at a rank shows it in both.

A position of the playhead is what is pointed out: a rank, or after the last rank a piece of a tensor; -1: nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tplab.widgets.paper.palette import ACCENT, DIM, INK, LINE, PAPER, SOFT, hue, mix
from tplab.widgets.paper.scene import Scene, spans
from tplab.widgets.tensors.layout import Drawing, Tile, ranks_text


def tensors(drawings: Sequence[Drawing], num_ranks: int) -> Scene:
    """The key of a piece is its position."""
    width = max(drawing.x + drawing.width for drawing in drawings) + 6
    sheet = Scene(width, max(drawing.y + drawing.height for drawing in drawings) + 24)
    position, last = num_ranks, num_ranks + sum(len(drawing.pieces) for drawing in drawings) - 1
    for drawing in drawings:
        x, y, middle = drawing.x, drawing.y, drawing.x + drawing.width / 2
        sheet.text(middle, y + drawing.height + 14, drawing.name, size=11.5, bold=True)
        sheet.text(middle, y - 10, drawing.above, size=10, fill=DIM)
        lines = drawing.beside.replace(" over", "\nover").split("\n")
        for index, line in enumerate(lines):
            sheet.text(x - 8, y + drawing.height / 2 + 13 * index - 6.5 * (len(lines) - 1), line, size=10, fill=DIM,
                       anchor="rm")  # fmt: skip
        first = position
        for position, piece in enumerate(drawing.pieces, first):
            with sheet.about((), key=position):
                _piece(sheet, drawing, piece, position)
        for line in _elements(drawing):
            sheet.line(line, mix(INK, 0.2), 0.4)
        for position, piece in enumerate(drawing.pieces, first):
            _name(sheet, drawing, piece, {*piece.ranks, position}, last)
        position += 1
    return sheet


def _elements(drawing: Drawing) -> Iterator[list[tuple[float, float]]]:
    """The lines between rows and between columns of elements."""
    (rows, columns), x, y = drawing.lines, drawing.x, drawing.y
    for row in range(1, rows):
        yield [(x, y + row * drawing.height / rows), (x + drawing.width, y + row * drawing.height / rows)]
    for column in range(1, columns):
        across = x + column * drawing.width / columns
        yield [(across, y), (across, y + drawing.height)]


def _piece(sheet: Scene, drawing: Drawing, piece: Tile, position: int) -> None:
    box = (drawing.x + piece.x + 1, drawing.y + piece.y + 1, max(piece.width - 2, 1), max(piece.height - 2, 1))
    colour = hue(piece.hue)
    looks = [((-2, -0.5), 0.24, 1, 1), ((-0.5, np.inf), 0.08, 0.4, 1)]
    looks += [(span, 0.42, 1, 2.4) for span in spans([*piece.ranks, position])]
    for span, fill, edge, line in looks:
        with sheet.during(*span):
            sheet.box(*box, fill=mix(colour, fill), edge=mix(colour, edge), radius=4, line=line)
    if drawing.summed:
        sheet.hatch(box[0] + 2, box[1] + 2, box[2] - 4, box[3] - 4, mix(DIM, 0.5))


def _name(sheet: Scene, drawing: Drawing, piece: Tile, own: set[int], last: int) -> None:
    text = ("Σ " if drawing.summed else "") + ranks_text(piece.ranks)
    room = sheet.width_of(text, 10.5, bold=True) + 8
    if room >= piece.width or piece.height <= 14:
        return
    x, y = drawing.x + piece.x + piece.width / 2, drawing.y + piece.y + piece.height / 2
    if drawing.summed:
        sheet.box(x - room / 2, y - 8, room, 16, fill=PAPER, radius=4)
    for positions, ink in (({-1, *own}, INK), ({*range(last + 1)} - own, DIM)):
        for span in spans(positions):
            with sheet.during(*span):
                sheet.text(x, y, text, size=10.5, bold=True, fill=ink)


def ranks(grid: Mapping[str, Any], drawings: Sequence[Drawing]) -> Scene:
    """The key of a rank is its number."""
    sheet = Scene(grid["width"], grid["height"], "the ranks")
    width, height = grid["size"]
    pieces = [piece for drawing in drawings for piece in drawing.pieces]
    for x, y, text in grid["labels"]:
        sheet.text(x, y, text, size=10.5, fill=DIM)
    for rank, box in enumerate(grid["boxes"]):
        own = [len(grid["boxes"]) + place for place, piece in enumerate(pieces) if rank in piece.ranks]
        pointed = [*spans([rank, *own])]
        with sheet.about((), key=rank):
            sheet.box(box["x"], box["y"], width, height, fill=SOFT, edge=LINE, radius=8, line=1.2)
        for begin, end in pointed:
            with sheet.during(begin, end):
                sheet.box(box["x"], box["y"], width, height, edge=ACCENT, radius=8, line=1.8)
        name = f"rank {rank}" if grid["few"] else str(rank)
        sheet.text(box["x"] + width / 2, box["y"] + 10, name, size=10, bold=True)
        for x, y, w, h, px, py, pw, ph, colour in box["minis"]:
            sheet.box(x, y, w, h, fill=PAPER, edge=LINE, radius=2)
            place = (px, py, max(pw, 2), max(ph, 2))
            sheet.box(*place, fill=mix(hue(colour), 0.45), radius=1)
            for begin, end in ((-2, -0.5), *pointed):
                with sheet.during(begin, end):
                    sheet.box(*place, fill=hue(colour), radius=1)
    return sheet
