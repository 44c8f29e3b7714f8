"""The table of what each rank holds, and its cells: a scene whose playhead is a time.

A stretch is a span in which a rank holds something, or something is in transit to it.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from tplab.units import number_text
from tplab.widgets.paper.palette import DIM, INK, LINE, SOFT, mix
from tplab.widgets.paper.scene import Scene, before
from tplab.widgets.score.holds import GONE, PASSED, UNSURE
from tplab.widgets.score.layout import SLOT, Columns, columns
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


Box = tuple[float, float, float, float]
_MOST_ROWS = 64


class Grid(NamedTuple):
    """The cells of the table: a row for each rank, a column for each item that is shown."""

    left: float
    top: float
    width: float
    height: float
    gap: float

    def box(self, rank: Any, index: Any) -> tuple[Any, Any, float, float]:
        across, down = self.left + index * (self.width + self.gap), self.top + rank * (self.height + self.gap)
        return across, down, self.width, self.height


class Page(NamedTuple):
    """Columns of the table that are shown together, after `begin` and up to `end`."""

    grid: Grid
    rows: int
    shown: range
    of_item: Sequence[int]
    begin: float
    end: float

    def meets(self, begin: float, end: float) -> bool:
        return begin < self.end and self.begin < end

    def within(self, begin: float, end: float) -> tuple[float, float]:
        return max(begin, self.begin), min(end, self.end)


def draw(score: Score) -> Scene | None:
    """One row per rank, one column per item (or one item of each group): a cell if there is room for letters, otherwise
    a small square. Its keys are those of `key_of_cell`. None if nothing is sent."""
    if not score.items:
        return None
    of = columns(score)
    rows, num_columns = min(score.trace.mesh.size, _MOST_ROWS), min(len(of.names), of.page_size)
    most, has_sums = max(rows, num_columns), any(len(pool) > 1 for item in score.items for pool in item.pools)
    small, letters = most > 16, 1 if most > 8 else 4 if num_columns <= 4 else 3
    if small:
        width, height = (min(max(4, 400 // number), top) for number, top in ((num_columns, 20), (rows, 12)))
        left, top, gap = 26, 16, 0.6
        width, height = width - gap, height - gap
    else:
        width, height = ((66 if has_sums else 46) if num_columns <= 4 else 38, 34) if most <= 8 else (23, 20)
        left, top, gap = 48, 20, 4 if num_columns <= 4 else 3
    caption = textwrap.wrap(score.table_caption, int(max(left + num_columns * (width + gap), 260) / 5.6))
    across = math.ceil(max(left + num_columns * (width + gap), 6.2 * max(map(len, caption))))
    sheet = Scene(across, math.ceil(top + rows * (height + gap)) + 15 * len(caption) + 3, score.table_title)
    left += (across - left - num_columns * (width + gap)) / 2
    grid, every = Grid(left, top, width, height, gap), 8 if small else 1
    for rank in range(0, rows, every):
        text, (x, y, _, _) = str(rank) if small else f"rank {rank}", grid.box(rank, 0)
        sheet.text(x - 6, y + height / 2, text, size=10.5, fill=DIM, anchor="rm")
    for number, line in enumerate(caption):
        sheet.text(across / 2, sheet.height - 9 - 15 * (len(caption) - 1 - number), line, size=10.5, fill=DIM)
    for first, begin, end in _pages(score, of):
        page = Page(grid, rows, range(first, min(first + num_columns, len(of.names))), of.of_item, begin, end)
        with sheet.during(begin, end):
            for column in page.shown[::every]:
                x, _, _, _ = grid.box(0, column - first)
                sheet.text(x + width / 2, top - 9, of.names[column], size=10.5, fill=DIM)
        if small:
            _squares(sheet, score, page)
        else:
            _cells(sheet, score, page, letters)
    return sheet


def _squares(sheet: Scene, score: Score, page: Page) -> None:
    columns, many = np.array(page.of_item) - page.shown.start, len(page.shown)
    named = np.tile([page.of_item.index(column) for column in page.shown], (page.rows, 1))
    hold, begin, end = spans(score)
    rank, item = score.holds["rank"][hold], score.holds["item"][hold]
    here = (rank < page.rows) & (columns[item] >= 0) & (columns[item] < many)
    named[rank[here], columns[item[here]]] = item[here]
    down, across = np.divmod(np.arange(named.size), many)
    with sheet.during(page.begin, page.end):
        keys = key_of_cell(score, down, named.ravel()).tolist()
        sheet.boxes(_stacked(page.grid.box(down, across)), [SOFT] * named.size, keys=keys)
    here &= (begin < page.end) & (page.begin < end)
    hold, rank, item, times = hold[here], rank[here], item[here], np.stack([begin, end], 1)[here]
    is_passed, shares = score.holds["state"][hold] == PASSED, np.round(0.12 + 0.88 * score.shares[hold], 2)
    fills = [LINE if passed else mix(score.item_colour(one), share)
             for one, share, passed in zip(item.tolist(), shares.tolist(), is_passed.tolist())]  # fmt: skip
    sheet.boxes(_stacked(page.grid.box(rank, columns[item])), fills, times.clip(page.begin, page.end))


def _stacked(box: tuple[Any, Any, float, float]) -> np.ndarray:
    return np.stack(np.broadcast_arrays(*box), 1)


def _cells(sheet: Scene, score: Score, page: Page, letters: int) -> None:
    there, arriving = held(score), coming(score)
    items = [[item for item, at in enumerate(page.of_item) if at == column] for column in page.shown]
    cells = [
        (rank, page.grid.box(rank, index), those) for rank in range(page.rows) for index, those in enumerate(items)
    ]
    for rank, place, those in cells:
        named = next((item for item in those if (rank, item) in there), those[0])
        with sheet.during(page.begin, page.end), sheet.about((), key=key_of_cell(score, rank, named)):
            sheet.dashed(*place, LINE)
    for rank, place, item in ((rank, place, item) for rank, place, those in cells for item in those):
        stretches = [
            Stretch(hold, *page.within(a, b)) for hold, a, b in there.get((rank, item), []) if page.meets(a, b)
        ]
        for hold, a, b in stretches:
            with sheet.during(a, b):
                draw_cell(sheet, score, place, hold, *cell_text(score, item, hold, letters))
        times = [page.within(a, b) for a, b in arriving.get((rank, item), []) if page.meets(a, b)]
        draw_coming(sheet, score, place, item, times, stretches)


def key_of_cell(score: Score, rank: Any, item: Any) -> Any:
    """The key of a cell, and of a rank's slot, in static/animate.js."""
    return rank * len(score.items) + item


