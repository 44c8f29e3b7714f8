"""The picture of a score when no kernel runs: a PNG, or an animated PNG that loops, with a pause at both ends."""

from __future__ import annotations

import textwrap

import numpy as np
from PIL import Image

from tplab.units import plain, range_text, time_text
from tplab.widgets.paper.action import draw_action
from tplab.widgets.paper.apng import encode
from tplab.widgets.paper.measured import Durations, draw_diamond
from tplab.widgets.paper.palette import ACCENT, DIM, GRADIENT, HATCH, INK, KINDS, LINE, OPS, PAPER, SOFT, WORK, mix
from tplab.widgets.paper.pen import Pen, fitted, on_curve, text_width
from tplab.widgets.score import words
from tplab.widgets.score.frame import Frame, frame
from tplab.widgets.score.holds import PASSED
from tplab.widgets.score.layout import SLOT, layout
from tplab.widgets.score.score import Score
from tplab.widgets.score.still_lanes import Lanes
from tplab.widgets.score.still_table import Table, cell, share
from tplab.widgets.score.still_warning import Warned

MAX_BYTES = 300_000
SECONDS = 4.5  # from one pause to the next
PAUSE = 1800  # milliseconds
MARGIN = 18
_WARNED = 43  # the top of the warnings, under the head
_CARRIES = {"activations": KINDS["F"], "gradients": GRADIENT, "rest": WORK}
_ACTIONS = [
    ("F", "F forward"),
    ("B", "B backward"),
    ("activations", "activations sent"),
    ("gradients", "gradients sent"),
    ("rest", "other work and messages"),
]
"""The legend of a pipeline's timeline: kind -> what it says."""
_KEY = 24  # from where a legend's colour begins to its text


