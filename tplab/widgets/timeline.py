"""`timeline(trace)`: shows where the time of every rank goes."""

from __future__ import annotations

from collections.abc import Mapping

import traitlets

from tplab.errors import ScheduleError
from tplab.mesh import Axis
from tplab.schedules import Comparison, Simulation
from tplab.trace.trace import Trace
from tplab.widgets.paper.card import Card, Step, script
from tplab.widgets.paper.measured import Durations
from tplab.widgets.schedule import overlay
from tplab.widgets.schedule.overlay import Overlay
from tplab.widgets.score import payload, still, words
from tplab.widgets.score.score import Score, score


class Timeline(Card):
    """The card of `timeline`. `step` is the position of the playhead, as in `Animation` or, over a prediction, as in
    `Gantt`. `comparison` compares the trace with the prediction, or is None. `begin` and `end` are the part of the
    trace that is shown, from 0 to 1."""

    _esm = script("timeline")
    kept = ("step", "begin", "end")
    score = traitlets.Bytes().tag(sync=True)
    step = Step().tag(sync=True)
    begin = traitlets.Float(0.0, min=0.0, max=1.0).tag(sync=True)
    end = traitlets.Float(1.0, min=0.0, max=1.0).tag(sync=True)

    def __init__(self, of: Score | Overlay, step: float = 0, measured: Durations | None = None):
        self.of, self.num_steps, self.comparison, self.measured = of, of.num_steps, None, measured or Durations()
        if isinstance(of, Overlay):
            self.comparison, self.sentence = of.comparison, overlay.sentence(of)
            super().__init__(score=overlay.sent(of), step=step)
        else:
            self.sentence = f"{words.summary(of, 'Timeline')} {self.measured.sentence}".strip()
            super().__init__(score=payload.timeline(of, self.measured, by_kind=True), step=step)

    def picture(self) -> bytes:
        if isinstance(self.of, Overlay):
            return overlay.picture(self.of, self.step)
        return still.timeline(self.of, self.measured)


def timeline(
    trace: Trace,
    predicted: Simulation | Comparison | None = None,
    step: float = 0,
    *,
    axis: Axis | None = None,
    batch: int | None = None,
    measured: Mapping[str, float] | None = None,
    by: str = "",
) -> Timeline:
    """Show where the time of every rank goes: computing, messages sent meanwhile, and waiting; how busy each rank is;
    and the critical path, the chain of events that sets the makespan.

    With `predicted`, the trace is of a pipeline schedule executed by `train_batch`, and one batch of it is shown: each
    action when it ran and, outlined below, when it was predicted. Both times are counted from the first start.

        costs = measured_costs(schedule, trace)
        timeline(trace, predicted=simulate(schedule, costs))

    With `measured`, published measurements are lines below the lanes, on the same axis, that end in a diamond.

        timeline(trace, measured={"step": 0.0123}, by="a blog, 8 H100s")

    predicted   the result of `simulate` for the schedule, or of `compare(schedule, trace)`
    step        where the playhead starts
    axis        the axis of the pipeline, "pp" by default; if the mesh has more axes, the group of rank 0 is shown
    batch       which batch, if the trace has several; the last one by default. A comparison knows its axis and batch
    measured    what was measured -> how long it took, in seconds from the start of the trace
    by          who measured it, and where, for the legend, the tooltip and the sentence
    Raises ScheduleError, with the reason, if the prediction is not of this trace.
    """
    if measured and (predicted is not None or trace.unit != "s"):
        what = "a prediction" if predicted is not None else f"a trace in {trace.unit}"
        raise ValueError(f"measured durations are in seconds beside a trace in seconds; this is {what}")
    if predicted is None:
        if axis is not None or batch is not None:
            raise ScheduleError("axis and batch say where a prediction is laid; give predicted= as well")
        return Timeline(score(trace), step, Durations(measured or {}, by))
    return Timeline(overlay.overlay(trace, predicted, axis, batch), step)
