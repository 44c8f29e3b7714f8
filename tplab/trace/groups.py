"""The groups of a trace as people read them: many groups of one kind are one name, "8 groups of 2 (0,4 ...)"."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from tplab.mesh import ranks_of
from tplab.trace.trace import Trace


def kinds(trace: Trace) -> dict[str, str]:
    """The label of each group in `trace` -> its name, which similar groups that are not axes share.

    Groups are similar if their ranks are equally far apart: 0,4 and 1,5 and 2,6. Of the remaining groups, those with
    equally many ranks are similar. An axis keeps its name, and so does a group that is similar to no other.
    """
    labels, found = _labels(trace), {}
    for shape in (_distances, len):
        alike: dict[object, list[str]] = {}
        for label in labels:
            if (ranks := ranks_of(label)) and label not in found:
                alike.setdefault(shape(ranks), []).append(label)
        for members in alike.values():
            if len(members) > 1:
                first = min(map(ranks_of, members))
                name = f"{len(members)} groups of {len(first)} ({','.join(map(str, first))} ...)"
                found.update(dict.fromkeys(members, name))
    return {label: found.get(label, label) for label in labels}


def kinds_apart(trace: Trace) -> dict[str, str]:
    """The same, but similar groups that have a rank in common keep their own names."""
    found = kinds(trace)
    members: dict[str, list[int]] = {}
    for label, kind in found.items():
        members.setdefault(kind, []).extend(ranks_of(label))
    return {label: kind if len(set(members[kind])) == len(members[kind]) else label for label, kind in found.items()}


def _labels(trace: Trace) -> list[str]:
    """The labels of axes in order of appearance, then those of groups by their ranks: which appears first is chance."""
    table, codes = trace.codes("axis")
    return sorted((table[code] for code in np.unique(codes) if table[code]), key=ranks_of)


def _distances(ranks: Sequence[int]) -> tuple[int, ...]:
    return tuple(later - earlier for earlier, later in pairwise(ranks))
