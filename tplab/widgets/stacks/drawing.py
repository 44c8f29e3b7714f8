"""The picture of stacked areas. A position of the playhead is the rank that is shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tplab.trace.memory import KINDS, Memory, RankMemory
from tplab.units import bytes_text, ticks, time_text
from tplab.widgets.levels import round_step
from tplab.widgets.paper.legend import Key, dashes
from tplab.widgets.paper.palette import DIM, HUES, INK, LINE, WORK, mix
from tplab.widgets.paper.pen import text_width
from tplab.widgets.paper.scene import Scene, spans
from tplab.widgets.score.names import name_of as op_name

WIDTH, NARROW, HEIGHT = 900, 460, 292
LEFT, TOP, BOTTOM, GAP = 62, 26, 40, 20
HUE = {"parameters": 0, "gradients": 1, "optimizer": 2, "gathered": 3, "activations": 4, "other": -1}
NAME = {"optimizer": "optimizer states", "gathered": "gathered parameters"}
LABEL, LABEL_HEIGHT = 10, 15  # size of the letters on an area, and the height that the area must have

Predicted = Mapping[str, float]
"""kind -> bytes."""


@dataclass(frozen=True)
class Area:
    """The memory of one rank, as a staircase: each stop lasts until the next one, the last until the end of the axis.

    xs      [n + 1] where each stop begins, in pixels, and where the last one ends
    rows    [n] the row of the `RankMemory` that is shown
    tops    [n, kinds] the upper edge of each kind's area, in pixels
    labels  names of kinds that are written on their areas: (name, x, y)
    """

    xs: np.ndarray
    rows: np.ndarray
    tops: np.ndarray
    labels: list[tuple[str, float, float]]


@dataclass(frozen=True)
class Panel:
    """One run.

    x, width     of the plot, in pixels
    ticks        (x, text) along the time axis
    areas        one per rank
    predicted    for each rank, the height of the dashed line and its bytes, or None
    """

    title: str
    x: float
    width: float
    ticks: list[tuple[float, str]]
    areas: list[Area]
    predicted: list[tuple[float, float] | None]


@dataclass(frozen=True)
class Picture:
    """Panels on one scale of bytes. `ticks` are (y, text); `along` says what x is; `kinds` are those that occur."""

    width: float
    panels: list[Panel]
    ticks: list[tuple[float, str]]
    along: str
    unit: str
    kinds: list[int]


def picture(
    memories: Mapping[str, Memory], predicted: Mapping[str, Sequence[Predicted]], wide: float = WIDTH
) -> Picture:
    """Lay out the memory of several runs with equally many ranks, by title, and the prediction for each rank."""
    sums = {title: [sum(kinds.values()) for kinds in ranks] for title, ranks in predicted.items()}
    most = max(max(memory.peaks) for memory in memories.values())
    most = max([most, *(amount for amounts in sums.values() for amount in amounts)]) or 1
    base, scale = HEIGHT - BOTTOM, (HEIGHT - BOTTOM - TOP) / (1.06 * most)
    in_time = all(memory.unit == "s" for memory in memories.values())
    unit = "s" if in_time else "steps"
    places = {
        title: [held.times if in_time else held.operations.astype(float) for held in memory]
        for title, memory in memories.items()
    }
    ends = {title: max(float(xs[-1]) for xs in ranks) for title, ranks in places.items()}
    if in_time:
        ends = dict.fromkeys(ends, max(ends.values()))
    width = (wide - LEFT - 8 - GAP * (len(memories) - 1)) / len(memories)
    most_ticks = max(3, int(width / 90))
    panels = []
    for number, (title, memory) in enumerate(memories.items()):
        x, end = LEFT + number * (width + GAP), ends[title] or 1.0
        panels.append(
            Panel(
                title,
                x,
                width,
                [(x + width * at / end, time_text(at, unit, end)) for at in ticks(0, end, most_ticks, unit)],
                [_area(held, x, width * xs / end, base, scale) for held, xs in zip(memory, places[title])],
                [(base - scale * amount, amount) for amount in sums[title]] if title in sums else [None] * len(memory),
            )
        )
    step = round_step(most)
    marks = [(base - scale * step * at, bytes_text(step * at)) for at in range(int(1.06 * most / step) + 1)]
    there = np.any([held.num_bytes.any(axis=0) for memory in memories.values() for held in memory], axis=0)
    return Picture(wide, panels, marks, "time" if in_time else "operations", unit, np.flatnonzero(there).tolist())


def reading(held: RankMemory, row: int, along: str) -> str:
    """The time and place of a row, in words: "12.5 µs: mm at cell 3, line 4, backward"."""
    when = time_text(held.times[row], "s") if along == "time" else f"operation {held.operations[row]:,}"
    what = op_name(held.ops[row])
    if held.where[row]:
        what = f"{what} at {held.where[row]}, {held.phases[row]}" if what else f"{held.where[row]}, {held.phases[row]}"
    return f"{when}: {what}" if what else when


def _area(held: RankMemory, x: float, across: np.ndarray, base: float, scale: float) -> Area:
    """`across` is where each row begins, in pixels from the left side of the panel."""
    columns, rows = _columns(across, held.totals)
    xs = np.append(x + columns, x + across[-1])
    xs = np.maximum.accumulate(xs)
    tops = base - scale * held.num_bytes[rows].cumsum(axis=1)
    labels = [found for kind in range(len(KINDS)) if (found := _label(kind, xs, tops, base)) is not None]
    return Area(xs.round(1), rows, tops.round(1), labels)


def _columns(across: np.ndarray, totals: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each column of pixels, the highest of its rows, and its last row after that, so that no peak is lost."""
    columns = np.floor(across)
    firsts = np.flatnonzero(np.diff(columns, prepend=-1))
    found: list[tuple[float, int]] = []
    for first, after in zip(firsts, [*firsts[1:], len(columns)]):
        highest, last = first + int(totals[first:after].argmax()), after - 1
        found.append((float(across[first]) if first == highest == last else float(columns[first]), int(highest)))
        if last != highest:
            found.append((float(columns[first]) + 1, int(last)))
    xs, rows = zip(*found)
    return np.array(xs), np.array(rows)


