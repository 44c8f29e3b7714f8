"""`gantt(run)`: shows a pipeline schedule, or compares two, with what every rank holds in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import traitlets

from tplab.schedules import Costs, Schedule, Simulation, simulate
from tplab.widgets.paper.apng import encode
from tplab.widgets.paper.card import Card, Step, script
from tplab.widgets.paper.frame import draw_edge
from tplab.widgets.paper.pen import Pen
from tplab.widgets.paper.shown import check_shown
from tplab.widgets.schedule import still
from tplab.widgets.schedule.workbench import check_limit, to_svg


class Gantt(Card):
    """The card of `gantt`. `step` is the position of the playhead: step k is the k-th distinct moment at which some
    action ends. `colour` is what the colours mean: "kind", "microbatch" or "stage"."""

    _esm = script("pipeline")
    kept = ("step", "colour")
    board = traitlets.Bytes().tag(sync=True)
    colour = traitlets.Enum(("kind", "microbatch", "stage"), "kind").tag(sync=True)
    step = Step().tag(sync=True)

    def __init__(self, runs: Sequence[Simulation], limit: float | None = None, board: bytes = b"", **traits: Any):
        self.show(runs, limit)
        super().__init__(board=board or still.board(self.runs, self.limit), **traits)

    def show(self, runs: Sequence[Simulation], limit: float | None) -> None:
        """Show these runs."""
        self.runs, self.limit = list(runs), limit
        self.num_steps = len(still.moments(self.runs)) - 1
        self.sentence = still.sentence(self.runs)

    def picture(self) -> bytes:
        scene = still.draw(self.runs, self.limit, self.colour)
        pen = Pen(scene.width, scene.height)
        draw_edge(pen, pen.width, pen.height)
        scene.paint(pen)
        return encode([pen.image()], [0])

    def to_svg(self) -> str:
        """The same picture as an SVG document."""
        return to_svg(self.runs, self.limit, self.colour)


def gantt(
    run: Simulation | Schedule,
    beside: Simulation | Schedule | None = None,
    *,
    memory_limit: float | None = None,
    step: float = 0,
    colour: str = "kind",
) -> Gantt:
    """Show a pipeline schedule: every action on its rank, idle time hatched, and the activations each rank holds below.

    run           a simulated run, or a schedule, which is simulated with F = I = W = 1
    beside        another one, shown on the same time axis with the same playhead
    memory_limit  the most microbatches whose activations a rank may hold; any excess is marked
    colour        what the colours mean: "kind" (F, I and W; a B is both), "microbatch" or "stage"
    Raises ValueError if `memory_limit` is not above 0.
    """
    both = [run] if beside is None else [run, beside]
    check_shown(both, Simulation, Schedule)
    check_limit(memory_limit)
    runs = [one if isinstance(one, Simulation) else simulate(one, Costs()) for one in both]
    return Gantt(runs, memory_limit, step=step, colour=colour)
