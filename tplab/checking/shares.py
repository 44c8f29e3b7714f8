"""The weight of each rank's and each microbatch's part in a gradient, compared with the right weight.

A right gradient is a weighted sum of the parts that ranks and microbatches computed: with weights of 1/4, for example,
for four ranks whose losses are means over equally many samples. A mistake in adding them up gives other weights. Both
sets of weights are found by least squares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tplab.checking.gaps import largest
from tplab.units import plain, ranks_text

_SAME = 2e-3
"""Weights that are this close, relative to the largest, are equal."""

Part = tuple[int, int]
"""A rank and a microbatch."""


@dataclass(frozen=True)
class Shares:
    """The composition of a gradient.

    kind     "scaled", "missing" (parts of some ranks), "own" (parts of the rank itself only), "microbatches" (some are
             missing), "again" (some count several times), "means" (parts of different sizes count the same), "weights"
    factor   of the parts that are included
    ranks    whose parts are missing
    words    the same as a phrase
    needed   the factor with which each part would get its right weight, if that differs
    """

    kind: str
    words: str
    factor: float | None = None
    ranks: tuple[int, ...] = ()
    needed: tuple[tuple[Part, float], ...] = ()


def find_shares(
    parts: dict[Part, np.ndarray], got: np.ndarray, want: np.ndarray, rank: int, tolerance: float
) -> Shares | None:
    """Return what is wrong with `got`, the gradient on `rank`, which should be `want`; None if parts do not explain it.

    parts      what each rank and microbatch has computed: flat arrays, as are `got` and `want`
    tolerance  how far a sum of parts may be off, relative to the largest element of `want`
    """
    columns, groups = _distinct(parts, tolerance)
    if len(columns) < 2 or len(want) <= len(columns):
        return None
    matrix = np.stack(columns, axis=1)
    slack = 20 * tolerance
    if np.linalg.svd(matrix, compute_uv=False)[-1] < slack * np.abs(matrix).max():
        return None  # the parts are too much alike to tell them apart
    should, is_right = _solve(matrix, want, slack)
    has, is_made = _solve(matrix, got, slack)
    if not is_made:
        return None
    if not is_right:
        should = np.zeros_like(has)
    found = _named(has, should, groups, rank)
    if found is None or found.kind not in ("means", "weights") or not has.all():
        return found
    by = {part: float(s / h) for group, h, s in zip(groups, has, should) for part in group}
    return replace(found, needed=tuple(by.items()))


def _distinct(parts: dict[Part, np.ndarray], tolerance: float) -> tuple[list[np.ndarray], list[list[Part]]]:
    """Return the parts that differ from one another, and the parts equal to each: those of ranks that hold copies."""
    columns: list[np.ndarray] = []
    groups: list[list[Part]] = []
    for part, x in sorted(parts.items()):
        size = largest(x)
        for column, group in zip(columns, groups):
            if largest(column - x) <= 4 * tolerance * size and all(part[0] != other for other, _ in group):
                group.append(part)
                break
        else:
            columns.append(x)
            groups.append([part])
    return columns, groups


def _solve(matrix: np.ndarray, x: np.ndarray, slack: float) -> tuple[np.ndarray, bool]:
    weights, *_ = np.linalg.lstsq(matrix, x, rcond=None)
    size = max(largest(x), largest(matrix * weights))
    return weights, bool(largest(matrix @ weights - x) <= slack * size)


def _named(has: np.ndarray, should: np.ndarray, groups: Sequence[Sequence[Part]], rank: int) -> Shares | None:
    """Return what wrong weights mean.

    groups   for each weight, the ranks and microbatches whose part it multiplies
    """
    is_there = np.abs(has) > _SAME * max(np.abs(has).max(), np.abs(should).max())
    if not is_there.any():
        return Shares("missing", "without the parts of all ranks", 0.0)
    ranks = [{of for of, _ in group} for group in groups]
    batches = [{batch for _, batch in group} for group in groups]
    gone, stay = _split(batches, is_there)
    if gone and not gone & stay:
        last = stay == {max(gone | stay)}
        words = "of the last microbatch only" if last else f"without microbatches {_listed(gone)}"
        return Shares("microbatches", words)
    if np.abs(should).min() < _SAME:
        return None
    ratio = has / should
    if is_there.all():
        return _all_there(has, should, ratio, batches)
    left, held = _split(ranks, is_there)
    factor = float(ratio[is_there].mean()) if np.ptp(ratio[is_there]) <= _SAME * np.abs(ratio).max() else None
    if not left & held and not (held == {rank} or (rank in held and 2 * len(held) <= len(held | left))):
        words = f"without the part of {ranks_text(sorted(left))}"
        words += "" if factor is None or abs(factor - 1) < _SAME else f", {plain(factor)} times"
        return Shares("missing", words, factor, tuple(sorted(left)))
    if not left & held:
        words = f"only from the part of {ranks_text(sorted(held))}"
        return Shares("own", words, None, tuple(sorted(left)))
    if all(there for of, there in zip(ranks, is_there) if rank in of):
        return Shares("own", f"each rank has only what its own part gives for microbatches {_listed(gone)}")
    return _weights(has, should)


def _all_there(has: np.ndarray, should: np.ndarray, ratio: np.ndarray, batches: Sequence[set[int]]) -> Shares:
    if np.ptp(ratio) <= _SAME * np.abs(ratio).max():
        return Shares("scaled", "", float(ratio.mean()))
    by_batch = {min(batch): r for batch, r in zip(batches, ratio)}
    if all(abs(by_batch[min(batch)] - r) <= _SAME * abs(r) for batch, r in zip(batches, ratio)):
        times = [by_batch[batch] / by_batch[max(by_batch)] for batch in sorted(by_batch)]
        if len(times) > 1 and all(abs(t - round(t)) < 1e-2 for t in times) and times == sorted(times, reverse=True):
            words = f"microbatches count {', '.join(map(plain, times))} times as much as the last one"
            return Shares("again", words, float(ratio.max()))
    spread = np.ptp(should) / np.abs(should).max()
    if np.ptp(has) <= 0.2 * spread * np.abs(has).max() or len(_unlike(has)) < len(_unlike(should)):
        return _weights(has, should, "means")
    return _weights(has, should)


def _unlike(weights: np.ndarray) -> list[float]:
    found: list[float] = []
    for weight in weights:
        if all(abs(weight - other) > _SAME * np.abs(weights).max() for other in found):
            found.append(float(weight))
    return found


def _weights(has: np.ndarray, should: np.ndarray, kind: str = "weights") -> Shares:
    return Shares(kind, "parts weighted by " + ", ".join(f"{plain(h)} (not {plain(s)})" for h, s in zip(has, should)))


def _split(sets: Sequence[set[int]], is_there: np.ndarray) -> tuple[set[int], set[int]]:
    """Return the ranks or microbatches of the missing parts, and of the included ones."""
    gone = set().union(*(of for of, there in zip(sets, is_there) if not there))
    return gone, set().union(*(of for of, there in zip(sets, is_there) if there))


def _listed(numbers: set[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))
