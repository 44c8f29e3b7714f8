"""The still picture of `tiles`: the card as a PNG."""

from __future__ import annotations

import textwrap
from itertools import pairwise

import numpy as np

from tplab.widgets.attention.scene import CHIP, STRIP, Panel, Place, Scene
from tplab.widgets.paper.apng import encode
from tplab.widgets.paper.palette import DIM, INK, LINE, PAPER, SOFT, hue, mix
from tplab.widgets.paper.pen import Pen

MARGIN, HEAD, GAP = 20, 66, 15
AXES = "rows: queries, columns: keys, edges: their ranks"
SKIPPED = mix(DIM, 0.5)


def still(scene: Scene, position: float, title: str) -> bytes:
    """The panels at a position of the playhead, with the heading, the legend and the sentence of the card."""
    place, lines = scene.geometry, textwrap.wrap(scene.sentence, 138)
    width = place.width * len(scene.panels) + GAP * (len(scene.panels) - 1) + 2 * MARGIN
    pen = Pen(width, HEAD + place.height + 17 * len(lines) + 18)
    pen.box(0.5, 0.5, pen.width - 1, pen.height - 1, edge=LINE, radius=12)
    pen.text(MARGIN, 26, title, size=14, bold=True, anchor="lm")
    _legend(pen)
    _, within = scene.place(position)
    for number, panel in enumerate(scene.panels):
        _panel(pen, panel, place, within, MARGIN + number * (place.width + GAP), HEAD)
    for number, line in enumerate(lines):
        pen.text(MARGIN, HEAD + place.height + 16 + 17 * number, line, size=11.5, anchor="lm")
    return encode([pen.image()], [0])


def _legend(pen: Pen) -> None:
    x = MARGIN
    for text, share in (("this step, in the colour of the rank", 1), ("computed before", 0.26), ("to come", 0.0)):
        pen.box(x, 45, 18, 11, fill=mix(hue(0), share), edge=None if share == 1 else mix(hue(0), 0.55), radius=3)
        x += 24 + pen.text(x + 24, 50, text, size=10.5, fill=DIM, anchor="lm") + 16
    pen.box(x, 45, 18, 11, fill=SOFT)
    pen.hatch(x, 45, 18, 11, SKIPPED)
    pen.text(x + 24, 50, "skipped, idle", size=10.5, fill=DIM, anchor="lm")
    pen.text(pen.width - MARGIN, 50, AXES, size=10.5, fill=DIM, anchor="rm")


def _panel(pen: Pen, panel: Panel, place: Place, within: float, left: float, top: float) -> None:
    layout, done = panel.layout, panel.computed(within)
    now = max(int(np.ceil(within - 1e-9)) - 1, -1)
    (x, y), cell, size = place.grid, place.cell, place.cell * layout.num_tokens
    x, y = left + x, top + y
    name_width = pen.text(left, top + 8, layout.name, size=12, bold=True, anchor="lm")
    pen.text(left + name_width + 8, top + 8.5, f"{100 * panel.efficiency:.1f}% of the time computing", size=10.5,
             fill=DIM, anchor="lm")  # fmt: skip
    for begin, end, rank in _runs(panel.owner):
        across, length = begin * cell, (end - begin) * cell - 1
        for box in ((x + across, y - STRIP, length, STRIP - 3), (x - STRIP, y + across, STRIP - 3, length)):
            pen.box(*box, fill=mix(hue(rank), 0.26), edge=hue(rank), line=0.7)
            if length > 8:
                pen.text(box[0] + box[2] / 2, box[1] + box[3] / 2, str(rank), size=8.5, bold=True)
    pen.box(x, y, size, size, fill=PAPER, edge=LINE)
    if now >= 0:
        for rank in np.flatnonzero(panel.load[:, now] == 0):
            for query in layout.positions[rank]:
                for begin, end, _ in _runs(panel.owner, panel.source(int(rank), now)):
                    pen.hatch(x + begin * cell, y + query * cell, (end - begin) * cell, cell, SKIPPED)
    counts = np.zeros_like(done)
    for query, key in np.argwhere(panel.steps >= 0).tolist():
        rank, step = int(panel.owner[query]), int(panel.steps[query, key])
        counts[rank, step] += 1
        is_done = counts[rank, step] <= done[rank, step]
        share = 1 if is_done and step == now else 0.26 if is_done else 0
        box = (x + key * cell + 0.5, y + query * cell + 0.5, cell - 1, cell - 1)
        pen.box(*box, fill=mix(hue(rank), share), edge=mix(hue(rank), 0.55), line=0.7)
    _bars(pen, panel, place, within, now, left, top)


