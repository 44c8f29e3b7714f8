"""The spans in which each rank holds something, or something is in transit to it, for `ranks` and `table`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from tplab.widgets.paper.scene import before
from tplab.widgets.score.holds import GONE
from tplab.widgets.score.score import COLLECTIVE, SEND, Score

Cell = tuple[int, int]
"""A rank, and one of the score's items."""


class Stretch(NamedTuple):
    """A span after `begin` and up to `end`, as in `Scene.during`. hold: its row in Score.holds."""

    hold: int
    begin: float
    end: float


def spans(score: Score) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The columns of all stretches, by rank and item: hold, begin and end."""
    holds = score.holds
    order = np.lexsort((holds["item"], holds["rank"]))
    cell = (holds["rank"].astype(int) * len(score.items) + holds["item"])[order]
    begin = np.nextafter(holds["time"][order], -math.inf)
    end = np.append(begin[1:], math.inf)
    end[np.append(cell[1:] != cell[:-1], True)] = math.inf
    there = (begin < end) & (holds["state"][order] != GONE)
    return order[there], begin[there], end[there]


def held(score: Score) -> dict[Cell, list[Stretch]]:
    """What each rank holds of an item, one hold after the other."""
    found: dict[Cell, list[Stretch]] = {}
    for hold, begin, end in zip(*(column.tolist() for column in spans(score))):
        cell = int(score.holds["rank"][hold]), int(score.holds["item"][hold])
        found.setdefault(cell, []).append(Stretch(hold, begin, end))
    return found


def coming(score: Score) -> dict[Cell, list[tuple[float, float]]]:
    """When a message with an item is in transit to a rank, or a collective makes the item."""
    bars, found = score.bars, {}
    for kind, to in ((SEND, "peer"), (COLLECTIVE, "rank")):
        rows = np.flatnonzero((bars["kind"] == kind) & (bars["item"] >= 0) & (bars["end"] > bars["start"]))
        for row in rows.tolist():
            cell = int(bars[to][row]), int(bars["item"][row])
            found.setdefault(cell, []).append((float(bars["start"][row]), before(float(bars["end"][row]))))
    return found


def without(begin: float, end: float, taken: Iterable[Stretch]) -> Iterator[tuple[float, float]]:
    """A span of time without others, which are in order of time."""
    for _, a, b in taken:
        if a > begin and begin < end:
            yield begin, min(a, end)
        begin = max(begin, b)
    if begin < end:
        yield begin, end


def joined(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Spans of time, with overlapping ones merged."""
    found: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if found and begin < found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found