def _label(kind: int, xs: np.ndarray, tops: np.ndarray, base: float) -> tuple[str, float, float] | None:
    """(name, x, y) of a kind, in the longest stretch of its area that is high enough; None if there is no room."""
    upper = tops[:, kind]
    lower = tops[:, kind - 1] if kind else np.full(len(tops), base)
    long, x, y = 0.0, 0.0, 0.0
    start, top, bottom = 0, -np.inf, np.inf
    for stop in range(len(upper)):
        if min(bottom, lower[stop]) - max(top, upper[stop]) < LABEL_HEIGHT:  # start a new stretch
            start, top, bottom = stop, -np.inf, np.inf
        top, bottom = max(top, upper[stop]), min(bottom, lower[stop])
        if bottom - top >= LABEL_HEIGHT and xs[stop + 1] - xs[start] > long:
            long, x, y = xs[stop + 1] - xs[start], (xs[start] + xs[stop + 1]) / 2, (top + bottom) / 2
    for name in (name_of(kind), KINDS[kind]):
        if text_width(name, LABEL) + 10 <= long:
            return name, round(float(x), 1), round(float(y), 1)
    return None


def name_of(kind: int) -> str:
    """The displayed name of a kind."""
    return NAME.get(KINDS[kind], KINDS[kind])


BASE = HEIGHT - BOTTOM


