"""The part of the reference's parameter that each rank's tensor is: by the script's offsets, name, shape and values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Any

import numpy as np

from tplab.checking.gaps import filled, gap, is_constant, largest
from tplab.checking.recording import Piece, Seen, checksum
from tplab.layout import MOST_PARTS

Index = tuple[Any, ...]
"""For each dim, the (start, stop) of each range of elements."""

_CLOSE = 1e-5


@dataclass(frozen=True)
class Place:
    """The elements of a reference tensor that a rank's tensor consists of.

    name      the reference's
    index     for each dim, the ranges of elements; the same for ranks that hold copies
    fits      whether the initial values are the reference's
    elements  for a part that is cut in another way, the number of each of its elements; `shape` is the part's, which is
              also given for a last part with rows of zeros at its end
    """

    name: str
    index: Index
    fits: bool
    elements: np.ndarray | None = None
    shape: tuple[int, ...] = ()

    def take(self, whole: np.ndarray) -> np.ndarray:
        """Return this part of the reference's tensor, or of any tensor of its shape."""
        if self.elements is not None:
            return whole.reshape(-1)[self.elements].reshape(self.shape)
        for dim, ranges in enumerate(self.index):
            before = (slice(None),) * dim
            pieces = [whole[(*before, slice(start, stop))] for start, stop in ranges]
            whole = pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=dim)
        return filled(whole, self.shape) if self.shape else whole


Places = dict[tuple[int, str], Place]
"""By rank, and by the rank's own name for a parameter."""


def whole_of(pieces: Sequence[Piece | None]) -> np.ndarray | None:
    """Return one tensor made of the ranks' pieces, assembled if the script gives their offsets; else one copy."""
    there = [piece for piece in pieces if piece is not None]
    if not there:
        return None
    first = there[0]
    if first.shape is None or first.values.shape == first.shape:
        return first.values
    whole = np.zeros(first.shape, first.values.dtype)
    for piece in there:
        if piece.start is not None:
            whole[tuple(slice(at, at + size) for at, size in zip(piece.start, piece.values.shape))] = piece.values
    return whole


def find_places(
    ours: Sequence[Seen], whole: Mapping[str, np.ndarray], gradients: Mapping[str, np.ndarray] | None = None
) -> Places:
    """Return the place of every rank's parameters in the reference's, whose initial weights are `whole`. Parameters
    without a counterpart are left out. `gradients` are the reference's of the first step: they tell apart the parts of
    a parameter that is constant at the start."""
    found: Places = {}
    values = _Values(whole)
    for rank in range(len(ours)):
        found.update(((rank, name), place) for name, place in _of_rank(rank, ours, whole, values, gradients or {}))
    return found


def _of_rank(
    rank: int,
    ours: Sequence[Seen],
    whole: Mapping[str, np.ndarray],
    values: _Values,
    gradients: Mapping[str, np.ndarray],
) -> Iterator[tuple[str, Place]]:
    seen = ours[rank]
    votes: Counter[tuple[int, ...]] = Counter()  # of places that are known
    renamed: dict[str, str] = {}
    late = []
    is_named = any(not is_number(name) for name in seen.weights)
    for name, piece in seen.weights.items():
        fitting = list(_fitting(piece, name, whole))
        if not fitting and not is_constant(piece.values):
            names = [name] if name in whole else []  # then others of its shape: a stage may renumber its layers
            # Values alone do not decide: with one seed, a rank may draw a part of another parameter
            names += [other for other, x in whole.items() if other != name and x.shape == whole.get(name, x).shape]
            names += [other for other, x in whole.items() if other not in names and x.shape == piece.values.shape]
            fitting = list(islice((place for other in names for place in _fitting(piece, other, whole)), 1))
            if not fitting and piece.start is None:
                fitting = list(islice(values.find(piece.values, names), 1))
            if fitting and (twins := values.twins(fitting[0].name)):
                best = max(
                    twins, key=lambda other: (_siblings(name, other, seen.weights, whole), other == fitting[0].name)
                )
                fitting = [replace(fitting[0], name=best)]
        if fitting and not is_constant(piece.values):
            votes.update(_chunks(fitting[0], whole))
            _learn(renamed, name, fitting[0].name)
            yield name, fitting[0]
        elif not (is_named and is_number(name)) or name in seen.used or _is_alone(name, piece, whole):
            late.append((name, piece, fitting))  # all but an optimizer's own flat piece of others
    for name, piece, fitting in late:
        known = _rename(renamed, name)
        if known not in whole:  # a tied parameter may have mapped its module to another one
            ends = [other for other in whole if other.endswith(f".{name}") and list(_fitting(piece, other, whole))]
            known = ends[0] if len(ends) == 1 else known
        if known != name:
            fitting = list(_fitting(piece, known, whole)) or fitting
        if is_number(name):  # of no module, as when a stage uses another's embedding matrix
            alike = [other for other, x in whole.items() if x.shape == piece.values.shape]
            known = alike[0] if len(alike) == 1 else known
        candidates = fitting or [Place(known, index, False) for index in _indices(piece, known, whole)]
        if candidates:
            best = max(candidates, key=lambda place: sum(votes[chunk] for chunk in _chunks(place, whole)))
            if fitting and not any(votes[chunk] for chunk in _chunks(best, whole)):
                best = _nearest(candidates, seen, name, gradients) or best
            elif not votes and not fitting:
                best = candidates[_turn(rank, ours, name) % len(candidates)]
            yield name, best


