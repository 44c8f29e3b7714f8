"""The pictures of `shards`: tensors cut into pieces, and the ranks. Hovering over a piece or a rank shows it in both.

A position of the playhead is what is highlighted: a rank, or after the last rank a piece of a tensor; -1: nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from tplab.mesh import Mesh
from tplab.widgets.paper.letters import about_width
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


def ranks(drawings: Sequence[Drawing], mesh: Mesh) -> Scene:
    """Every rank with a small copy of each tensor, in which its own pieces are filled. A rank's key is its number."""
    few = mesh.size <= 16
    scale = (0.26 if few else 0.14) * (0.65 if len(drawings) > 1 else 1)
    small = [(max(11.0, d.width * scale), max(9.0, d.height * scale)) for d in drawings]
    gap, pad, head, between = (6.0, 8.0, 20.0, 10) if few else (3.0, 5.0, 16.0, 5)
    inside = sum(w for w, _ in small) + gap * (len(small) - 1)
    width, height = max(inside + 2 * pad, 58.0 if few else 34.0), max(h for _, h in small) + head + pad
    columns = mesh.shape[mesh.axis_names[-1]]
    is_grid = len([size for size in mesh.shape.values() if size > 1]) > 1 and columns <= 16
    if not is_grid:
        columns = 8 if mesh.size > 16 else 4 if mesh.size in (4, 8) or mesh.size > 8 else mesh.size
    *others, last = mesh.axis_names
    places = [mesh.coordinates(row * columns) for row in range(mesh.size // columns)] if is_grid else []
    beside = [" ".join(f"{axis} {at[axis]}" for axis in others if mesh.shape[axis] > 1) for at in places]
    left, top = (1.05 * max(map(about_width, beside)) + 12.0, 24.0) if is_grid else (0.0, 0.0)
    across, down = width + between, height + between
    sheet = Scene(left + columns * across - between, top + -(-mesh.size // columns) * down - between, "the ranks")
    pieces = [piece for drawing in drawings for piece in drawing.pieces]
    if is_grid:
        for column in range(columns):
            sheet.text(left + column * across + width / 2, 10.0, f"{last} {column}", size=10.5, fill=DIM)
        for row, text in enumerate(beside):
            sheet.text(left - 8.0, top + row * down + height / 2, text, size=10.5, fill=DIM, anchor="rm")
    for rank in mesh.ranks:
        x, y = left + rank % columns * across, top + rank // columns * down
        pointed = [*spans([rank, *(mesh.size + place for place, piece in enumerate(pieces) if rank in piece.ranks)])]
        with sheet.about((), key=rank):
            sheet.box(x, y, width, height, fill=SOFT, edge=LINE, radius=8, line=1.2)
        for begin, end in pointed:
            with sheet.during(begin, end):
                sheet.box(x, y, width, height, edge=ACCENT, radius=8, line=1.8)
        sheet.text(x + width / 2, y + 10, f"rank {rank}" if few else str(rank), size=10, bold=True)
        x += (width - inside) / 2
        for d, (w, h) in zip(drawings, small):
            own, low = next(piece for piece in d.pieces if rank in piece.ranks), y + (height + head - pad - h) / 2
            sheet.box(x, low, w, h, fill=PAPER, edge=LINE, radius=2)
            wide, high = w / d.width, h / d.height
            part = (x + own.x * wide, low + own.y * high, max(own.width * wide, 2), max(own.height * high, 2))
            sheet.box(*part, fill=mix(hue(own.hue), 0.45), radius=1)
            for begin, end in ((-2, -0.5), *pointed):
                with sheet.during(begin, end):
                    sheet.box(*part, fill=hue(own.hue), radius=1)
            x += w + gap
    return sheet
