"""The picture of an executed schedule over its prediction, shown when no kernel runs."""

from __future__ import annotations

from tplab.schedules.action import F, W
from tplab.widgets.paper.action import draw_action
from tplab.widgets.paper.apng import encode
from tplab.widgets.paper.frame import (
    Warned,
    draw_axis,
    draw_edge,
    draw_facts,
    draw_head,
    draw_playhead,
    draw_said,
    lines_said,
)
from tplab.widgets.paper.legend import draw_legend
from tplab.widgets.paper.palette import DIM, HATCH, KINDS, PAPER, SOFT, WORK, mix
from tplab.widgets.paper.pen import Pen, text_width
from tplab.widgets.schedule import overlay
from tplab.widgets.schedule.overlay import Overlay
from tplab.widgets.schedule.still import LEFT, MARGIN, WIDTH, At, half
from tplab.widgets.score import words

TOP = 72.0


def picture(over: Overlay, position: float = 0) -> bytes:
    """A PNG, with the playhead unless it is at the start."""
    top, warned = height(over, position), Warned(words.warning(over.trace), WIDTH)
    pen = Pen(WIDTH, top + warned.height)
    draw(pen, over, position)
    warned.draw(pen, top - 4)
    return encode([pen.image()], [0])


def lane_heights(num_ranks: int) -> tuple[float, float, float]:
    """The heights of a rank's executed bars, of its predicted bars, and of the gap after them."""
    return (22, 12, 9) if num_ranks <= 8 else (13, 7, 5) if num_ranks <= 16 else (6, 3, 2)


def height(over: Overlay, position: float) -> float:
    """The height of the whole picture."""
    ranks = over.predicted.schedule.num_ranks
    head, said, _ = overlay.say(over, overlay.now(over, position))
    room = 93 + 17 * len(lines_said(WIDTH, head, said)) if position else 72
    return TOP + ranks * sum(lane_heights(ranks)) + room


def draw(pen: Pen, over: Overlay, position: float) -> None:
    draw_edge(pen, pen.width, pen.height)
    draw_head(pen, WIDTH, overlay.title(over), overlay.about(over), words.clock(over.trace))
    draw_legend(pen, overlay.legend(over), MARGIN, 51, WIDTH - 2 * MARGIN)
    schedule, last = over.predicted.schedule, float(over.times[-1])
    left, width = MARGIN + LEFT, WIDTH - 2 * MARGIN - LEFT
    ran, due, gap = lane_heights(schedule.num_ranks)

    def at(time: float) -> float:
        return left + (width * time / last if last else 0.0)

    for rank in range(schedule.num_ranks):
        y = TOP + rank * (ran + due + gap)
        if schedule.num_ranks <= 16 or rank % 8 == 0:
            name = f"rank {over.comparison.ranks[rank]}"
            pen.text(left - 10, y + ran / 2, name, size=10.5, fill=DIM, anchor="rm")
        pen.box(left, y, width, ran + due, fill=SOFT)
        pen.hatch(left, y, at(over.comparison.makespan) - left, ran, HATCH)
    for row, rank in enumerate(over.others["rank"].tolist()):
        x, right = (at(float(over.others[name][row])) for name in ("start", "end"))
        pen.box(x, TOP + rank * (ran + due + gap), max(right - x, 0.7), ran, fill=mix(WORK, 0.42))
    slots = max(1, int(schedule.slot.max(initial=0)))
    for row, rank in enumerate(schedule.rank.tolist()):
        y = TOP + rank * (ran + due + gap)
        kind = int(schedule.kind[row])
        x, right = _stretch(at, over.actions["start"][row], over.actions["end"][row])
        draw_action(pen, kind, schedule.action(row).label, x, right, y, ran, schedule.slot[row] / slots)
        _due(pen, over, row, at, y + ran + 1, due - 1)
    bottom = TOP + schedule.num_ranks * (ran + due + gap)
    draw_axis(pen, at, last, over.trace.unit, 8, left + width - 10, bottom + 5)
    draw_facts(pen, overlay.facts(over), bottom + 26)
    if position:
        moment = overlay.now(over, position)
        draw_playhead(pen, at(moment.time), TOP - 4, bottom - gap)
        draw_said(pen, WIDTH, bottom + 73, *overlay.say(over, moment))


def _stretch(at: At, start: float, end: float) -> tuple[float, float]:
    """The x of both ends; an action that takes no time is still visible."""
    x, right = at(float(start)), at(float(end))
    return (x, right) if right - x > 0.01 else (min(x, WIDTH - MARGIN - 2), min(x, WIDTH - MARGIN - 2) + 3)


def _due(pen: Pen, over: Overlay, row: int, at: At, y: float, size: float) -> None:
    """An action as predicted: an outline."""
    schedule, actions = over.predicted.schedule, over.actions
    x, right = _stretch(at, actions["due_start"][row], actions["due_end"][row])
    y, size = half(schedule, row, y, size)
    width = max(right - x - 1, 0.8)
    colour = {F: KINDS["F"], W: KINDS["W"]}.get(int(schedule.kind[row]), KINDS["I"])
    pen.box(x + 0.5, y, width, size, fill=PAPER, edge=colour, radius=2.5 if size > 4 else 0)
    label = schedule.action(row).label
    if size >= 10 and text_width(label, 9) < width - 3:
        pen.text(x + width / 2 + 0.5, y + size / 2, label, size=9, fill=DIM)
