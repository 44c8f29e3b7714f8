"""How a tensor of the reference is spread over ranks: copied, cut along dims, or in parts whose sum it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

import numpy as np

_CLOSE = 1e-3
"""Relative to the largest element: float32 in a few layers, added up in another order."""

_FEW = 2
"""So few elements are a multiple of any others: only plain factors count."""

_MOST_WAYS = 400


@dataclass(frozen=True)
class Spread:
    """What was found.

    is_partial   whether ranks hold parts of a sum
    factor       of what they hold, put together, to the reference's tensor
    is_zero      whether both are nothing but zeros
    """

    is_partial: bool
    factor: float
    is_zero: bool = False

    def is_like(self, other: Spread) -> bool:
        return self.is_partial == other.is_partial and abs(self.factor - other.factor) < 1e-2 * abs(other.factor)


def find_spread(pieces: Mapping[int, np.ndarray], want: np.ndarray, num_ranks: int) -> Spread | None:
    """How `want` is spread; None if it is in no way that is known.

    pieces   of each rank that has one
    """
    want = want.astype(np.float64)
    got = {rank: piece.astype(np.float64) for rank, piece in pieces.items()}
    size = _largest(want)
    if size == 0:
        return Spread(False, 1.0, True) if all(_largest(piece) == 0 for piece in got.values()) else None
    shapes = {piece.shape for piece in got.values()}
    if len(shapes) != 1 or not all(np.isfinite(piece).all() for piece in got.values()):
        return None
    ways = list(_ways(next(iter(shapes)), want.shape, num_ranks))[:_MOST_WAYS]
    for way in ways:
        places = {rank: np.ix_(*way(rank)) if want.ndim else () for rank in got}
        if factor := _factor([(got[rank], want[places[rank]]) for rank in got], want.size, num_ranks):
            return Spread(False, factor)
    for way in ways:
        groups: dict[bytes, list[int]] = {}
        for rank in got:
            groups.setdefault(b"|".join(index.tobytes() for index in way(rank)), []).append(rank)
        if len({len(group) for group in groups.values()}) != 1 or len(next(iter(groups.values()))) < 2:
            continue
        pairs = []
        for group in groups.values():
            total = np.sum([got[rank] for rank in group], axis=0)
            pairs.append((total, want[np.ix_(*way(group[0]))] if want.ndim else want))
        if factor := _factor(pairs, want.size, num_ranks):
            return Spread(True, factor)
    return None


def _factor(pairs: list[tuple[np.ndarray, np.ndarray]], size: int, num_ranks: int) -> float | None:
    """The one factor between all pairs; None if there is none."""
    square = sum(float((w * w).sum()) for _, w in pairs)
    if square == 0:
        return None
    factor = sum(float((g * w).sum()) for g, w in pairs) / square
    if size <= _FEW:
        plain = [x for x in (1.0, num_ranks, 1 / num_ranks) if abs(factor / x - 1) < _CLOSE]
        factor = plain[0] if plain else 0.0
    slack = _CLOSE * max(_largest(w) for _, w in pairs) * abs(factor)
    return factor if factor and all(_largest(g - factor * w) <= slack for g, w in pairs) else None


def _ways(mine: tuple[int, ...], whole: tuple[int, ...], num_ranks: int) -> Iterator:
    """For each way to cut tensors of this shape out of the whole: which elements of each dim a rank has."""
    if len(mine) != len(whole):
        return
    choices = [list(_of_dim(a, b, num_ranks)) for a, b in zip(mine, whole)]
    for chosen in product(*choices):
        yield lambda rank, chosen=chosen: [index(rank) for index in chosen]


def _of_dim(mine: int, whole: int, num_ranks: int) -> Iterator:
    if mine == whole:
        yield lambda rank: np.arange(whole)
        return
    if not mine or whole % mine or whole // mine > num_ranks:
        return
    count = whole // mine
    for apart in (n for n in range(1, num_ranks // count + 1) if num_ranks % (n * count) == 0):
        for order in _orders(whole, count):
            yield lambda rank, order=order, apart=apart: order[rank // apart % count]


def _orders(whole: int, count: int) -> Iterator[np.ndarray]:
    """[count, whole / count]: contiguous; every n-th; a part of each of several fused tensors; first and last together,
    as of sequences that are balanced for causal attention."""
    every = np.arange(whole)
    yield every.reshape(count, -1)
    yield every.reshape(-1, count).T
    for parts in (2, 3):
        if whole % (parts * count) == 0:
            yield every.reshape(parts, count, -1).transpose(1, 0, 2).reshape(count, -1)
    if whole % (2 * count) == 0:
        chunks = every.reshape(2 * count, -1)
        yield np.concatenate([chunks[:count], chunks[count:][::-1]], axis=1)


def _largest(x: np.ndarray) -> float:
    return float(np.abs(x).max(initial=0))
