"""The ranks on their mesh, the links between them, and chunks in transit: a scene whose playhead is a time."""

from __future__ import annotations

import math

import numpy as np

from tplab.widgets.paper.palette import ACCENT, DIM, LINE, PAPER, SOFT, WHITE, WORK, mix
from tplab.widgets.paper.scene import Curve, Scene, before
from tplab.widgets.score.holds import PASSED
from tplab.widgets.score.layout import DOT, SLOT, Layout, layout
from tplab.widgets.score.score import COLLECTIVE, COMPUTE, SEND, Score
from tplab.widgets.score.table import Cell, Stretch, coming, draw_cell, draw_coming, held, joined, key_of_cell, spans

_MOST_LINKS = 300
_LEVELS = 40  # of the share of all items


def draw(score: Score) -> Scene:
    """The keys of its slots, ranks and chunks are those of `key_of_cell`, `key_of_rank` and `key_of_bar`."""
    place, ranks = layout(score), score.trace.mesh.size
    there, arriving = (held(score), coming(score)) if place.boxes else ({}, {})
    sheet = Scene(math.ceil(place.width), math.ceil(place.height), f"{ranks} ranks and the links between them")
    for curve in place.links.values() if len(place.links) <= _MOST_LINKS else ():
        _link(sheet, curve, place.boxes)
    for x, y, text in place.labels:
        sheet.text(x, y, text, size=10.5, fill=DIM)
    _bands(sheet, score, place.centres)
    shares = _shares(score) if score.items and not all(place.slots) else []
    for rank, slots in enumerate(place.slots):
        (x, y), (width, height) = place.centres[rank].tolist(), place.size
        box, radius = (x - width / 2, y - height / 2, width, height), 10 if place.boxes else DOT / 2
        with sheet.about((), key=key_of_rank(score, rank)):
            sheet.box(*box, fill=SOFT, edge=LINE, radius=radius, line=1.2)
        for begin, end in joined(_spans(score, rank, COMPUTE) + _spans(score, rank, COLLECTIVE)):
            with sheet.during(begin, before(end)):
                sheet.box(*box, edge=ACCENT, radius=radius, line=1.8)
        if place.boxes:
            _name(sheet, score, rank, x, box[1] + 14 if slots else y - 3, width)
        if score.items and not slots:
            _share(sheet, shares[rank], x, y, place)
        if not place.boxes:
            sheet.text(x, y, str(rank), size=9.5)
        for index, item in enumerate(slots):
            slot, stretches = (*place.slot(rank, index), place.wide, SLOT), there.get((rank, item), [])
            with sheet.about((), key=key_of_cell(score, rank, item)):
                sheet.dashed(*slot, LINE)
            for hold, begin, end in stretches:
                with sheet.during(begin, end):
                    draw_cell(sheet, score, slot, hold, _on_slot(score, hold))
            draw_coming(sheet, score, slot, item, arriving.get((rank, item), []), stretches)
    _chunks(sheet, score, place, there)
    return sheet


def key_of_rank(score: Score, rank: int) -> int:
    """The key of a rank in static/animate.js; the keys of cells are below it, and those of bars above."""
    return score.trace.mesh.size * len(score.items) + rank


def key_of_bar(score: Score, row: int) -> int:
    return key_of_rank(score, score.trace.mesh.size) + row


def _link(sheet: Scene, curve: Curve, has_tip: bool) -> None:
    sheet.curve(curve, LINE, 2.2)
    _, _, *control, x, y = curve
    angle = math.atan2(y - control[1], x - control[0])
    wings = [(x - 6.5 * math.cos(angle + turn), y - 6.5 * math.sin(angle + turn)) for turn in (0.55, -0.55)]
    if has_tip:
        sheet.line([wings[0], (x, y), wings[1]], DIM, 1.4)


def _bands(sheet: Scene, score: Score, centres: np.ndarray) -> None:
    """A band through the ranks that work together, filling as they do."""
    bars = score.bars
    works = (bars["kind"] == COLLECTIVE) & (bars["end"] > bars["start"])
    for code, group in enumerate(score.groups):
        rows = np.flatnonzero(works & (bars["group"] == code))
        points = [(float(x), float(y)) for x, y in centres[list(group)]]
        points += points[:1] if len(group) > 2 else []
        for begin, end in joined(zip(bars["start"][rows].tolist(), bars["end"][rows].tolist())) if group[1:] else ():
            with sheet.during(begin, before(end)):
                sheet.line(points, mix(ACCENT, 0.22), 13)
                sheet.line(points, mix(ACCENT, 0.7), 5, grows=True)