class _Values:
    """Finds tensors by their values alone, however they are cut: random values are all different."""

    def __init__(self, whole: Mapping[str, np.ndarray]):
        self._whole = whole
        self._sorted: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self._alike: dict[tuple, list[str]] = {}

    def twins(self, name: str) -> list[str]:
        """Return the parameters that have the values of this one, if there are several: ranks may each hold another one
        of tied parameters."""
        if not self._alike:
            for other, x in self._whole.items():
                self._alike.setdefault((x.shape, checksum(x)), []).append(other)
        found = self._alike[self._whole[name].shape, checksum(self._whole[name])]
        return found if len(found) > 1 else []

    def find(self, piece: np.ndarray, names: Sequence[str]) -> Iterator[Place]:
        """Yield the places of these values in parameters of these names."""
        some = piece.reshape(-1)[:MOST_TRIED]
        for other in names:
            if self._whole[other].size < piece.size or self._whole[other].dtype != piece.dtype:
                continue
            if other not in self._sorted:
                order = np.argsort(self._whole[other], axis=None)
                self._sorted[other] = order, self._whole[other].reshape(-1)[order]
            if (
                self._numbers(other, some) is not None
                and (found := self._numbers(other, piece.reshape(-1))) is not None
                and np.unique(found).size == found.size
            ):
                index = (("elements", found.tobytes()),)
                yield Place(other, index, True, found, piece.shape)

    def _numbers(self, name: str, values: np.ndarray) -> np.ndarray | None:
        """Return the index of each of these values in a parameter; None if one of them is missing."""
        order, known = self._sorted[name]
        at = np.minimum(np.searchsorted(known, values), known.size - 1)
        return order[at] if np.array_equal(known[at], values) else None


MOST_TRIED = 16


def _shape(whole: Mapping[str, np.ndarray], name: str) -> tuple[int, ...] | None:
    return whole[name].shape if name in whole else None


def _is_alone(name: str, piece: Piece, whole: Mapping[str, np.ndarray]) -> bool:
    """Return whether a parameter has the reference's shape, and is no copy of another one, as in another precision."""
    alike = (x for other, x in whole.items() if other != name and x.shape == piece.values.shape)
    return piece.values.shape == _shape(whole, name) and all(gap(x, whole[name]) > 1e-2 * largest(x) for x in alike)


def _siblings(name: str, other: str, held: Mapping[str, Piece], whole: Mapping[str, np.ndarray]) -> int:
    """Return how many of a rank's parameters have a counterpart if the rank's `name` is the reference's `other`."""
    renamed = dict[str, str]()
    _learn(renamed, name, other)
    return sum(_rename(renamed, one) in whole for one in held if _rename(renamed, one) != one)


def is_number(name: str) -> bool:
    """Return whether a parameter belongs to no module, so that its name is a number."""
    return name.startswith("parameter ")


