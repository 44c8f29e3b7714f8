"""What is wrong with gradients, given the reference's and the contributions of ranks and microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tplab.checking.gaps import farthest, gap, largest
from tplab.checking.observed import Way, first_fit
from tplab.checking.places import Index, Place
from tplab.checking.recording import some_of
from tplab.checking.shares import Part, find_shares

SMALL, MOST_SMALL = 2, 16
"""A tensor of so few elements is nearly a multiple of any other of its size, so its factor is weak evidence. More
elements than parts are needed to tell the parts apart."""


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

    kind    "scaled", "by rank" (a different multiple on each), "none", "shape", "other", or that of `Shares`
    factor  of the reference's gradient
    needed  see `Shares`
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
        return Wrong(name, shares.kind, shares.words, shares.factor, shares.ranks, needed=shares.needed, **facts)
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
