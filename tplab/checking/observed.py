"""How the ranks' pieces make up the whole tensor of the reference, and by which factor.

Along each axis this is the tensor's type, as in `tplab.checking.types`: R if ranks hold copies, V(d) if they hold
pieces cut along d, P if they hold parts of a sum, otherwise V.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import combinations, islice, product
from math import prod
from typing import Literal, NamedTuple

import numpy as np

from tplab.checking.gaps import gaps, largest
from tplab.checking.types import P as PARTIAL
from tplab.checking.types import R, Type, V
from tplab.layout import Layout, layouts_for, take
from tplab.mesh import Mesh
from tplab.sharding import dims_cut, global_shape

COPIES = Layout()
Kind = Literal["not finite", "equal", "scaled", "multiples", "parts", "pieces", "apart", "shape", "other"]


class Observed(NamedTuple):
    """How ranks hold a tensor.

    kind    "equal": each has its piece. "scaled": `factor` times its piece. "multiples": a different multiple on each
            rank, `factors`. "parts": over `axes` they add up to `factor` times the whole. "pieces": each has the piece
            of another rank, `ranks`. "apart": ranks of `axes` that should hold copies do not; `ranks` are right. "not
            finite": on `ranks`, or in the reference if there are none. "shape": no layout gives such pieces. "other":
            none of these
    layout  the layout in which they hold it
    gap     the largest difference of any element
    """

    kind: Kind
    layout: Layout = COPIES
    factor: float = 1.0
    axes: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    factors: tuple[float, ...] = ()
    gap: float = np.inf

    @property
    def is_right(self) -> bool:
        return self.kind == "equal"

    @property
    def is_partial(self) -> bool:
        return self.kind == "parts"

    def types(self, mesh: Mesh) -> Mapping[str, Type]:
        """Return the type along each axis."""
        cuts = dims_cut(self.layout.spec)
        if self.kind in ("not finite", "shape", "other", "multiples"):
            return dict.fromkeys(mesh.axis_names, V)
        found = {name: Type("V", cuts[name]) if name in cuts else R for name in mesh.axis_names}
        return found | dict.fromkeys(self.axes, PARTIAL if self.is_partial else V)


class Way(NamedTuple):
    """A way to hold a tensor: the expected value on each rank; and, by axes, the groups of ranks whose parts may add up
    to it."""

    want: Mapping[int, np.ndarray]
    groups: Sequence[tuple[tuple[str, ...], Sequence[Sequence[int]]]]
    layout: Layout = COPIES


def observed(
    pieces: Sequence[np.ndarray], whole: np.ndarray, mesh: Mesh, tolerance: float, layout: Layout | None = None,
    likely: Collection[str] = (),
) -> Observed:  # fmt: skip
    """Return how the ranks of a mesh hold `whole`.

    pieces      one per rank; a piece may be padded: elements beyond the layout's must be zeros
    tolerance   how far rounding may take any element
    layout      the expected layout; None for any
    likely      axes to prefer if several layouts fit, as they do for zeros over two axes of one size
    """
    got = {rank: np.asarray(piece, np.float64) for rank, piece in enumerate(pieces)}
    whole = np.asarray(whole, np.float64)
    known = layouts_for(whole.shape, [piece.shape for piece in got.values()], mesh)
    known.sort(key=lambda one: not set(one.spec.axis_names) <= set(likely))
    bad = tuple(rank for rank, piece in got.items() if not np.isfinite(piece).all())
    if bad or not np.isfinite(whole).all():
        return Observed("not finite", layout or next(iter(known), COPIES), ranks=bad)
    ways = [_way(whole, one, mesh) for one in ([layout] if layout else known)]
    if not any(all(fitted(got[r], w.shape).shape == w.shape for r, w in way.want.items()) for way in ways):
        return Observed("shape", layout or COPIES)
    if largest(whole) > tolerance and not any(piece.any() for piece in got.values()):
        return Observed("scaled", ways[0].layout, 0.0, gap=largest(whole))
    if found := first_fit(got, ways, tolerance, apart=True):
        return found
    layout, want = ways[0].layout, ways[0].want
    got = {rank: fitted(piece, want[rank].shape) for rank, piece in got.items()}
    gap = max(largest(got[rank] - want[rank]) for rank in got)
    if layout.spec.axis_names:
        places = whose(got, want, tolerance)
        if -1 not in places:
            return Observed("pieces", layout, ranks=places, gap=gap)
        other = first_fit(got, [_way(whole, one, mesh) for one in known if one != layout], tolerance)
        if other is not None and other.is_right:
            return Observed("pieces", other.layout, gap=gap)
    free = tuple(name for name in mesh.axis_names if name not in layout.spec.axis_names)
    if free and not agree(got, mesh.groups(free), tolerance):
        right = tuple(rank for rank in got if _close(got[rank], want[rank], tolerance))
        return Observed("apart", layout, axes=free, ranks=right, gap=gap)
    return Observed("other", layout, gap=gap)


def first_fit(
    got: Mapping[int, np.ndarray],
    ways: Iterable[Way],
    tolerance: float,
    plain: Sequence[float] = (),
    apart: bool = False,
) -> Observed | None:
    """Return the first way in which ranks hold pieces; else a multiple of them; else parts of a sum; else None.

    plain   the only factors that count; () for any. A few elements are a multiple of any others
    apart   whether the factor may differ by rank
    """
    held: list[tuple[Way, dict[int, np.ndarray], float]] = []
    for way in ways:
        here = {rank: fitted(piece, way.want[rank].shape) for rank, piece in got.items()}
        if any(here[rank].shape != way.want[rank].shape for rank in got):
            continue
        held.append((way, here, max(largest(here[rank] - way.want[rank]) for rank in got)))
        if held[-1][2] <= tolerance and not apart:
            break
    closest = min(held, key=lambda one: one[2], default=None)
    if closest is not None and closest[2] <= tolerance:
        return Observed("equal", closest[0].layout, gap=closest[2])
    for way, here, gap in held:
        pairs = [(here[rank], way.want[rank]) for rank in got]
        factor = factor_between(pairs, tolerance, plain)
        if factor and abs(factor - 1) * max(largest(want) for _, want in pairs) > 4 * tolerance:
            return Observed("scaled", way.layout, factor, gap=gap)
    summed = []
    for way, here, gap in held:
        for axes, groups in way.groups:
            if not agree(here, groups, tolerance):  # copies are not parts of a sum
                totals = [np.sum([here[rank] for rank in group], 0) for group in groups]
                summed.append((way, gap, axes, groups, list(zip(totals, [way.want[group[0]] for group in groups]))))
    for way, gap, axes, groups, pairs in summed:
        for factor in (1.0, float(len(groups[0]))):
            if all(_close(total, factor * want, len(groups[0]) * tolerance) for total, want in pairs):
                return Observed("parts", way.layout, factor, axes, gap=gap)
    for way, here, gap in held if apart else ():
        pairs = [(here[rank], way.want[rank]) for rank in got if largest(way.want[rank]) > tolerance]
        each = tuple(factor_between([pair], tolerance) or 0.0 for pair in pairs)
        differ = (max(each) - min(each)) * max(largest(want) for _, want in pairs) > 4 * tolerance if each else False
        if differ and all(each) and all(want.size > 1 for _, want in pairs):  # any number is a multiple of another
            return Observed("multiples", way.layout, factors=each, gap=gap)
    for way, gap, axes, groups, pairs in summed:
        is_number = len({want.tobytes() for _, want in pairs}) == 1 and pairs[0][1].size < 2 and not plain
        factor = None if is_number else factor_between(pairs, tolerance * len(groups[0]), plain)
        if factor:
            return Observed("parts", way.layout, factor, axes, gap=gap)
    return None


def every_way(x: np.ndarray, whole: np.ndarray, mesh: Mesh, tolerance: float) -> list[Observed] | None:
    """Return all ways in which ranks may hold `whole`, or a multiple of it by a number of ranks along axes that cut or
    sum it: "equal", "scaled", "parts". If there is none: "apart", if only the ranks at one place of an axis have it.
    None if no layout fits the shapes.

    x           of each rank: [rank, ...]
    tolerance   relative to the largest element of either
    """
    local = x.shape[1:]
    layouts = [
        one for one in layouts_for(whole.shape, [local] * mesh.size, mesh)
        if not one.parts and global_shape(local, one.spec, mesh) == whole.shape  # not padded
    ]  # fmt: skip
    got, want, found = x.astype(np.float64), whole.astype(np.float64), list[Observed]()
    is_number = x.dtype.kind == "f"
    slack = tolerance * max([largest(one[np.isfinite(one)]) for one in (want, got)[: 1 + is_number]])
    alone = (), [[rank] for rank in mesh.ranks]
    for way in (_way(want, layout, mesh) for layout in layouts):
        layout, each = way.layout, np.stack([*way.want.values()])
        for axes, ranks in (alone, *(way.groups if x.dtype.kind != "b" else ())):
            total, right = got[ranks].sum(1), each[[first for first, *_ in ranks]]
            names = (*layout.spec.axis_names, *axes)
            counts = {prod(map(mesh.axis_size, some)) for n in range(3) for some in combinations(names, n)}
            for factor in sorted(counts) if is_number else [1]:
                if (gaps(total, factor * right) <= slack * factor).all():
                    kind = "parts" if axes else "equal" if factor == 1 else "scaled"
                    found.append(Observed(kind, layout, factor, axes))
                    break
            if found and not found[-1].axes:
                break
    if not found and is_number and whole.shape == local and want.any():
        near = [rank for rank in mesh.ranks if (gaps(got[rank], want) <= slack).all()]
        for (name,) in (axes for axes in axis_sets(mesh) if len(axes) == 1):
            places = Counter(mesh.index(rank, name) for rank in near)
            all_there = [place for place, count in places.items() if count == mesh.size // mesh.axis_size(name)]
            if len(all_there) == 1:
                ranks = tuple(rank for rank in mesh.ranks if mesh.index(rank, name) == all_there[0])
                found.append(Observed("apart", layouts[0], axes=(name,), ranks=ranks))
    return found if layouts else None


def factor_between(
    pairs: Sequence[tuple[np.ndarray, np.ndarray]], tolerance: float, plain: Sequence[float] = ()
) -> float | None:
    """Return the one factor between all pairs; None if there is none or it is 0."""
    square = sum(float((want * want).sum()) for _, want in pairs)
    if square == 0:
        return None
    factor = sum(float((got * want).sum()) for got, want in pairs) / square
    size = max(largest(want) for _, want in pairs)
    if plain:
        factor = next((x for x in plain if abs(factor / x - 1) < 1e-3), 0.0)
    slack = tolerance * max(abs(factor), 1.0)
    return factor if slack < abs(factor) * size and all(_close(g, factor * w, slack) for g, w in pairs) else None


def whose(got: Mapping[int, np.ndarray], want: Mapping[int, np.ndarray], tolerance: float) -> tuple[int, ...]:
    """Return, for each rank, the rank that should hold its piece: itself if possible; -1 if none should."""
    return tuple(next((r for r in (rank, *want) if _close(x, want[r], tolerance)), -1) for rank, x in got.items())


def agree(got: Mapping[int, np.ndarray] | Sequence[np.ndarray], groups: Iterable[Sequence[int]], slack: float) -> bool:
    """Return whether the ranks of each group hold equal tensors."""
    return all(_close(got[first], got[other], slack) for first, *rest in groups for other in rest)


def axis_sets(mesh: Mesh, without: Sequence[str] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the mesh's axes with more than one rank: each alone, and all combinations."""
    names = [name for name in mesh.axis_names if mesh.axis_size(name) > 1 and name not in without]
    for count in range(1, len(names) + 1):
        yield from combinations(names, count)