def _bars(pen: Pen, panel: Panel, place: Place, within: float, now: int, left: float, top: float) -> None:
    (x, y), row, unit = place.bars, place.bar, place.per_score
    x, y, starts, num_ranks = left + x, top + y, panel.starts, panel.layout.num_ranks
    narrowest = unit * panel.load[panel.load > 0].min() - 0.5
    mark = "KV " if pen.width_of("KV 0", 8.5) + 4 < narrowest else ""
    about = "scores computed, step by step" if mark else "scores computed with KV of rank ..."
    pen.text(x, y - 9, about, size=10, fill=DIM, anchor="lm")
    edge = left + place.width - CHIP + 8  # what each rank has now
    pen.text(edge + (CHIP - 8) / 2, y - 9, "has", size=10, fill=DIM)
    for rank in range(num_ranks):
        middle = y + rank * row + (row - 3) / 2
        pen.text(x - 6, middle, f"rank {rank}", size=10, fill=DIM, anchor="rm")
        pen.box(x, y + rank * row, starts[-1] * unit, row - 3, fill=SOFT)
        pen.hatch(x, y + rank * row, starts[-1] * unit, row - 3, SKIPPED)
        for step, scores in enumerate(panel.load[rank]):
            if not scores:
                continue
            share = 1 if step == now else 0.26 if step < now else 0
            box = (x + starts[step] * unit, y + rank * row, scores * unit - 0.5, row - 3)
            pen.box(*box, fill=mix(hue(rank), share), edge=hue(rank), line=0.8)
            text = f"{mark}{panel.source(rank, step)}"
            if pen.width_of(text, 8.5) + 2 < box[2] and row >= 12:
                pen.text(box[0] + box[2] / 2, middle, text, size=8.5, fill=PAPER if share == 1 else INK)
        holds = panel.source(rank, max(now, 0))
        if row >= 12:
            pen.box(edge, y + rank * row, CHIP - 8, row - 3, fill=mix(hue(holds), 0.26), edge=hue(holds), radius=4)
            pen.text(edge + (CHIP - 8) / 2, middle, f"KV {holds}", size=8.5)
    bottom = y + num_ranks * row
    head = x + unit * float(np.interp(within, range(len(starts)), starts))
    pen.line([(head, y - 3), (head, bottom)], INK, 1.4)
    for at in starts:
        pen.line([(x + at * unit, bottom - 1), (x + at * unit, bottom + 3)], LINE, 1)
    pen.text(x, bottom + 9, "0", size=9.5, fill=DIM)
    pen.text(x + starts[-1] * unit, bottom + 9, f"{starts[-1]:,} scores long", size=9.5, fill=DIM, anchor="rm")


def _runs(owner: np.ndarray, of: int | None = None) -> list[tuple[int, int, int]]:
    """(begin, end, rank) of the tokens next to each other that one rank holds; of all ranks, or of one."""
    edges = [0, *(np.flatnonzero(np.diff(owner)) + 1).tolist(), len(owner)]
    runs = [(begin, end, int(owner[begin])) for begin, end in pairwise(edges)]
    return [run for run in runs if of is None or run[2] == of]