def draw(picture: Picture, memories: Sequence[Memory], predicted: Mapping[str, Sequence[Predicted]]) -> Scene:
    """`memories` are those of the panels. Parts that ranks have in common are drawn once."""
    sheet = Scene(picture.width, HEIGHT)
    for y, text in picture.ticks:
        sheet.text(picture.panels[0].x - 8, y, text, size=10, fill=DIM, anchor="rm")
    for panel, memory in zip(picture.panels, memories):
        left, right = panel.x, panel.x + panel.width
        sheet.text(left, TOP - 16, panel.title, size=10.5, bold=True, anchor="lm")
        for y, _ in picture.ticks:
            sheet.line([(left, y), (right, y)], LINE, 0.7)
        parts = predicted.get(panel.title, [{}] * len(memory))
        alike: dict[bytes, list[int]] = {}
        for rank, (held, area) in enumerate(zip(memory, panel.areas)):
            same = area.xs.tobytes() + held.num_bytes[area.rows].tobytes() + repr((held.where, parts[rank])).encode()
            alike.setdefault(same, []).append(rank)
        for ranks in alike.values():
            for begin, end in spans(ranks):
                with sheet.during(begin, end):
                    _areas(sheet, panel.areas[ranks[0]])
                    if (due := panel.predicted[ranks[0]]) is not None:
                        dashes(sheet, left, right, due[0])
                    _stops(sheet, panel, memory, ranks[0], parts[ranks[0]], picture)
        sheet.line([(left, BASE), (right, BASE)], LINE, 1)
        for x, text in panel.ticks:
            sheet.text(min(x, right - 8), BASE + 12, text, size=10, fill=DIM)
        sheet.text((left + right) / 2, BASE + 29, picture.along, size=10, fill=DIM)
    return sheet


def legend(picture: Picture) -> list[Key]:
    keys = [Key(name_of(kind), mix(_tint(kind), 0.3), _tint(kind)) for kind in picture.kinds]
    is_predicted = any(due is not None for panel in picture.panels for due in panel.predicted)
    return [*keys, Key("predicted", edge=INK, sign="dashes")] if is_predicted else keys


def _areas(sheet: Scene, area: Area) -> None:
    xs, tops = area.xs.tolist(), area.tops
    for kind in reversed(range(len(KINDS))):  # each covers the lower part of the one above it
        upper, lower = tops[:, kind], tops[:, kind - 1] if kind else np.full(len(tops), BASE)
        if (lower - upper < 0.05).all():
            continue
        edge = [(x, y) for stop, y in enumerate(upper.tolist()) for x in xs[stop : stop + 2]]
        sheet.area([(xs[0], BASE), *edge, (xs[-1], BASE)], mix(_tint(kind), 0.3))
        sheet.line(edge, _tint(kind), 1)
    for name, x, y in area.labels:
        sheet.text(x, y, name, size=LABEL)


def _stops(sheet: Scene, panel: Panel, memory: Memory, rank: int, parts: Predicted, picture: Picture) -> None:
    """Add a tooltip for every moment, with what was held then."""
    area, due = panel.areas[rank], panel.predicted[rank]
    for stop, row in enumerate(area.rows.tolist()):
        amounts = dict(zip(KINDS, memory[rank].num_bytes[row].tolist()))
        rows = [("", f"{panel.title}, " * bool(panel.title) + reading(memory[rank], row, picture.along))]
        rows += [
            (name_of(kind), _text(amounts[KINDS[kind]], parts.get(KINDS[kind], 0)))
            for kind in reversed(picture.kinds)
            if amounts[KINDS[kind]] or parts.get(KINDS[kind])
        ]
        rows += [("in total", _text(sum(amounts.values()), due[1] if due else 0))]
        begin, end = float(area.xs[stop]), float(area.xs[stop + 1])
        end = panel.x + panel.width if stop + 1 == len(area.rows) else end
        with sheet.about(rows):
            sheet.box(begin, TOP, max(end - begin, 1), BASE - TOP)


def _text(amount: float, predicted: float) -> str:
    return bytes_text(amount) + (f", predicted {bytes_text(predicted)}" if predicted else "")


def _tint(kind: int) -> str:
    hue = HUE[KINDS[kind]]
    return WORK if hue < 0 else HUES[hue]
