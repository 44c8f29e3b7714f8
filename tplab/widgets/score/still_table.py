"""The table of what each rank holds, as the still picture shows it, and its cells."""

from __future__ import annotations

from tplab.units import number_text
from tplab.widgets.paper.palette import DIM, INK, LINE, PAPER, SOFT, mix
from tplab.widgets.paper.pen import Colour, Pen, text_width
from tplab.widgets.score.frame import Frame, contributors
from tplab.widgets.score.holds import PASSED, UNSURE
from tplab.widgets.score.layout import columns
from tplab.widgets.score.score import Score


def share(score: Score, hold: int) -> float:
    return len(score.members(hold)) / max(len(score.pool(hold)), 1)


def cell(
    pen: Pen,
    score: Score,
    x: float,
    y: float,
    width: float,
    height: float,
    item: int,
    hold: int | None,
    arriving: bool,
    label: str,
    value: str = "",
    ground: str = PAPER,
) -> None:
    """One slot or cell. Empty: a faint outline. Held: tinted, paler while parts of a sum are missing. Arriving:
    dashed."""
    members, pool, part, passed = (), (), (), False
    if hold is not None:
        members, pool, passed = score.members(hold), score.pool(hold), score.holds["state"][hold] == PASSED
        part = score.part(hold)
        if score.holds["state"][hold] == UNSURE:
            members, pool = (), ()
    key = (score.item_colour(item), members, pool, part, passed, hold is None, arriving, label, value)
    pen.stamp(key, x, y, width, height, ground, lambda tile: _cell(tile, width, height, *key))


def _cell(
    pen: Pen,
    width: float,
    height: float,
    colour: str,
    members: tuple[int, ...],
    pool: tuple[int, ...],
    part: tuple[int, ...],
    passed: bool,
    empty: bool,
    arriving: bool,
    label: str,
    value: str,
) -> None:
    small = height < 20
    radius, middle = min(height / 3.4, 7), 1 + width / 2
    if empty:
        pen.box(1, 1, width, height, fill=None if small else PAPER, edge=mix(LINE, 0.7), radius=radius)
        pen.text(middle, 1 + height / 2, label if arriving else "", size=10.5 if small else 12, bold=True, fill=colour)
    else:
        fill = None if passed else mix(colour, 0.26 if members == pool else 0.13)
        pen.box(1, 1, width, height, fill=fill, edge=LINE if passed else mix(colour, 0.8), radius=radius)
        if part and not passed:  # which part of the whole it is
            index, count = part
            pen.box(2 + index * (width - 2) / count, 2, (width - 2) / count, height - 2, fill=mix(colour, 0.4))
        has_strip = 1 < len(pool) <= 16 and height >= 18
        if has_strip:
            _segments(pen, members, pool, passed, width, height, colour)
        size = (10.5 if small else 12) if len(label) < 3 else 9.5
        ink = DIM if passed else INK
        pen.text(middle, 1 + height / 2 - (5 if value else 2 * has_strip), label, size=size, bold=not passed, fill=ink)
        pen.text(middle, 1 + height / 2 + (5 if has_strip else 6), value, size=9.5, fill=ink)
    if arriving:
        pen.dashed(1.5, 1.5, width - 1, height - 1, colour, 1.6)


def _segments(
    pen: Pen, members: tuple[int, ...], pool: tuple[int, ...], passed: bool, width: float, height: float, colour: str
) -> None:
    """Along the lower edge, one segment for every rank whose data can be in a sum, filled if it is in it."""
    step, thick = (width - 8) / len(pool), 3 if height > 20 else 2
    for index, rank in enumerate(pool):
        fill = mix(LINE, 0.8) if rank not in members else mix(DIM, 0.5) if passed else colour
        pen.box(5.5 + index * step, height - thick - 1, step - 1, thick, fill=fill)


