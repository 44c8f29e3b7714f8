"""Verdicts with the learner's run or schedule drawn below: animated, as a timeline, or up to where it gets stuck."""

from __future__ import annotations

import base64
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from tplab.errors import TplabError
from tplab.exercises.check import Verdict
from tplab.schedules import Costs, Schedule, simulate
from tplab.trace.trace import Trace
from tplab.widgets import animate, gantt, timeline
from tplab.widgets.paper.apng import encode
from tplab.widgets.paper.card import Card
from tplab.widgets.paper.palette import DIM, HUES, INK, LINE, SOFT, mix
from tplab.widgets.paper.pen import Pen
from tplab.widgets.paper.still import below

WIDTH, LEFT, CELL, LANE = 860, 66, 36, 26
STUCK = HUES[5]


class Moving(Verdict):
    """A verdict with a picture of the run: by default an animation."""

    def __init__(self, passed: bool, text: str, trace: Trace, show: Callable[[Trace], Card] = animate):
        super().__init__(passed, text)
        self.trace, self.show = trace, show

    def card(self) -> Card:
        card = self.show(self.trace)
        card.above = self.text
        return card


Timed = partial(Moving, show=timeline)
"""A verdict with a timeline of the run."""


class Drawn(Verdict):
    """A verdict with a drawing of the schedule.

    costs   the durations of its actions
    limit   the microbatches that a rank may hold; anything above is marked
    """

    def __init__(
        self, passed: bool, text: str, schedule: Schedule, costs: Costs | None = None, limit: float | None = None
    ):
        super().__init__(passed, text)
        self.schedule, self.costs, self.limit = schedule, costs or Costs(), limit

    def card(self) -> Card:
        card = gantt(simulate(self.schedule, self.costs), memory_limit=self.limit)
        card.above = self.text
        return card

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        """The schedule; if it cannot finish, a picture of the ticks that it reaches, and the actions that never run."""
        try:
            return super()._repr_mimebundle_(**kwargs)
        except TplabError:
            png = base64.b64encode(below(self.text, stuck(self.schedule))).decode()
            return {"text/plain": self.text, "image/png": png}, {"image/png": {"alt": self.text}}


def stuck(schedule: Schedule) -> bytes:
    """A schedule that gets stuck, one column per tick: the actions that ran, the one each rank waits at, the rest."""
    ticks = np.asarray(schedule.earliest)
    reached = int(ticks.max(initial=-1)) + 1
    pen = Pen(WIDTH, 34 + LANE * schedule.num_ranks + 24)
    cell = min(CELL, (WIDTH - LEFT - 18) / max(reached + 4, 1))
    for rank in range(schedule.num_ranks):
        y = 10 + LANE * rank
        pen.text(LEFT - 10, y + 10, f"rank {rank}", size=11, fill=DIM, anchor="rm")
        pen.line([(LEFT, y + 23), (WIDTH - 18, y + 23)], LINE)
        first, place = True, reached
        for index in range(int(schedule.offsets[rank]), int(schedule.offsets[rank + 1])):
            label = schedule.action(index).label
            if ticks[index] >= 0:
                _cell(pen, LEFT + cell * int(ticks[index]), y, cell, label, HUES[0] if label[0] == "F" else HUES[1])
            elif LEFT + cell * (place + 1) < WIDTH - 18:
                _cell(pen, LEFT + cell * place, y, cell, label, STUCK if first else LINE)
                first, place = False, place + 1
    note = "red: the action that the rank waits to run; grey: what would come after it"
    pen.text(LEFT, 20 + LANE * schedule.num_ranks, note, size=11, fill=DIM, anchor="lm")
    return encode([pen.image()], [0])


def _cell(pen: Pen, x: float, y: float, width: float, label: str, colour: str) -> None:
    pen.box(x + 1, y, width - 2, 20, fill=SOFT if colour == LINE else mix(colour, 0.3), edge=colour, radius=3)
    pen.text(x + width / 2, y + 10, label, size=10, fill=DIM if colour == LINE else INK)