class Picture:
    """Draws a score at any position. Parts that do not change are drawn once."""

    def __init__(self, score: Score):
        self.score, self.layout, self.table = score, layout(score), Table(score)
        self.sentences = words.sentences(score)
        gap = 30
        beside = self.layout.width + gap + self.table.width <= 930
        inner = self.layout.width + gap + self.table.width if beside else max(self.layout.width, self.table.width)
        self.width = max(inner + 2 * MARGIN, 640)
        spare = self.width - 2 * MARGIN
        self.warned = Warned(score.trace, self.width, MARGIN)
        top = 54 + self.warned.height
        if beside:
            body = max(self.layout.height, self.table.height)
            free = (spare - self.layout.width - self.table.width) / 3
            self.at = (MARGIN + free, top + (body - self.layout.height) / 2)
            self.table.at = (self.width - MARGIN - free - self.table.width, top + (body - self.table.height) / 2)
        else:
            body = self.layout.height + 16 + self.table.height
            self.at = ((self.width - self.layout.width) / 2, top)
            self.table.at = ((self.width - self.table.width) / 2, top + self.layout.height + 16)
        self.lanes = Lanes(score, MARGIN, top + body + 12, spare)
        self.saying = self.lanes.top + self.lanes.height + 14
        self.height = self.saying + (40 if self._fits() else 57)
        self.base = self._base()

    def _fits(self) -> bool:
        """Whether every sentence fits on one line."""
        return max(map(len, self.sentences)) + 20 <= (self.width - 2 * MARGIN) / 6.8

    def _base(self) -> Pen:
        pen, score = Pen(self.width, self.height), self.score
        _head(pen, score)
        self.warned.draw(pen, _WARNED)
        if len(self.layout.links) <= 300:
            for curve in self.layout.links.values():
                self._link(pen, curve)
        for x, y, text in self.layout.labels:
            pen.text(x + self.at[0], y + self.at[1], text, size=10.5, fill=DIM)
        self.table.draw_heads(pen)
        self.lanes.draw(pen)
        return pen

    def _moved(self, curve: tuple[float, ...]) -> list[float]:
        return [x + self.at[index % 2] for index, x in enumerate(curve)]

    def _link(self, pen: Pen, curve: tuple[float, ...]) -> None:
        moved = self._moved(curve)
        pen.curve(moved, LINE, 2)
        if self.layout.boxes:
            (x0, y0), (x1, y1) = on_curve(moved, 0.9), on_curve(moved, 1)
            along = np.array([x1 - x0, y1 - y0]) / max(float(np.hypot(x1 - x0, y1 - y0)), 1e-9)
            side, tip = np.array([-along[1], along[0]]), np.array([x1, y1])
            ends = [tip - 6 * along + 4 * side, tip, tip - 6 * along - 4 * side]
            pen.line([(float(x), float(y)) for x, y in ends], DIM, 1.4)

    def draw(self, position: float) -> Image.Image:
        """The picture at one position."""
        pen, now = self.base.copy(), frame(self.score, position)
        self._groups(pen, now)
        for rank in self.score.trace.mesh.ranks:
            self._rank(pen, rank, now)
        for row, u in now.flights:
            self._chunk(pen, row, u, now)
        self.table.draw(pen, now)
        self.lanes.draw_playhead(pen, now.time)
        self._say(pen, now)
        return pen.image()

    def _groups(self, pen: Pen, now: Frame) -> None:
        """A band through ranks that work together."""
        bars = self.score.bars
        for code in {int(bars["group"][row]) for row, _ in now.together}:
            members = self.score.groups[code]
            points = [tuple((self.layout.centres[rank] + self.at).tolist()) for rank in members]
            pen.line(points + points[:1], mix(ACCENT, 0.22), 12)

    def _rank(self, pen: Pen, rank: int, now: Frame) -> None:
        layout, score = self.layout, self.score
        x, y = (layout.centres[rank] + self.at).tolist()
        width, height = layout.size
        busy = any(score.bars["rank"][row] == rank for row, _ in now.together + now.computing)
        edge = ACCENT if busy else LINE
        if not layout.boxes:
            pen.disc(x, y, width / 2, fill=mix(WORK, 0.1 + 0.45 * self._held(rank, now)), edge=edge)
            pen.text(x, y, str(rank), size=9.5, fill=INK)
            return
        left, top = x - width / 2, y - height / 2
        pen.box(left, top, width, height, fill=SOFT, edge=edge, radius=9, line=1.3)
        working = [score.ops[score.bars["op"][row]] for row, _ in now.computing if score.bars["rank"][row] == rank]
        before = f"rank {rank}:" if score.is_pipeline else str(rank)
        name = f"{before} {working[0]}" if working else f"rank {rank}"
        few = layout.slots[rank]
        if not few and score.items:
            pen.box(left + 9, top + height - 10, width - 18, 3, fill=LINE)
            pen.box(left + 9, top + height - 10, (width - 18) * self._held(rank, now), 3, fill=WORK)
        pen.text(x, top + 13 if few else y - 3, name[: int(width / 6.2)], size=10.5, bold=True)
        for index, item in enumerate(layout.slots[rank]):
            left, top = layout.slot(rank, index)
            hold = now.cells.get((rank, item))
            cell(
                pen,
                score,
                left + self.at[0],
                top + self.at[1],
                layout.wide,
                SLOT,
                item,
                hold,
                (rank, item) in now.arriving,
                self._on_slot(item, hold),
                ground=SOFT,
            )

    def _on_slot(self, item: int, hold: int | None) -> str:
        if hold is None:
            return self.score.items[item].name
        return self.score.number(hold) if self.score.shows_numbers else self.score.name(hold)

    def _held(self, rank: int, now: Frame) -> float:
        """The fraction of all items that the rank holds."""
        holds = [now.cells[rank, item] for item in range(len(self.score.items)) if (rank, item) in now.cells]
        kept = [hold for hold in holds if self.score.holds["state"][hold] != PASSED]
        return sum(share(self.score, hold) for hold in kept) / max(len(self.score.items), 1)

    def _chunk(self, pen: Pen, row: int, u: float, now: Frame) -> None:
        bars = self.score.bars
        curve = self.layout.links.get((int(bars["rank"][row]), int(bars["peer"][row])))
        if curve is None:
            return
        x, y = on_curve(self._moved(curve), u)
        item = int(bars["item"][row])
        if not self.layout.boxes:
            pen.disc(x, y, 4.5, fill=self.score.bar_colour(row), edge=PAPER)
            return
        hold = now.cells.get((int(bars["rank"][row]), item))
        name = self.score.items[item].name if item >= 0 else ""
        if self.score.shows_numbers and hold is not None:
            name = self.score.number(hold)
        half = 11 if len(name) < 3 else 15
        pen.box(x - half, y - 11, 2 * half, 22, fill=self.score.bar_colour(row), edge=PAPER, radius=5, line=1.5)
        pen.text(x, y, name, size=11.5, bold=True, fill=PAPER)

    def _say(self, pen: Pen, now: Frame) -> None:
        head = f"step {now.round} of {self.score.num_steps}" if now.round else "before the first step"
        length = int((self.width - 2 * MARGIN) / 6.8)
        lines = textwrap.wrap(f"{head}  —  {self.sentences[now.round]}", length, max_lines=2, placeholder=" …")
        y = self.saying + 8
        width = pen.text(MARGIN, y, head, size=11.5, bold=True, anchor="lm")
        pen.text(MARGIN + width, y, lines[0][len(head) :], size=11.5, anchor="lm")
        for line in lines[1:]:
            y += 17
            pen.text(MARGIN, y, line, size=11.5, anchor="lm")
        pen.text(MARGIN, y + 18, words.sent_text(self.score, now.sent), size=11, fill=DIM, anchor="lm")


def still(score: Score, position: float) -> bytes:
    """One picture, as PNG."""
    return encode([Picture(score).draw(position)], [0])