def _pages(score: Score, of: Columns) -> list[tuple[int, float, float]]:
    """(the first of the visible columns, begin, end)."""
    found = [(of.first[0], -math.inf, math.inf)]
    for time, first in zip(score.times.tolist(), of.first[1:]):
        if first != found[-1][0]:
            found[-1] = (*found[-1][:2], time)
            found.append((first, time, math.inf))
    return [page for page in found if page[1] < page[2]]


def draw_cell(sheet: Scene, score: Score, box: Box, hold: int, label: str, value: str = "") -> None:
    """Draw a slot of a rank, or a cell of the table, that holds something: paler while parts of a sum are missing."""
    x, y, width, height = box
    colour, passed = score.item_colour(int(score.holds["item"][hold])), score.holds["state"][hold] == PASSED
    is_slot, is_sure = height == SLOT, score.holds["state"][hold] != UNSURE
    members, pool = (score.members(hold), score.pool(hold)) if is_sure else ((), ())
    radius, whole = 5 if height <= 20 else 7, len(members) == len(pool)
    if not passed:
        tint = 0.26 if whole and not is_slot else 0.13
        sheet.box(x, y, width, height, fill=mix(colour, tint), edge=colour, radius=radius)
        if is_slot:  # filled from below in proportion to its completeness
            full = score.shares[hold] * (height - 2)
            sheet.box(x + 1, y + height - 1 - full, width - 2, full, fill=mix(colour, 0.26), radius=4)
        elif part := score.part(hold):  # its part of the whole
            index, wide = part[0], (width - 2) / part[1]
            sheet.box(x + 1 + index * wide, y + 1, wide, height - 2, fill=mix(colour, 0.55))
    elif not is_slot:
        sheet.box(x, y, width, height, edge=LINE, radius=radius)
    strip = not is_slot and 1 < len(pool) <= 16
    step, thick = (width - 8) / max(len(pool), 1), 3 if height > 20 else 2
    for index, rank in enumerate(pool if strip else ()):  # one segment for every rank whose data can be in a sum
        fill = LINE if rank not in members else mix(DIM, 0.6) if passed else colour
        sheet.box(x + 4 + index * step, y + height - thick - 3, step - 1, thick, fill=fill)
    size = 12 if len(label) <= 3 else 10.5 if width > 40 else 9
    ink, middle = DIM if passed else INK, y + height / 2 - strip * (2 if height > 20 else 1)
    size = min(size, 10.5 if is_slot else height / 2)
    sheet.text(x + width / 2, middle - 6 * bool(value), label, size=size, bold=not passed, fill=ink)
    sheet.text(x + width / 2, middle + 6, value, size=9.5, fill=ink)


