"""The picture of stacked areas. A position of the playhead is the rank that is shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tplab.trace.memory import KINDS, Memory
from tplab.units import bytes_text
from tplab.widgets.paper.legend import Key, dashes
from tplab.widgets.paper.palette import DIM, HUES, INK, LINE, WORK, mix
from tplab.widgets.paper.scene import Scene, spans
from tplab.widgets.stacks.layout import (
    BOTTOM,
    HEIGHT,
    HUE,
    LABEL,
    TOP,
    Area,
    Panel,
    Picture,
    Predicted,
    name_of,
    reading,
)

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
