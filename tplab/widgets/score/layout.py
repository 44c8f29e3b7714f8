"""The places of ranks, links and slots: a ring for one axis, a grid for several. Lengths are CSS pixels."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from tplab.widgets.score.score import SEND, Score

SLOT, SLOT_GAP, SLOTS_A_ROW = 17, 3, 4
NUMBER = 40.0  # the width of a slot that has a number on it
LINK_GAP = 42  # at least this much of a link is visible between two boxes
DOT = 21.0  # a rank's diameter if there is no room for boxes
EDGE = 5  # from a box to the end of a link


@dataclass(frozen=True)
class Layout:
    """The picture's geometry.

    boxes     whether a rank is a box with a slot for every item, or a dot with its number
    centres   [ranks, 2]
    size      width and height of a box, or a dot's diameter, twice
    slots     for each rank the items it has a slot for, in order; empty if there are too many
    links     (from, to) -> a quadratic curve (x0, y0, cx, cy, x1, y1) between the two boxes
    labels    (x, y, text) of the mesh's axes, each in the middle of its text
    wide      the width of a slot
    """

    width: float
    height: float
    boxes: bool
    centres: np.ndarray
    size: tuple[float, float]
    slots: list[list[int]]
    links: dict[tuple[int, int], tuple[float, ...]]
    labels: list[tuple[float, float, str]]
    wide: float = SLOT

    def slot(self, rank: int, index: int) -> tuple[float, float]:
        """The upper left corner of a rank's slot."""
        row, column = divmod(index, SLOTS_A_ROW)
        in_row = min(SLOTS_A_ROW, len(self.slots[rank]) - row * SLOTS_A_ROW)
        x, y = self.centres[rank]
        left = x - (in_row * (self.wide + SLOT_GAP) - SLOT_GAP) / 2
        return left + column * (self.wide + SLOT_GAP), y - self.size[1] / 2 + 24 + row * (SLOT + SLOT_GAP)


@dataclass(frozen=True)
class Columns:
    """The layout of the table of what each rank holds: one row per rank, and the column of each item.

    Items that never meet on a rank (those of different groups) share columns. If there are many columns, the table
    shows one page of them at a time.
    """

    of_item: list[int]
    names: list[str]
    page_size: int
    first: list[int]  # the first column shown in each round; index 0 is before the first round