def fitted(piece: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return the piece without the trailing zeros that pad the last ranks' pieces to the size of the others."""
    if (
        piece.shape == shape
        or piece.ndim != len(shape)
        or any(size < wanted for size, wanted in zip(piece.shape, shape))
    ):
        return piece
    cut = piece[tuple(slice(0, size) for size in shape)]
    return piece if np.count_nonzero(piece) != np.count_nonzero(cut) else cut


def _way(whole: np.ndarray, layout: Layout, mesh: Mesh) -> Way:
    groups = [(axes, mesh.groups(axes)) for axes in axis_sets(mesh, without=layout.spec.axis_names)]
    return Way({rank: take(whole, layout, mesh, rank) for rank in mesh.ranks}, groups, layout)


def _close(got: np.ndarray, want: np.ndarray, slack: float) -> bool:
    return got.shape == want.shape and largest(got - want) <= slack


# --- ranks that are not on a mesh, or some of which hold no piece -----------------------------------------------------

PRECISION = 1e-3
"""How far values may be off, relative to the largest element of a tensor: float32 sums in another order over a few
layers, and more for coarser types."""

FEW = 2
"""So few elements are a multiple of any others: only plain factors count."""

MOST_WAYS, MOST_FUSED = 400, 8
FEWEST_WAYS, MOST_ELEMENTS = 8, 10**8
"""Of large tensors, fewer ways are tried: as many as have so many elements together."""


def find_spread(
    pieces: Mapping[int, np.ndarray], want: np.ndarray, num_ranks: int, precision: float = PRECISION
) -> Observed | None:
    """Return how `want` is spread over ranks, up to `precision` of its largest element, and at most 1e-4 of a single
    number. None if it is spread in no known way.

    pieces   of each rank that has one
    """
    is_exact, want = want.dtype.kind in "iub", want.astype(np.float64)
    got = {rank: piece.astype(np.float64) for rank, piece in pieces.items()}
    size = largest(want)
    if len({piece.shape for piece in got.values()}) != 1 or not all(
        np.isfinite(x).all() for x in [want, *got.values()]
    ):
        return None
    if size == 0:
        return Observed("equal", factor=0.0) if all(largest(piece) == 0 for piece in got.values()) else None
    most = min(MOST_WAYS, max(FEWEST_WAYS, MOST_ELEMENTS // want.size))
    ways = [
        Way(dealt, [((), alike)] if len({len(group) for group in alike}) == 1 < len(alike[0]) else [])
        for dealt, alike in islice(_ways_to_cut(want, next(iter(got.values())).shape, num_ranks, got), most)
    ]
    tolerance = precision if want.size > 1 else min(precision, 1e-4)  # the terms of a number may be off by more
    slack = min(tolerance * size, 0.1) if is_exact else tolerance * size  # an index that is off by one is wrong
    return first_fit(got, ways, slack, (1.0, num_ranks, 1 / num_ranks) if want.size <= FEW else ())


Dealt = dict[int, np.ndarray]
"""The part of a tensor on each rank."""


def deals(whole: np.ndarray, mine: tuple[int, ...], num_ranks: int, orders: int | None = 1) -> Iterator[Dealt]:
    """Yield each way to distribute a whole tensor over ranks in parts of this shape: contiguous parts, and others in
    the first `orders` of `_orders`."""
    for want, alike in _ways_to_cut(whole, mine, num_ranks, range(num_ranks), most_orders=orders):
        if len(alike) * prod(mine) >= whole.size:
            yield want


def in_step(dealt: Sequence[Iterable[Dealt]]) -> Iterator[tuple[Dealt, ...]]:
    """Yield the n-th deals of several tensors together. A tensor's only deal goes with all deals of the others."""
    every = [list(one) for one in dealt]
    for number in range(max(map(len, every), default=0)):
        if all(number < len(one) or len(one) == 1 for one in every):
            yield tuple(one[min(number, len(one) - 1)] for one in every)


def _ways_to_cut(
    whole: np.ndarray, mine: tuple[int, ...], num_ranks: int, ranks: Iterable[int], most_orders: int | None = None
) -> Iterator[tuple[Dealt, list[list[int]]]]:
    """Yield each way to cut tensors of this shape out of the whole: the part of each of `ranks`, and groups of ranks
    with the same part. Along a dim, elements are in one of the first `most_orders` of `_orders`."""
    if len(mine) != whole.ndim:
        return
    for chosen in product(*(list(_of_dim(a, b, num_ranks, most_orders)) for a, b in zip(mine, whole.shape))):
        places = {rank: [index(rank) for index in chosen] for rank in ranks}
        alike: dict[bytes, list[int]] = {}
        for rank, indices in places.items():
            alike.setdefault(b"|".join(index.tobytes() for index in indices), []).append(rank)
        yield {rank: whole[np.ix_(*at)] if at else whole for rank, at in places.items()}, list(alike.values())


def _of_dim(mine: int, whole: int, num_ranks: int, most_orders: int | None) -> Iterator[Callable[[int], np.ndarray]]:
    """Yield the index of a rank's elements along a dim, for each way to cut it."""
    if mine == whole:
        yield lambda rank: np.arange(whole)
        return
    if not mine or mine > whole:
        return
    count, stride = -(-whole // mine), (whole - mine) // max(num_ranks - 1, 1)
    if (
        whole % mine
    ):  # the last part is shorter, or filled up with zeros; or parts overlap, as with a halo, without gaps
        yield from [lambda rank: np.arange(whole)[rank * mine :][:mine]] * (count == num_ranks)
        if 0 < stride <= mine and stride * (num_ranks - 1) == whole - mine:
            yield lambda rank: np.arange(rank * stride, rank * stride + mine)
        return
    most = num_ranks // count  # up to so many neighbours may share a part, as along an axis of a mesh
    for apart in (n for n in range(1, most + 1) if num_ranks % (n * count) == 0):
        for order in islice(_orders(whole, count), most_orders):
            yield lambda rank, order=order, apart=apart: order[rank // apart % count]


def _orders(whole: int, count: int) -> Iterator[np.ndarray]:
    """Yield orders [count, whole / count]: contiguous; every n-th; first and last together, as in sequences that are
    balanced for causal attention; a part of each of several fused tensors, or of the rows of a flattened one."""
    every = np.arange(whole)
    yield every.reshape(count, -1)
    yield every.reshape(-1, count).T
    if whole % (2 * count) == 0:
        chunks = every.reshape(2 * count, -1)
        yield np.concatenate([chunks[:count], chunks[count:][::-1]], axis=1)
    for parts in (parts for parts in range(2, MOST_FUSED + 1) if whole % (parts * count) == 0):
        yield every.reshape(parts, count, -1).transpose(1, 0, 2).reshape(count, -1)


def uneven(whole: np.ndarray, shapes: Sequence[tuple[int, ...]]) -> Iterator[dict[int, np.ndarray]]:
    """Yield the whole cut along one dim into parts of these shapes, one for each rank."""
    if any(len(shape) != whole.ndim for shape in shapes):
        return
    for dim, size in enumerate(whole.shape):
        rest = {(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}
        if rest == {(*whole.shape[:dim], *whole.shape[dim + 1 :])} and sum(shape[dim] for shape in shapes) == size:
            yield dict(enumerate(np.split(whole, np.cumsum([shape[dim] for shape in shapes])[:-1], dim)))
