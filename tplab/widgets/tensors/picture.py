"""The pictures of `shards`: tensors cut into pieces, and the ranks. Hovering over a piece or a rank shows it in both.

A position of the playhead is what is highlighted: a rank, or after the last rank a piece of a tensor; -1: nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tplab.mesh import Mesh
from tplab.sharding import local_shape, replicas, shard_slices
from tplab.widgets.paper.letters import about_width
from tplab.widgets.paper.palette import ACCENT, DIM, INK, LINE, PAPER, SOFT, hue, mix
from tplab.widgets.paper.scene import Scene, spans
from tplab.widgets.tensors.product import Product, Tensor

LARGEST = 190.0  # pixels of the longest side
LEFT, TOP = 64.0, 40.0  # room for a tensor's captions


@dataclass(frozen=True)
class Tile:
    """A piece of a tensor: where it is, and the ranks that hold it. For a sum: the ranks whose products it sums."""

    x: float
    y: float
    width: float
    height: float
    hue: int
    ranks: tuple[int, ...]
    index: str  # "[0:4, 3:6]"


@dataclass(frozen=True)
class Drawing:
    """One tensor: its box, its pieces, and the text above and to the left of it."""

    name: str
    x: float
    y: float
    width: float
    height: float
    above: str
    beside: str
    pieces: list[Tile]
    summed: bool  # its pieces are sums over several ranks' products, not computed yet
    lines: tuple[int, int]  # rows and columns of elements, if they are few enough to be seen


def ranks_text(ranks: Sequence[int]) -> str:
    """ "0, 4"; "0-3" if they are consecutive; "0, 8, ... 56" if there are many."""
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}–{ranks[-1]}"
    return ", ".join(map(str, ranks)) if len(ranks) <= 4 else f"{ranks[0]}, {ranks[1]}, … {ranks[-1]}"


def index_text(shape: Sequence[int], slices: Sequence[slice]) -> str:
    """A piece as an index expression: "[0:4, :]"."""
    whole = [slice(0, size) for size in shape]
    return f"[{', '.join(':' if part == all_ else f'{part.start}:{part.stop}' for part, all_ in zip(slices, whole))}]"


def _faces(tensor: Tensor) -> tuple[int, int | None]:
    """The dims drawn down and across: preferably those that are split, then the last ones. None: a vector."""
    dims = range(len(tensor.shape))
    split = [dim for dim in dims if tensor.axes(dim)]
    rest = [dim for dim in reversed(dims) if not tensor.axes(dim)]
    chosen = sorted((split + rest)[:2])
    return (chosen[0], chosen[1]) if len(chosen) == 2 else (chosen[0] if chosen else 0, None)


def drawing(
    tensor: Tensor,
    mesh: Mesh,
    x: float,
    y: float,
    pixels: tuple[float, float],
    *,
    has_captions: bool = True,
    summed: Sequence[str] = (),
) -> Drawing:
    """A tensor at (x, y), whose width and height are `pixels`. `summed`: axes over which its pieces are sums."""
    down, across = _faces(tensor)
    width, height = pixels
    groups: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for ranks in replicas(tensor.spec, mesh):
        for rank in ranks:
            slices = shard_slices(tensor.shape, tensor.spec, mesh, rank)
            groups.setdefault(tuple((part.start, part.stop) for part in slices), []).append(rank)
    pieces = []
    # Dims that are not drawn share the same area: pieces that differ only in those get a strip each.
    places: dict[tuple[tuple[int, int], ...], list[tuple[tuple[int, int], ...]]] = {}
    for key in sorted(groups):
        face = tuple(key[dim] for dim in (down, across) if dim is not None and key)
        places.setdefault(face, []).append(key)
    for face, keys in places.items():
        y0, y1 = _share(face[0], tensor.shape[down]) if across is not None else (0.0, 1.0)
        x0, x1 = _share(face[-1], tensor.shape[down if across is None else across]) if face else (0.0, 1.0)
        for place, key in enumerate(keys):
            strip = (y1 - y0) / len(keys)
            box = (x0 * width, (y0 + place * strip) * height, (x1 - x0) * width, strip * height)
            text = index_text(tensor.shape, [slice(*part) for part in key])
            pieces.append(Tile(*box, hue=len(pieces) % 8, ranks=tuple(groups[key]), index=text))
    lines = (1, 1)
    if tensor.shape:
        lines = (1, tensor.shape[down]) if across is None else (tensor.shape[down], tensor.shape[across])
        lines = max(lines[0], 1), max(lines[1], 1)
    few = max(lines) <= 16 and min(width / lines[1], height / lines[0]) >= 7
    captions = [_caption(tensor, dim, mesh) for dim in range(len(tensor.shape))] if has_captions else []
    top = captions[down if across is None else across] if captions else ""
    left = captions[down] if captions and across is not None else ""
    name = f"{tensor.name} {list(tensor.shape)}"
    return Drawing(name, x, y, width, height, top, left, pieces, bool(summed), lines if few else (1, 1))


def _share(part: tuple[int, int], size: int) -> tuple[float, float]:
    """Where a slice of a dim begins and ends, 0 to 1. A dim of size 0 is drawn like one of size 1."""
    return (part[0] / size, part[1] / size) if size else (0.0, 1.0)


def _caption(tensor: Tensor, dim: int, mesh: Mesh) -> str:
    axes = tensor.axes(dim)
    if not axes:
        return f"{tensor.shape[dim]}"
    parts = mesh.axis_size(axes)
    return f"{tensor.shape[dim]} = {parts} × {tensor.shape[dim] // parts} over {','.join(axes)}"


def _pixels(sizes: Sequence[int], longest: float) -> list[float]:
    """Lengths that grow with the sizes, but more slowly, so that a small dim stays visible."""
    most = max(max(sizes), 1)
    return [max(62.0, longest * (max(size, 1) / most) ** 0.4) for size in sizes]


def one(tensor: Tensor, mesh: Mesh) -> list[Drawing]:
    """The drawing of a single tensor."""
    down, across = _faces(tensor)
    shape = tensor.shape or (1,)
    if across is None:
        return [drawing(tensor, mesh, LEFT, TOP, (LARGEST + 60, 54.0))]
    high, wide = _pixels((shape[down], shape[across]), LARGEST + 40)
    return [drawing(tensor, mesh, LEFT, TOP, (wide, min(high, LARGEST)))]


def multiplied(of: Product, mesh: Mesh) -> list[Drawing]:
    """The drawing of a product, as on paper: w above y, x to its left, so that rows and columns line up."""
    rows, inner, columns = _pixels((of.x.shape[0], of.x.shape[1], of.w.shape[1]), 150.0)
    left, top = LEFT, TOP
    gap = 46.0
    return [
        drawing(of.x, mesh, left, top + inner + gap, (inner, rows)),
        drawing(of.w, mesh, left + inner + gap, top, (columns, inner)),
        drawing(
            of.y, mesh, left + inner + gap, top + inner + gap, (columns, rows), has_captions=False, summed=of.summed
        ),
    ]


def held(tensor: Tensor, mesh: Mesh) -> str:
    """ "w [8, 12] is split over tp (dim 1): each rank holds [8, 3], 1/4 of it; over dp there are 2 copies"."""
    split = [dim for dim in range(len(tensor.shape)) if tensor.axes(dim)]
    local = local_shape(tensor.shape, tensor.spec, mesh)
    spare = [axis for axis in mesh.axis_names if axis not in tensor.spec.axis_names and mesh.shape[axis] > 1]
    copies = math.prod(mesh.shape[axis] for axis in spare)
    name = f"{tensor.name} {list(tensor.shape)}"
    if not split:
        return f"every rank holds all of {name}: {copies} cop{'ies' if copies > 1 else 'y'}"
    how = " and ".join(f"over {','.join(tensor.axes(dim))} (dim {dim})" for dim in split)
    parts = math.prod(mesh.axis_size(tensor.axes(dim)) for dim in split)
    text = f"{name} is split {how}: each rank holds {list(local)}, 1/{parts} of it"
    return text + (f"; over {' and '.join(spare)} there are {copies} copies of each piece" if copies > 1 else "")


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
