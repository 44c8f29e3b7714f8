"""How a tensor of the reference is spread over ranks that are not on a mesh, or of which some have none of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice, product

import numpy as np

from tplab.checking.observed import Observed, Way, first_fit, largest

_CLOSE = 1e-3
"""Relative to the largest element: float32 in a few layers, added up in another order."""

_FEW = 2
"""So few elements are a multiple of any others: only plain factors count."""

_MOST_WAYS = 400


def find_spread(pieces: Mapping[int, np.ndarray], want: np.ndarray, num_ranks: int) -> Observed | None:
    """How `want` is spread; None if it is in no way that is known.

    pieces   of each rank that has one
    """
    want = want.astype(np.float64)
    got = {rank: piece.astype(np.float64) for rank, piece in pieces.items()}
    size = largest(want)
    if len({piece.shape for piece in got.values()}) != 1 or not all(
        np.isfinite(x).all() for x in [want, *got.values()]
    ):
        return None
    if size == 0:
        return Observed("equal", factor=0.0) if all(largest(piece) == 0 for piece in got.values()) else None
    ways = islice(_ways(next(iter(got.values())).shape, want, num_ranks, tuple(got)), _MOST_WAYS)
    return first_fit(got, list(ways), _CLOSE * size, (1.0, num_ranks, 1 / num_ranks) if want.size <= _FEW else ())


def _ways(mine: tuple[int, ...], want: np.ndarray, num_ranks: int, ranks: tuple[int, ...]) -> Iterator[Way]:
    """Each way to cut tensors of this shape out of the whole."""
    if len(mine) != want.ndim:
        return
    for chosen in product(*(list(_of_dim(a, b, num_ranks)) for a, b in zip(mine, want.shape))):
        places = {rank: [index(rank) for index in chosen] for rank in ranks}
        alike: dict[bytes, list[int]] = {}
        for rank, indices in places.items():
            alike.setdefault(b"|".join(index.tobytes() for index in indices), []).append(rank)
        groups = list(alike.values())
        is_even = len({len(group) for group in groups}) == 1 and len(groups[0]) > 1
        cut = {rank: want[np.ix_(*indices)] if indices else want for rank, indices in places.items()}
        yield Way(cut, [((), groups)] if is_even else [])


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
