"""A layout: which elements of a whole parameter each rank holds, even if several parameters are fused into one.

`P` says along which dim a parameter is cut. A fused parameter, such as GPT-2's query, key and value in one matrix, must
be cut part by part. Otherwise, the first of two ranks would get all queries and half of the keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations, product
from typing import Any

from tplab.errors import ShapeError
from tplab.mesh import Mesh
from tplab.sharding import P, cut, names_in

MOST_PARTS = 3
"""The most fused parts that `layouts_for` considers: query, key and value; or gate and up."""


WHOLE = P()


@dataclass(frozen=True)
class Layout:
    """How a parameter is laid out on a mesh.

    spec    as for any tensor; a dim that does not divide evenly has pieces of ceil(n / R), the last ones smaller
    parts   sizes of the parts fused along the split dim, each of which is cut separately; () if there is only one
    """

    spec: P = WHOLE
    parts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.parts and len(self.split_dims) != 1:
            raise ShapeError(f"parts {self.parts} are cut along one dim, and {self.spec} splits {len(self.split_dims)}")

    @property
    def split_dims(self) -> list[int]:
        return [dim for dim, entry in enumerate(self.spec) if entry is not None]

    def __str__(self) -> str:
        if not self.spec.axis_names:
            return "copies"
        return f"{self.spec}" + (f" in {len(self.parts)} parts" if self.parts else "")


def ranges(size: int, parts: Sequence[int], index: int, num_ranks: int) -> list[range]:
    """Which of `size` elements the rank at `index` of `num_ranks` holds: one range per part."""
    if parts and sum(parts) != size:
        raise ShapeError(f"parts {tuple(parts)} add up to {sum(parts)}, and the dim has {size}; give all parts of it")
    found, first = [], 0
    for part in parts or (size,):
        piece = cut(part, num_ranks, "ceil")[index]
        found.append(range(first + piece.start, first + piece.stop))
        first += part
    return found


def take(whole: Any, layout: Layout, mesh: Mesh, rank: int) -> Any:
    """The part of a whole array, of any framework, that `rank` holds."""
    for dim, entry in enumerate(layout.spec):
        if entry is not None:
            rows = ranges(whole.shape[dim], layout.parts, mesh.index(rank, entry), mesh.axis_size(entry))
            before = (slice(None),) * dim
            if len(rows) == 1:
                whole = whole[(*before, slice(rows[0].start, rows[0].stop))]
            else:
                whole = whole[(*before, [row for one in rows for row in one])]
    return whole


def layouts_for(shape: Sequence[int], local_shapes: Sequence[Sequence[int]], mesh: Mesh) -> list[Layout]:
    """Every layout under which the ranks would hold pieces of these shapes, the simplest first.

    The pieces of a dim that does not divide evenly may also be padded to the same size. Several layouts may fit, as
    with two fused parts; the values of the pieces then decide between them.
    """
    if any(len(local) != len(shape) for local in local_shapes):
        return []
    entries = [list(_entries(size, [local[dim] for local in local_shapes], mesh)) for dim, size in enumerate(shape)]
    found = []
    for spec in product(*entries):
        names = [name for entry in spec for name in names_in(entry)]
        if len(names) == len(set(names)):
            last = max((dim for dim, entry in enumerate(spec) if entry is not None), default=-1)
            found.append(Layout(P(*spec[: last + 1])))
    for layout in list(found):
        if len(layout.split_dims) == 1:
            (dim,) = layout.split_dims
            num_ranks = mesh.axis_size(layout.spec[dim])
            for count in range(2, MOST_PARTS + 1):
                if shape[dim] % (count * num_ranks) == 0:
                    found.append(Layout(layout.spec, (shape[dim] // count,) * count))
    return found


def _entries(size: int, local_sizes: Sequence[int], mesh: Mesh) -> Iterator[str | tuple[str, ...] | None]:
    """The entries of P under which the ranks hold these sizes of a dim."""
    if all(local == size for local in local_sizes):
        yield None
        return
    wide = [name for name in mesh.axis_names if mesh.axis_size(name) > 1]
    for count in range(1, len(wide) + 1):
        for names in permutations(wide, count):
            num_ranks = mesh.axis_size(names)
            pieces = cut(size, num_ranks, "ceil")
            exact = [len(pieces[mesh.index(rank, names)]) for rank in mesh.ranks]
            if list(local_sizes) in (exact, [len(pieces[0])] * mesh.size):
                yield names if count > 1 else names[0]
