"""`gantt(run)`: a pipeline schedule on its ranks, with what every rank holds in memory; and two beside each other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import traitlets

from tplab.schedules import Costs, Schedule, Simulation, simulate
from tplab.widgets import still_gantt
from tplab.widgets.paper.apng import encode
from tplab.widgets.paper.card import Card, script, style
from tplab.widgets.paper.pen import Pen
from tplab.widgets.paper.step import Step
from tplab.widgets.paper.svg import SvgPen
from tplab.widgets.paper.wire import pack
from tplab.widgets.pipeline_facts import facts

SCRIPTS = ("units", "wire", "shell", "player", "canvas", "gantt", "pipeline")
MAX_STEPS = 400


class Gantt(Card):
    """The card that `gantt` makes. `step` is where the playhead is: at step k, k different moments are over at which
    some action ends."""

    _esm = script(*SCRIPTS)
    _css = style()
    board = traitlets.Bytes().tag(sync=True)
    step = Step().tag(sync=True)

    def __init__(self, runs: Sequence[Simulation], limit: float | None = None, step: float = 0):
        self.show(runs, limit)
        super().__init__(board=board(self.runs, self.limit), step=step)

    def show(self, runs: Sequence[Simulation], limit: float | None) -> None:
        """What it is the picture of."""
        self.runs, self.limit = list(runs), limit
        self.num_steps = len(moments(self.runs)) - 1
        self.sentence = still_gantt.sentence(self.runs)

    def picture(self) -> bytes:
        pen = Pen(still_gantt.WIDTH, still_gantt.height(self.runs))
        pen.box(0.5, 0.5, pen.width - 1, pen.height - 1, edge=still_gantt.LINE, radius=12)
        still_gantt.draw(pen, self.runs, self.limit)
        return encode([pen.image()], [0])

    def to_svg(self) -> str:
        """The same picture as an SVG document."""
        pen = SvgPen(still_gantt.WIDTH, still_gantt.height(self.runs))
        still_gantt.draw(pen, self.runs, self.limit)
        return pen.document(self.sentence)


def gantt(
    run: Simulation | Schedule, beside: Simulation | Schedule | None = None, *, memory_limit: float | None = None,
    step: float = 0,
) -> Gantt:  # fmt: skip
    """Show a pipeline schedule: every action on its rank, idle time hatched, under each rank the activations it holds.

    run           a simulated run, or a schedule, which is simulated with F = I = W = 1
    beside        another one, on the same time axis, under the same playhead
    memory_limit  microbatches whose activations a rank may hold: what lies above is marked
    """
    both = [run] if beside is None else [run, beside]
    return Gantt([one if isinstance(one, Simulation) else simulate(one, Costs()) for one in both], memory_limit, step)


def moments(runs: Sequence[Simulation]) -> np.ndarray:
    """The times at which the playhead rests: the start, and every moment at which an action ends; or, where those are
    too many, so many at equal distances."""
    ends = np.concatenate([run.end - run.start.min(initial=0.0) for run in runs])
    rounded = np.unique(np.round(ends, 9))
    last = float(rounded[-1]) if len(rounded) else 0.0
    if len(rounded) > MAX_STEPS:
        return np.linspace(0.0, last, MAX_STEPS + 1)
    rounded = rounded[rounded > 0]
    return np.concatenate([[0.0], rounded if len(rounded) else [last]])


def board(runs: Sequence[Simulation], limit: float | None) -> bytes:
    """What the browser draws from; static/gantt.js reads it."""
    header = {
        "title": runs[0].schedule.name or "schedule",
        "about": still_gantt.about(runs[0]),
        "badge": still_gantt.badge(runs[0]),
        "unit": runs[0].costs.unit,
        "limit": limit,
        "runs": [
            {
                "name": run.schedule.name or "schedule",
                "ranks": run.schedule.num_ranks,
                "makespan": run.makespan,
                "peak": float(run.peak_activations.max(initial=0.0)),
                "facts": facts(run, limit),
            }
            for run in runs
        ],
    }
    columns: dict[str, np.ndarray] = {"moments": moments(runs)}
    for place, run in enumerate(runs):
        columns |= {f"{name}{place}": column for name, column in _columns(run).items()}
    return pack(header, columns)


def _columns(run: Simulation) -> dict[str, np.ndarray]:
    schedule, begin = run.schedule, float(run.start.min(initial=0.0))
    stairs = [run.activations(rank) for rank in range(schedule.num_ranks)]
    start = np.where(schedule.joined, np.roll(run.start, 1), run.start)  # a pair is one stretch of time
    return {
        "rank": schedule.rank,
        "kind": schedule.kind,
        "stage": schedule.stage,
        "slot": schedule.slot,
        "microbatch": schedule.microbatch,
        "joined": schedule.joined.astype(np.int8),
        "start": start - begin,
        "end": run.end - begin,
        "waits": run.waits_for,
        "message": schedule.needs.message,
        "critical": np.array(run.critical_indices(), np.int32),
        "stair": np.cumsum([0, *(len(times) for times, _ in stairs)]),
        "stairTime": np.concatenate([times for times, _ in stairs]) - begin,
        "stairHeld": np.concatenate([held for _, held in stairs]),
    }