def timeline(score: Score, measured: Durations | None = None) -> bytes:
    """The timeline alone, as PNG."""
    width = 760
    warned = Warned(score.trace, width, MARGIN)
    top = 52 + warned.height
    lanes = Lanes(score, MARGIN, top, width - 2 * MARGIN, by_kind=True, measured=measured)
    legend = _ACTIONS if score.is_pipeline else score.work_legend + score.talk_legend
    legend = [*legend, ("idle", "idle")] if legend else []
    if measured and measured.rows:
        legend.append(("measured", fitted(f"measured by {measured.by}", 11, width - 2 * MARGIN - _KEY)))
    lines = _lines_of(legend, width - 2 * MARGIN) if legend else []
    pen = Pen(width, top + lanes.height + 38 + (4 + 18 * len(lines) if lines else 0))
    _head(pen, score)
    warned.draw(pen, _WARNED)
    lanes.draw(pen)
    span = score.trace.makespan
    busy = score.trace.busy() / span if span else score.trace.busy()
    facts = f"makespan {time_text(span, score.trace.unit)}" + " steps" * (score.trace.unit == "steps")
    if score.computes:
        facts += f" · each rank is busy {range_text((100 * busy).round().tolist(), plain)}% of it"
    pen.text(MARGIN, top + lanes.height + 18, facts, size=11.5, anchor="lm")
    for y, line in enumerate(lines):
        _draw_legend(pen, score, line, top + lanes.height + 40 + 18 * y)
    return encode([pen.image()], [0])


def _lines_of(legend: list[tuple[str, str]], width: float) -> list[list[tuple[str, str]]]:
    """The legend's entries, in as many lines as they need."""
    lines: list[list[tuple[str, str]]] = [[]]
    x = 0.0
    for kind, text in legend:
        if lines[-1] and x + _KEY + text_width(text, 11) > width:
            lines.append([])
            x = 0.0
        lines[-1].append((kind, text))
        x += _KEY + text_width(text, 11) + 16
    return lines


def _draw_legend(pen: Pen, score: Score, line: list[tuple[str, str]], y: float) -> None:
    x = float(MARGIN)
    for kind, text in line:
        if kind == "idle":
            pen.box(x, y - 5, 18, 11, fill=SOFT)
            pen.hatch(x, y - 5, 18, 11, HATCH)
        elif kind == "measured":
            draw_diamond(pen, x + 9, y)
        elif kind in ("F", "B"):
            draw_action(pen, "FB".index(kind), "", x, x + 18, y - 5, 11)
        elif kind in _CARRIES:
            pen.box(x, y - 5, 18, 11, fill=mix(_CARRIES[kind], 0.24), edge=_CARRIES[kind], radius=2)
        else:
            share = 0.24 if kind in score.talk_kinds else 0.55
            pen.box(x, y - 5, 18, 11, fill=mix(OPS[kind], share), edge=OPS[kind], radius=2)
        x += _KEY + pen.text(x + _KEY, y, text, size=11, fill=DIM, anchor="lm") + 16


def _head(pen: Pen, score: Score) -> None:
    """The card's edge, and its header: what ran, on what, and with which clock."""
    pen.box(0.5, 0.5, pen.width - 1, pen.height - 1, edge=LINE, radius=12)
    x = MARGIN + pen.text(MARGIN, 26, score.trace.title or "program", size=14, bold=True, anchor="lm") + 10
    note = words.badge(score)
    width = text_width(note, 10.5) + 18
    pen.text(
        x, 26.5, fitted(words.about(score), 11, pen.width - MARGIN - width - 8 - x), size=11, fill=DIM, anchor="lm"
    )
    pen.box(pen.width - MARGIN - width, 16, width, 21, fill=PAPER, edge=LINE, radius=10)
    pen.text(pen.width - MARGIN - width / 2, 26.5, note, size=10.5, fill=DIM)


def story(score: Score) -> float:
    """The position that says the most if only one is shown: in the middle, with something on its way."""
    return min(score.num_steps // 2 + 0.5, float(score.num_steps))


def moving(score: Score, frames: int = 30) -> bytes:
    """The whole score as an animated PNG whose first frame is that of `story`; only that frame if there are too many
    ranks or steps."""
    picture, steps = Picture(score), score.num_steps
    if steps <= 4 * frames and score.trace.mesh.size <= 16:
        most = max(1, min(8, (frames - 2) // steps))
        for each in range(most, 0, -1):  # as smooth as fits
            positions = np.linspace(0, steps, min(steps * each, 2 * frames) + 1).tolist()
            drawn = [picture.draw(position) for position in (story(score), *positions)]
            time = round(1000 * SECONDS / len(drawn))
            data = encode(drawn, [PAUSE, *[time] * (len(positions) - 1), PAUSE], plays=0)
            if len(data) <= MAX_BYTES:
                return data
    return encode([picture.draw(story(score))], [0])