def draw_coming(
    sheet: Scene, score: Score, box: Box, item: int, spans: Sequence[tuple[float, float]], there: Sequence[Stretch]
) -> None:
    """Draw a dashed outline while an item is in transit, and its name if nothing of it is held."""
    x, y, width, height = box
    colour = score.item_colour(item)
    for begin, end in spans:
        with sheet.during(begin, end):
            sheet.dashed(x + 0.5, y + 0.5, width - 1, height - 1, colour, 1.6)
        for free in without(begin, end, there):
            with sheet.during(*free):
                size = 10.5 if height <= 20 else 12
                sheet.text(x + width / 2, y + height / 2, score.items[item].name, size=size, bold=True, fill=colour)


def cell_text(score: Score, item: int, hold: int, most: int = 4) -> tuple[str, str]:
    """The text in a cell: the chunk's letter or the ranks whose data is in it, and the value of a single number."""
    if score.shows_numbers:
        return score.number(hold), ""
    pool = score.pool(hold)
    label = score.name(hold)
    if len(pool) > 1 and not score.part(hold) and score.holds["state"][hold] != UNSURE:
        label = contributors(score.members(hold), pool, score.items[item].how, most)
    index = score.holds["value"][hold]
    if index < 0 or most == 1:
        return label, ""
    return label, few_numbers([number_text(float(number)) for number in score.values[index].ravel()[:SHOWN]])


def contributors(members: Sequence[int], pool: Sequence[int], how: str = "", most: int = 4) -> str:
    """The ranks whose data is in it: "2"; "0+1+2" in a sum, otherwise "0,1,2"; "5 of 8" if more than `most`."""
    if len(members) > most:
        short = f"{len(members)}/{len(pool)}" if len(pool) < 10 else str(len(members))
        return f"{len(members)} of {len(pool)}" if most > 1 else short
    return {"sum": "+", "product": "·"}.get(how, ",").join(map(str, members))


SHOWN, ROOM = 8, 10  # the most numbers, and letters


def few_numbers(texts: list[str]) -> str:
    """As many of these as fit in a cell: "24 28", "7 -3 4 …"."""
    if len(texts) == 1:
        return texts[0]
    whole = " ".join(texts)
    if len(whole) <= ROOM and len(texts) < SHOWN:
        return whole
    shown = ""
    for text in texts:
        if len(shown) + len(text) + 1 > ROOM - 1:
            break
        shown += f"{text} "
    return f"{shown}…" if shown else ""
