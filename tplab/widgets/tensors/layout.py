"""The picture of `shards`: tensors cut into pieces, and each rank with its own. Lengths are CSS pixels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tplab.mesh import Mesh
from tplab.sharding import local_shape, replicas, shard_slices
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