def _spans(score: Score, rank: int, kind: int) -> list[tuple[float, float]]:
    bars = score.bars
    rows = (bars["rank"] == rank) & (bars["kind"] == kind) & (bars["end"] > bars["start"])
    return list(zip(bars["start"][rows].tolist(), bars["end"][rows].tolist()))


def _name(sheet: Scene, score: Score, rank: int, x: float, y: float, width: float) -> None:
    """A rank's number, and its current computation."""
    bars, most, free = score.bars, int(width / 6.6) - 2, -math.inf
    rows = np.flatnonzero((bars["rank"] == rank) & (bars["kind"] == COMPUTE) & (bars["end"] > bars["start"]))

    def write(text: str, begin: float, end: float) -> None:
        if begin < end:
            with sheet.during(begin, end):
                sheet.text(x, y, text, size=11, bold=True)

    for row in rows[np.argsort(bars["start"][rows], kind="stable")].tolist():
        begin, end = max(float(bars["start"][row]), free), before(float(bars["end"][row]))
        op = score.op_names[bars["op"][row]]
        write(f"rank {rank}", free, begin)
        short = op if len(op) <= most else f"{op[: most - 1]}…"
        write(f"rank {rank}: {op}" if score.is_pipeline else f"{rank} · {short}", begin, end)
        free = max(free, end)
    write(f"rank {rank}", free, math.inf)


def _on_slot(score: Score, hold: int) -> str:
    return score.number(hold) if score.shows_numbers else score.name(hold)


def _share(sheet: Scene, shares: list[tuple[float, float, float]], x: float, y: float, place: Layout) -> None:
    """If there are too many items for slots: a bar in a rank's box, or an arc in its dot, for the share it holds."""
    (width, height), room = place.size, place.size[0] - 18
    bar = x - room / 2, y + height / 2 - 9.5
    if place.boxes:
        sheet.box(*bar, room, 3, fill=LINE)
    for part, begin, end in shares:
        with sheet.during(begin, end):
            if place.boxes:
                sheet.box(*bar, part * room, 3, fill=WORK)
            else:
                sheet.arc(x, y, width / 2 - 1.5, 360 * part, WORK, 3)


def _shares(score: Score) -> list[list[tuple[float, float, float]]]:
    """For each rank: (the share of all items that it holds, begin, end)."""
    hold, begin, end = spans(score)
    kept = score.holds["state"][hold] != PASSED
    hold, begin, end = hold[kept], begin[kept], end[kept]
    found: list[list[tuple[float, float, float]]] = []
    for rank in score.trace.mesh.ranks:
        mine = score.holds["rank"][hold] == rank
        changes = np.concatenate([score.shares[hold[mine]], -score.shares[hold[mine]]])
        times, place = np.unique(np.concatenate([begin[mine], end[mine]]), return_inverse=True)
        total = np.cumsum(np.bincount(place, changes, len(times)))
        level = np.round(total / len(score.items) * _LEVELS) / _LEVELS
        new = np.append(True, level[1:] != level[:-1])[: len(level)]
        until = np.append(times[new][1:], math.inf)
        found.append([one for one in zip(level[new].tolist(), times[new].tolist(), until.tolist()) if one[0]])
    return found


def _chunks(sheet: Scene, score: Score, place: Layout, there: dict[Cell, list[Stretch]]) -> None:
    bars, sends = score.bars, np.flatnonzero((score.bars["kind"] == SEND) & (score.bars["end"] > score.bars["start"]))
    rows = [row for row in sends.tolist() if (bars["rank"][row], bars["peer"][row]) in place.links]
    curves = [place.links[pair] for pair in zip(bars["rank"][rows].tolist(), bars["peer"][rows].tolist())]
    times = np.stack([bars["start"][rows], np.nextafter(bars["end"][rows], -math.inf)], 1)
    every = score.colours()
    colours, keys = [every[row] for row in rows], [key_of_bar(score, row) for row in rows]
    if not place.boxes:
        dots = np.tile([-4.5, -4.5, 9.0, 9.0], (len(rows), 1))
        sheet.boxes(dots, colours, times, keys, curves, edge=PAPER, radius=4.5, line=1.2)
        return
    for row, curve, colour, key, (start, end) in zip(rows, curves, colours, keys, times.tolist()):
        rank, item = int(bars["rank"][row]), int(bars["item"][row])
        with sheet.during(start, end), sheet.along(curve), sheet.about((), key=key):
            text = score.items[item].name if item >= 0 else ""
            if score.shows_numbers:
                text = next((score.number(hold) for hold, a, b in there.get((rank, item), []) if a <= start < b), text)
            half = 11 if len(text) < 3 else 15
            sheet.box(-half, -11, 2 * half, 22, fill=colour, edge=PAPER, radius=6, line=2)
            sheet.text(0, 0, text, size=12, bold=True, fill=WHITE)