def columns(score: Score) -> Columns:
    """The column of each item, and which columns are visible when."""
    ranks_of: list[set[int]] = [set() for _ in score.items]
    for rank, item in zip(score.holds["rank"].tolist(), score.holds["item"].tolist()):
        ranks_of[item].add(rank)
    of_item, taken = [], []
    for ranks in ranks_of:
        index = next((index for index, there in enumerate(taken) if there.isdisjoint(ranks)), len(taken))
        if index == len(taken):
            taken.append(set())
        taken[index] |= ranks
        of_item.append(index)
    names = []
    for index in range(len(taken)):
        here = list(dict.fromkeys(score.heading(item) for item, at in enumerate(of_item) if at == index))
        names.append(" ".join(here) if len(here) <= 3 else f"{here[0]} …")
    page_size = 16 if score.trace.mesh.size <= 16 else 64
    first = np.full(score.num_steps + 1, len(taken))
    rows = (score.bars["item"] >= 0) & (score.bars["step"] >= 0)
    indices = np.array(of_item, int)[score.bars["item"][rows]] if of_item else np.zeros(0, int)
    np.minimum.at(first, score.bars["step"][rows] + 1, indices)
    first[0] = 0
    shown = [0]
    for index in first[1:].tolist():  # a round without items shows the same as the one before
        shown.append(index // page_size * page_size if index < len(taken) else shown[-1])
    return Columns(of_item, names, page_size, shown)


def layout(score: Score) -> Layout:
    """The geometry of a score's picture."""
    mesh = score.trace.mesh
    held: list[set[int]] = [set() for _ in mesh.ranks]
    for rank, item in zip(score.holds["rank"].tolist(), score.holds["item"].tolist()):
        held[rank].add(item)
    most = max(map(len, held))
    boxes = mesh.size <= 16
    slots = [sorted(items) if boxes and most <= 8 else [] for items in held]
    size = _box_size(most if boxes and most <= 8 else 0) if boxes else (DOT, DOT)
    sends = score.bars["kind"] == SEND
    used = set(zip(score.bars["rank"][sends].tolist(), score.bars["peer"][sends].tolist()))
    pairs = sorted(pair for pair in used if pair[0] != pair[1])
    both = {pair: pair[::-1] in used for pair in pairs}  # whether messages go both ways
    labels: list[tuple[float, float, str]] = []
    large_axes = [size for size in mesh.shape.values() if size > 1]
    if score.is_pipeline and boxes and mesh.size == max(mesh.shape.values()):
        centres = _grid(mesh.size, 8, (size[0] + 16, size[1] + 24))
        curves = {pair: _line_link(centres, pair, 8, size) for pair in pairs}
    elif len(large_axes) <= 1 and mesh.size <= 64:
        centres = _ring(mesh.size, size)
        curves = {pair: _ring_link(centres, pair, both[pair]) for pair in pairs}
    else:
        columns = mesh.shape[mesh.axis_names[-1]] if len(large_axes) > 1 else 16
        centres = _grid(mesh.size, columns, size)
        curves = {pair: _grid_link(centres, pair, columns, size, both[pair]) for pair in pairs}
        labels = _axis_labels(mesh, centres, columns, size)
    links = {pair: _trim(curve, size, boxes) for pair, curve in curves.items()}
    wide = NUMBER if score.shows_numbers else SLOT
    return replace(_placed(boxes, centres, size, slots, links, labels), wide=wide)


def _box_size(num_slots: int) -> tuple[float, float]:
    if not num_slots:
        return 64.0, 34.0
    rows = math.ceil(num_slots / SLOTS_A_ROW)
    return max(74.0, min(num_slots, SLOTS_A_ROW) * (SLOT + SLOT_GAP) + 15.0), 30.0 + rows * (SLOT + SLOT_GAP)


def _ring(num_ranks: int, size: tuple[float, float]) -> np.ndarray:
    """Ranks clockwise from the top; if there are two, side by side."""
    first = math.pi if num_ranks == 2 else -math.pi / 2
    angles = first + 2 * math.pi * np.arange(num_ranks) / num_ranks
    wide = 1.2 if num_ranks < 6 else 1.08 if num_ranks <= 8 else 1.0
    gap = (LINK_GAP if num_ranks < 6 else 30 if num_ranks <= 8 else 20) if size[0] > DOT else 2
    radius = 40.0 if num_ranks > 1 else 0.0
    while num_ranks > 1:
        centres = np.stack([wide * np.cos(angles), np.sin(angles)], 1) * radius
        if all(_gap(centres[i], centres[(i + 1) % num_ranks], size) >= gap for i in range(num_ranks)):
            return centres
        radius += 2
    return np.zeros((1, 2))


def _gap(a: np.ndarray, b: np.ndarray, size: tuple[float, float]) -> float:
    """The length of the line between two centres that is outside both boxes."""
    dx, dy = np.abs(b - a)
    if size[0] <= DOT:  # dots
        return math.hypot(dx, dy) - size[0]
    inside = min(size[0] / dx if dx else math.inf, size[1] / dy if dy else math.inf)
    return math.hypot(dx, dy) * (1 - inside)


def _grid(num_ranks: int, columns: int, size: tuple[float, float]) -> np.ndarray:
    step = np.array([size[0] + LINK_GAP, size[1] + LINK_GAP]) if size[0] > DOT else np.array([46.0, 46.0])
    indices = np.arange(num_ranks)
    return np.stack([indices % columns, indices // columns], 1) * step


def _line_link(centres: np.ndarray, pair: tuple[int, int], columns: int, size: tuple[float, float]) -> Curve:
    """A link between stages in a line: to the right above the middle, to the left below it. If they are not neighbours,
    it goes around the boxes between them."""
    a, b = centres[pair[0]], centres[pair[1]]
    side = np.array([0.0, -9.0 if pair[1] > pair[0] else 9.0])
    if pair[0] // columns != pair[1] // columns:
        return _bowed(a, b, 0.12)
    if abs(pair[1] - pair[0]) == 1:
        return a + side, (a + b) / 2 + side, b + side
    return a, (a + b) / 2 + np.sign(side) * (size[1] + 60), b


def _axis_labels(mesh, centres: np.ndarray, columns: int, size: tuple[float, float]) -> list[tuple[float, float, str]]:
    """The name of the last axis above the columns, and those of the others beside the rows."""
    *others, last = mesh.axis_names
    if columns != mesh.shape[last]:
        return []
    above = min(centres[:, 1]) - size[1] / 2 - 34
    labels = [(float(centres[index, 0]), above, f"{last} {index}") for index in range(columns)]
    for row in range(0, mesh.size, columns):
        where = mesh.coordinates(row)
        text = " ".join(f"{name} {where[name]}" for name in others if mesh.shape[name] > 1)
        labels.append((min(centres[:, 0]) - size[0] / 2 - 30 - 3 * len(text), float(centres[row, 1]), text))
    return labels


Curve = tuple[np.ndarray, np.ndarray, np.ndarray]


def _ring_link(centres: np.ndarray, pair: tuple[int, int], both: bool) -> Curve:
    """Neighbours: along the ring; if both directions are used, one outside and the other inside. Others: across."""
    num_ranks, (a, b) = len(centres), (centres[pair[0]], centres[pair[1]])
    hop = (pair[1] - pair[0]) % num_ranks
    if num_ranks == 2:
        return a, (a + b) / 2 + np.array([0, 44.0 if pair[0] else -44.0]), b
    if hop not in (1, num_ranks - 1) or (num_ranks == 3 and both):
        return _bowed(a, b, 0.16)
    if num_ranks > 16:  # dots are close together: chunks pass outside them, or inside on their way back
        aside = 1 + (17 if hop == 1 else -17) / math.hypot(*a)
        a, b, both = a * aside, b * aside, False
    middle = (a + b) / 2
    radius = max(math.hypot(*middle), 1.0)
    bulge = 1 / math.cos(math.pi / num_ranks)  # from the chord to the arc
    out = bulge if not both else bulge + 10 / radius if hop == 1 else bulge - 12 / radius
    return a, middle * (2 * out - 1), b  # a quadratic curve passes half-way between its control point and its chord


def _grid_link(
    centres: np.ndarray, pair: tuple[int, int], columns: int, size: tuple[float, float], both: bool
) -> Curve:
    """Neighbours: straight, or curved if both directions are used. Others in one row or column: around the boxes
    between them."""
    a, b = centres[pair[0]], centres[pair[1]]
    rows = abs(pair[1] // columns - pair[0] // columns)
    cols = abs(pair[1] % columns - pair[0] % columns)
    if rows + cols == 1:
        return _bowed(a, b, 0.2 if both else 0.0)
    if rows and cols:
        return _bowed(a, b, 0.12)
    normal = np.array([b[1] - a[1], a[0] - b[0]]) / math.hypot(*(b - a))
    room = (size[1] if cols else size[0]) / 2 + (17 if size[0] > DOT else 9)
    return a, (a + b) / 2 - normal * 2 * room, b


def _bowed(a: np.ndarray, b: np.ndarray, bow: float) -> Curve:
    normal = np.array([b[1] - a[1], a[0] - b[0]])
    return a, (a + b) / 2 + normal * bow, b


def _trim(curve: Curve, size: tuple[float, float], boxes: bool) -> tuple[float, ...]:
    """The part of the curve outside the boxes at its two ends."""
    a, control, b = curve
    t = np.linspace(0, 1, 201)[:, None]
    points = (1 - t) ** 2 * a + 2 * t * (1 - t) * control + t**2 * b
    half = np.array(size) / 2 + EDGE

    def inside(centre: np.ndarray) -> np.ndarray:
        offset = np.abs(points - centre)
        return np.all(offset < half, axis=1) if boxes else np.hypot(*offset.T) < DOT / 2 + 2

    begin, end = float(t[inside(a)].max(initial=0)), float(t[inside(b)].min(initial=1))
    if begin >= end:  # the boxes touch
        begin, end = 0.45, 0.55

    def at(u: float, v: float) -> np.ndarray:
        """The curve's blossom: its point where u = v, the control point of the part from u to v otherwise."""
        return (1 - u) * (1 - v) * a + ((1 - u) * v + u * (1 - v)) * control + u * v * b

    return tuple(float(x) for point in (at(begin, begin), at(begin, end), at(end, end)) for x in point)


def _placed(boxes, centres, size, slots, links, labels) -> Layout:
    """Move everything so that the picture begins at (0, 0)."""
    half = np.array(size) / 2
    points = [centres - half, centres + half]
    for x0, y0, cx, cy, x1, y1 in links.values():
        points.append(np.array([[x0, y0], [(x0 + 2 * cx + x1) / 4, (y0 + 2 * cy + y1) / 4], [x1, y1]]))
    points += [np.array([[x - 3.5 * len(text), y - 7], [x + 3.5 * len(text), y + 7]]) for x, y, text in labels]
    everything = np.concatenate(points)
    margin = 14
    low, high = everything.min(0) - margin, everything.max(0) + margin
    moved = {
        pair: tuple(round(x - low[index % 2], 2) for index, x in enumerate(curve)) for pair, curve in links.items()
    }
    labels = [(x - low[0], y - low[1], text) for x, y, text in labels]
    width, height = (high - low).tolist()
    return Layout(width, height, boxes, np.round(centres - low, 2), size, slots, moved, labels)
