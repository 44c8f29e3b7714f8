"""What is wrong with gradients, given the reference's and the contributions of ranks and microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from tplab.checking.gaps import farthest, gap, largest
from tplab.checking.observed import Way, first_fit
from tplab.checking.places import Index, Place
from tplab.checking.recording import some_of
from tplab.units import plain, ranks_text

SMALL, MOST_SMALL = 2, 16
"""A tensor of so few elements is nearly a multiple of any other of its size, so its factor is weak evidence. More
elements than parts are needed to tell the parts apart."""


Part = tuple[int, int]
"""A rank and a microbatch."""

_VAGUE = ("scaled", "by rank", "other")
"""Kinds of faults that a small tensor may seem to have whatever is wrong."""


class Holder(NamedTuple):
    """A rank's gradient of a parameter, or of its part of it; None if it has none. parts: of each microbatch."""

    rank: int
    place: Place
    gradient: np.ndarray | None
    parts: Sequence[np.ndarray | None]


@dataclass(frozen=True)
class Wrong:
    """What is wrong with one gradient.

    kind    "scaled", "by rank" (a different multiple on each), "none", "shape", "other"; of parts: "missing" (those of
            some `ranks`), "own" (all but the rank's own are), "microbatches" (some are), "again" (some count several
            times), "means" (parts of different sizes count the same), "weights"
    factor  of the reference's gradient, or of the parts that are included
    needed  the factor with which each part would get its right weight, if that differs
    """

    name: str
    kind: str
    words: str = ""
    factor: float | None = None
    ranks: tuple[int, ...] = ()
    error: float = 0.0
    got: float = 0.0
    want: float = 0.0
    scales: tuple[float, ...] = ()
    size: int = 0
    needed: tuple[tuple[Part, float], ...] = ()

    @property
    def key(self) -> tuple:
        """The same for gradients with the same fault."""
        factor = 0.0 if self.factor is None else float(f"{self.factor:.3g}")
        return self.kind, factor, () if self.kind == "own" else self.ranks


def judge_gradient(name: str, want: np.ndarray | None, holders: Sequence[Holder], slack: float) -> Wrong | None:
    """Return what is wrong with the gradient of a parameter on the ranks that hold it; None if nothing is.

    want    the reference's, whole
    slack   how far rounding may move an element
    """
    if want is None:
        has = [h for h in holders if h.gradient is not None and largest(h.gradient) > slack]
        return Wrong(name, "none", "there is one, but none in the reference", ranks=_ranks(has)) if has else None
    wanted = [h.place.take(want).astype(np.float64) for h in holders]
    without = [h for h, w in zip(holders, wanted) if h.gradient is None and largest(w) > slack]
    if without:
        return Wrong(name, "none", "missing: nothing has reached it in the backward pass", 0.0, _ranks(without))
    there = [(h, h.gradient.astype(np.float64), w) for h, w in zip(holders, wanted) if h.gradient is not None]
    if unlike := [h for h, g, w in there if g.shape != w.shape]:
        return Wrong(name, "shape", "of another shape than the reference's", ranks=_ranks(unlike))
    bad = [(h, g, w) for h, g, w in there if gap(g, w) > slack]
    if not bad:
        return None
    holder, g, w = bad[0]
    got, there_should = farthest(g, w)
    size = largest(want) or 1.0
    error = max(gap(g, w) for _, g, w in bad) / size
    facts: dict[str, Any] = {"error": error, "got": got, "want": there_should, "size": want.size}
    if not any(g.any() for _, g, _ in there):
        return Wrong(name, "scaled", factor=0.0, **facts)
    groups: dict[Index, list[int]] = {}
    for h, _, _ in there:
        groups.setdefault(h.place.index, []).append(h.rank)
    may_be_parts = all(len(group) > 1 for group in groups.values()) and there[0][2].size > SMALL
    way = Way({h.rank: w for h, _, w in there}, [((), list(groups.values()))] * may_be_parts)
    found = first_fit({h.rank: g for h, g, _ in there}, [way], 2 * slack, apart=True)
    kind = "" if found is None else found.kind
    if found is not None and kind == "scaled":
        return Wrong(name, "scaled", factor=found.factor, **facts)
    if shares := _by_parts(there, holder.rank, holder.place.index, slack / size):
        return replace(shares, name=name, **facts)
    if found is not None and kind == "multiples" and want.size > SMALL:
        words = ", ".join(f"{x:.4g}" for x in found.factors)
        return Wrong(name, "by rank", f"{words} times the reference's, rank by rank", scales=found.factors, **facts)
    if kind == "parts":
        return Wrong(name, "own", "each rank has only what its own part gives", **facts)
    wrong = _ranks([h for h, _, _ in bad])
    ranks = wrong if len(wrong) < len(holders) else ()
    words = f"off by {facts['error']:.2g} of its largest element, and rounding by less than {slack / size:.2g}"
    return Wrong(name, "other", words, ranks=ranks, **facts)


