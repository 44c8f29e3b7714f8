"""Pairwise covers: fewer rows, in which every pair of values that occurs in some row still occurs.

Most faults need one value to appear (an unknown dtype) or a pair (a dtype, and a mesh of one rank), and hardly any
needs three. So instead of every case, tests take a pairwise cover of them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import combinations, product
from typing import Any


def cover(rows: Iterable[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """Some of these rows, in order. Every pair of values in two columns of a row also occurs in one of the result.

    Greedy: the row with the most new pairs is next, the first of several. The result is deterministic.
    """
    listed = [tuple(row) for row in rows]
    left = {place: _pairs(row) for place, row in enumerate(listed)}
    missing = set().union(*left.values())
    taken = []
    while missing:
        best = max(left, key=lambda place: len(left[place] & missing))
        missing -= left.pop(best)
        taken.append(best)
    return [listed[place] for place in sorted(taken)]


def pairs(*columns: Iterable[Any]) -> list[tuple[Any, ...]]:
    """A cover of all rows that have one value from each column."""
    return cover(product(*columns))


def _pairs(row: Sequence[Any]) -> set[Hashable]:
    named = [(column, _name(value)) for column, value in enumerate(row)]
    return set(combinations(named, 2))


def _name(value: Any) -> Hashable:
    return value if isinstance(value, Hashable) else repr(value)