def _fitting(piece: Piece, name: str, whole: Mapping[str, np.ndarray]) -> Iterator[Place]:
    """Yield the places in the reference's parameter `name` that have the values of the piece."""
    if name not in whole:
        return
    slack = _CLOSE * largest(whole[name])
    for index in _indices(piece, name, whole):
        place = Place(name, index, True)
        if gap(place.take(whole[name]), piece.values) <= slack:
            yield place
    (mine, *rest), (size, *others) = ([*x.shape, 1][: max(x.ndim, 1)] for x in (piece.values, whole[name]))
    if piece.shape is None and piece.values.ndim and rest == others and 0 < size % max(mine, 1) < size:
        ranges = ((size // mine * mine, size),), *(((0, other),) for other in others)
        place = Place(name, ranges, True, shape=piece.values.shape)
        if gap(place.take(whole[name]), piece.values) <= slack:
            yield place


def _indices(piece: Piece, name: str, whole: Mapping[str, np.ndarray]) -> Iterator[Index]:
    """Yield the places that a tensor of this shape may have, the simplest first."""
    shape = _shape(whole, name)
    local = piece.values.shape
    if shape is None or len(shape) != len(local):
        return
    if piece.shape is not None and piece.start is not None:
        if piece.shape == shape:
            yield tuple(((at, at + size),) for at, size in zip(piece.start, local))
        return
    if sum(mine != size for mine, size in zip(local, shape)) <= 2:
        yield from product(*(list(_ranges(size, mine)) for size, mine in zip(shape, local)))


def _ranges(size: int, mine: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yield the ranges of a rank with `mine` of `size` elements: all, a chunk, or a chunk of each fused part."""
    if mine == size:
        yield ((0, size),)
    if not 0 < mine < size:
        return
    starts = dict.fromkeys([*range(0, size - mine + 1, mine), size - mine])
    yield from (((start, start + mine),) for start in starts)
    for parts in range(2, MOST_PARTS + 1):
        if mine % parts == 0 and size % mine == 0:
            part, chunk = size // parts, mine // parts
            for start in range(0, part, chunk):
                yield tuple((at * part + start, at * part + start + chunk) for at in range(parts))


def _chunks(place: Place, whole: Mapping[str, np.ndarray]) -> list[tuple[int, ...]]:
    """Return, for each dim that is cut, the number of chunks and which one it is; and its sizes and the first element,
    because chunks may be of unequal sizes."""
    found = list[tuple[int, ...]]()
    if place.elements is not None:
        return found
    for dim, (ranges, size) in enumerate(zip(place.index, whole[place.name].shape)):
        mine = place.shape[dim] if place.shape else sum(stop - start for start, stop in ranges)
        if 0 < mine < size:
            chunk = mine if place.shape else ranges[0][1] - ranges[0][0]
            found += [(-(-size // mine), ranges[0][0] // chunk), (size, mine, ranges[0][0])]
    return found


def _nearest(candidates: Sequence[Place], seen: Seen, name: str, gradients: Mapping[str, np.ndarray]) -> Place | None:
    """Return the place whose reference gradient is most parallel to the rank's."""
    mine = seen.steps[0].gradients.get(name) if seen.steps else None
    if mine is None or candidates[0].name not in gradients:
        return None

    def alike(place: Place) -> float:
        a, b = mine.values.reshape(-1), place.take(gradients[place.name]).reshape(-1)
        sizes = float(np.linalg.norm(a) * np.linalg.norm(b))
        return abs(float(a @ b)) / sizes if a.shape == b.shape and sizes else 0.0

    return max(candidates, key=alike)


def _turn(rank: int, ours: Sequence[Seen], name: str) -> int:
    """Return which of the distinct values of a tensor a rank has, in the order of ranks."""
    distinct = dict.fromkeys(id(seen.weights[name].values) for seen in ours if name in seen.weights)
    return [*distinct].index(id(ours[rank].weights[name].values))


def _learn(renamed: dict[str, str], name: str, other: str) -> None:
    """Note how a name differs from the reference's, for example in the number of a stage's first layer."""
    mine, theirs = name.split("."), other.split(".")
    while mine and theirs and mine[-1] == theirs[-1]:
        mine, theirs = mine[:-1], theirs[:-1]
        renamed.setdefault(".".join(mine), ".".join(theirs))


def _rename(renamed: Mapping[str, str], name: str) -> str:
    parts = name.split(".")
    for count in range(len(parts) - 1, -1, -1):
        before = ".".join(parts[:count])
        if before in renamed:
            return ".".join([*filter(None, [renamed[before]]), *parts[count:]])
    return name