class Table:
    """What each rank holds: one row per rank, one column per item (or one item of each group)."""

    def __init__(self, score: Score):
        self.score, self.at, self.columns = score, (0.0, 0.0), columns(score)
        self.num_rows = min(score.trace.mesh.size, 64)
        self.num_columns = min(len(self.columns.names), self.columns.page_size)
        most = max(self.num_rows, self.num_columns)
        sums = any(len(pool) > 1 for item in score.items for pool in item.pools)
        self.small = most > 16
        self.most = 1 if most > 8 else 4 if self.num_columns <= 4 else 3
        wide = (56 if sums else 46) if self.num_columns <= 4 else 38
        self.size = (6.0, 6.0) if self.small else (wide, 34.0) if most <= 8 else (24.0, 20.0)
        self.gap = 0.5 if self.small else 4 if most <= 8 else 2.5
        self.left = 34 if self.small else 54
        self.width = self.left + self.num_columns * (self.size[0] + self.gap) if self.num_columns else 0.0
        self.height = 44 + self.num_rows * (self.size[1] + self.gap) if self.num_columns else 0.0

    def _corner(self, rank: int, index: int) -> tuple[float, float]:
        return (
            self.at[0] + self.left + index * (self.size[0] + self.gap),
            self.at[1] + 22 + rank * (self.size[1] + self.gap),
        )

    def draw_heads(self, pen: Pen) -> None:
        """The parts that stay the same."""
        if not self.num_columns:
            return
        every = 8 if self.small else 1
        for rank in range(0, self.num_rows, every):
            x, y = self._corner(rank, 0)
            text = str(rank) if self.small else f"rank {rank}"
            pen.text(x - 9, y + self.size[1] / 2, text, size=10.5, fill=DIM, anchor="rm")
        middle = self.at[0] + self.left + (self.width - self.left) / 2
        caption = self.score.table_caption
        middle = min(middle, pen.width - 12 - text_width(caption, 10.5) / 2)  # not beyond the card's edge
        pen.text(middle, self.at[1] + self.height - 8, caption, size=10.5, fill=DIM)

    def draw(self, pen: Pen, now: Frame) -> None:
        """The cells at one moment."""
        first = self.columns.first[now.round]
        for index, name in enumerate(self.columns.names[first : first + self.num_columns]):
            if index % (8 if self.small else 1) == 0:
                x, y = self._corner(0, index)
                pen.text(x + self.size[0] / 2, y - 11, name, size=10.5, fill=DIM)
        holds = {(rank, self.columns.of_item[item]): hold for (rank, item), hold in now.cells.items()}
        arriving = {(rank, self.columns.of_item[item]): item for rank, item in now.arriving}
        for rank in range(self.num_rows):
            for index in range(min(self.num_columns, len(self.columns.names) - first)):
                hold = holds.get((rank, first + index))
                coming = arriving.get((rank, first + index), -1)
                x, y = self._corner(rank, index)
                if self.small:
                    pen.box(x, y, *self.size, fill=self._small_fill(hold))
                    continue
                item = coming if hold is None else int(self.score.holds["item"][hold])
                label, value = cell_text(self.score, item, hold, self.most)
                cell(pen, self.score, x, y, *self.size, item, hold, coming >= 0, label, value)

    def _small_fill(self, hold: int | None) -> Colour:
        if hold is None:
            return SOFT
        if self.score.holds["state"][hold] == PASSED:
            return mix(LINE, 0.9)
        return mix(self.score.item_colour(int(self.score.holds["item"][hold])), 0.15 + 0.85 * share(self.score, hold))


def cell_text(score: Score, item: int, hold: int | None, most: int = 4) -> tuple[str, str]:
    """The text in a cell: the chunk's letter or whose data is in it, and its value if it is a single number."""
    if hold is None:
        return (score.items[item].name if item >= 0 else ""), ""
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


SHOWN, ROOM = 8, 10  # of a few numbers: how many, and letters


def few_numbers(texts: list[str]) -> str:
    """As many of these as there is room for in a cell: "24 28", "7 -3 4 …"; static/score.js does the same."""
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