def _by_parts(there: Sequence[tuple[Holder, np.ndarray, np.ndarray]], rank: int, index: Index, tolerance: float):
    """Return what the contributions of ranks with the same piece show; None if they explain nothing."""
    parts: dict[Part, np.ndarray] = {}
    pair = None
    for holder, g, w in there:
        if holder.place.index != index:
            continue
        for batch, part in enumerate(holder.parts):
            if part is not None:
                parts[holder.rank, batch] = part
        if holder.rank == rank:
            places = some_of(g.size)
            pair = g.reshape(-1)[places], w.reshape(-1)[places]
    if pair is None or not parts or any(len(part) != len(pair[0]) for part in parts.values()):
        return None
    if len(pair[0]) <= max(MOST_SMALL // 2, 2 * len(parts)):
        return None
    return find_shares(parts, *pair, rank, tolerance)


def _ranks(holders: Sequence[Holder]) -> tuple[int, ...]:
    return tuple(holder.rank for holder in holders)


def grouped(wrong: Sequence[Wrong]) -> list[list[Wrong]]:
    """Group gradients with the same fault; `wrong` is in the order of the backward pass, and so are the groups.

    Gradients behind one without a clear fault are left out, as they may follow from it. A gradient of few elements is
    weak evidence, so it joins the others.
    """
    telling = [one for one in wrong if one.size > MOST_SMALL or one.kind not in _VAGUE] or list(wrong)
    groups: dict[tuple, list[Wrong]] = {}
    vague = next((place for place, one in enumerate(telling) if one.kind == "other"), len(telling))
    vague = max(vague, 1)
    for one in telling[:vague]:
        groups.setdefault(one.key, []).append(one)
    for one in telling[vague:]:
        if one.key in groups:
            groups[one.key].append(one)
    found = list(groups.values())
    found[0] += [one for one in wrong if one not in telling]
    return _joined(found)


def _joined(groups: list[list[Wrong]]) -> list[list[Wrong]]:
    """Join scaled gradients with those whose factor differs by rank: a shard shows only the factor of one rank."""
    scales = [scale for group in groups for one in group for scale in one.scales]
    factors = [one.factor for group in groups for one in group if one.kind == "scaled"]
    is_within = all(f is not None and min(scales) - 1e-2 <= f <= max(scales) + 1e-2 for f in factors if scales)
    if not scales or not is_within or any(one.kind not in ("scaled", "by rank") for group in groups for one in group):
        return groups
    together = [one for group in groups for one in group]
    return [sorted(together, key=lambda one: not one.scales)]


# --- the weight of each part, compared with the right weight ----------------------------------------------------------
#
# A right gradient is a weighted sum of the parts that ranks and microbatches computed: with weights of 1/4, for
# example, for four ranks whose losses are means over equally many samples. A mistake in adding them up gives other
# weights. Both sets of weights are found by least squares.

_SAME = 2e-3
"""Weights that are this close, relative to the largest, are equal."""


def find_shares(
    parts: dict[Part, np.ndarray], got: np.ndarray, want: np.ndarray, rank: int, tolerance: float
) -> Wrong | None:
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


def _named(has: np.ndarray, should: np.ndarray, groups: Sequence[Sequence[Part]], rank: int) -> Wrong | None:
    """Return what wrong weights mean.

    groups   for each weight, the ranks and microbatches whose part it multiplies
    """
    is_there = np.abs(has) > _SAME * max(np.abs(has).max(), np.abs(should).max())
    if not is_there.any():
        return Wrong("", "missing", "without the parts of all ranks", 0.0)
    ranks = [{of for of, _ in group} for group in groups]
    batches = [{batch for _, batch in group} for group in groups]
    gone, stay = _split(batches, is_there)
    if gone and not gone & stay:
        last = stay == {max(gone | stay)}
        words = "of the last microbatch only" if last else f"without microbatches {_listed(gone)}"
        return Wrong("", "microbatches", words)
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
        return Wrong("", "missing", words, factor, tuple(sorted(left)))
    if not left & held:
        words = f"only from the part of {ranks_text(sorted(held))}"
        return Wrong("", "own", words, None, tuple(sorted(left)))
    if all(there for of, there in zip(ranks, is_there) if rank in of):
        return Wrong("", "own", f"each rank has only what its own part gives for microbatches {_listed(gone)}")
    return _weights(has, should)


def _all_there(has: np.ndarray, should: np.ndarray, ratio: np.ndarray, batches: Sequence[set[int]]) -> Wrong:
    if np.ptp(ratio) <= _SAME * np.abs(ratio).max():
        return Wrong("", "scaled", "", float(ratio.mean()))
    by_batch = {min(batch): r for batch, r in zip(batches, ratio)}
    if all(abs(by_batch[min(batch)] - r) <= _SAME * abs(r) for batch, r in zip(batches, ratio)):
        times = [by_batch[batch] / by_batch[max(by_batch)] for batch in sorted(by_batch)]
        if len(times) > 1 and all(abs(t - round(t)) < 1e-2 for t in times) and times == sorted(times, reverse=True):
            words = f"microbatches count {', '.join(map(plain, times))} times as much as the last one"
            return Wrong("", "again", words, float(ratio.max()))
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


def _weights(has: np.ndarray, should: np.ndarray, kind: str = "weights") -> Wrong:
    return Wrong(
        "", kind, "parts weighted by " + ", ".join(f"{plain(h)} (not {plain(s)})" for h, s in zip(has, should))
    )


def _split(sets: Sequence[set[int]], is_there: np.ndarray) -> tuple[set[int], set[int]]:
    """Return the ranks or microbatches of the missing parts, and of the included ones."""
    gone = set().union(*(of for of, there in zip(sets, is_there) if not there))
    return gone, set().union(*(of for of, there in zip(sets, is_there) if there))


def _listed(numbers: set[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))
