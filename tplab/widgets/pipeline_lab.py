"""`pipeline_lab()`: choose a rule and its numbers, see the schedule, change it by hand, compare it with another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec

import traitlets

from tplab.schedules import Schedule, Simulation, to_csv
from tplab.widgets.gantt import Gantt
from tplab.widgets.paper.card import in_turn
from tplab.widgets.paper.lab import Lab, as_of_traits
from tplab.widgets.paper.shown import numbers
from tplab.widgets.schedule.facts import PAPERS
from tplab.widgets.schedule.tasks import START, TASKS
from tplab.widgets.schedule.workbench import Workbench, check_settings, choices

P = ParamSpec("P")


def by_hand(change: Callable[Concatenate[Workbench, P], bool]) -> Callable[Concatenate[PipelineLab, P], bool]:
    """A change of the workbench as a method of the card, which then shows it."""

    @in_turn
    @wraps(change)
    def taken(self: PipelineLab, *args: P.args, **kwargs: P.kwargs) -> bool:
        done = change(self._bench, *args, **kwargs)
        self._take()
        return done

    return taken


class PipelineLab(Lab, Gantt):
    """The card of `pipeline_lab`. In its settings, `memory_limit` and `compare` may be None.

    schedule, run   what is shown
    notice     a problem: a rule that does not fit, a move that is not legal, memory over its limit
    num_edits  how many changes by hand can be undone
    """

    kept = ("settings", "step", "colour")
    num_edits = traitlets.Int(0).tag(sync=True)

    def __init__(self, settings: dict[str, Any]):
        with as_of_traits():
            check_settings(settings)
        self._bench: Workbench = Workbench(settings)
        super().__init__(self._bench.runs, self._bench.limit, self._bench.board())
        self.choices = choices()
        self.listen()

    @property
    def run(self) -> Simulation:
        return self._bench.run

    @property
    def schedule(self) -> Schedule:
        return self._bench.schedule

    def _take(self) -> None:
        with self.hold_sync():
            self.show(self._bench.runs, self._bench.limit)
            self.step = min(self.step, float(self.num_steps))
            super()._take()

    move = by_hand(Workbench.move)
    paste = by_hand(Workbench.paste)
    undo = by_hand(Workbench.undo)
    reset = by_hand(Workbench.reset)

    def export(self, kind: str) -> str:
        """The schedule as text: "svg", "csv" (torch's form) or "perfetto" (JSON that ui.perfetto.dev opens)."""
        return self._bench.export(kind, self.colour)


def pipeline_lab(
    rule: str | Schedule | Any = "one_f_one_b",
    *,
    compare: str | Schedule | Any | None = None,
    ranks: int = 4,
    microbatches: int = 8,
    virtual_stages: int = 2,
    forward: float = 1.0,
    input_grad: float = 1.0,
    weight_grad: float = 1.0,
    transfer: float = 0.0,
    stage_costs: str | Sequence[float] = "",
    overlap: float = 0.0,
    memory_limit: float | None = None,
    task: str = "",
) -> PipelineLab:
    """Choose a schedule and its numbers, and see their effect at once.

    rule, compare   names in `tplab.schedules.RULES`; "auto" for the automatic scheduler, which respects the memory
                    limit and uses solver="quick" for many ranks and microbatches; or your own schedule, to edit and
                    compare: a Schedule, a schedule of torch.distributed.pipelining, or its pipeline_order
    forward, input_grad, weight_grad, transfer, stage_costs, overlap
                    as in `Costs`: stage_costs=[1, 1, 1, 2] doubles the cost of the last quarter of the model, and
                    overlap=0.5 hides half of a forward behind the backward that it is paired with, as DualPipe can
                    do for the messages within a stage
    memory_limit    the most microbatches whose activations a rank may hold; None: any number
    task            the task under the picture, by its name in the list there; the simulator decides when it is solved.
                    It begins with its own settings, except for those that you give
    Raises ScheduleError if the rule does not fit the numbers, and traitlets.TraitError for values outside the sliders.
    """
    settings: dict[str, Any] = dict(locals())
    settings["own"] = {}
    for name in ("rule", "compare"):
        if settings[name] is not None and not isinstance(settings[name], str):
            settings[name] = _put(settings["own"], settings[name])
    if not isinstance(stage_costs, str):
        settings["stage_costs"] = ", ".join(f"{cost:g}" for cost in numbers("stage_costs", stage_costs, 1))
    return PipelineLab(TASKS.begun(settings, START))


def _put(own: dict[str, str], given: Any) -> str:
    """Add a schedule to your own ones, as CSV, and return the name that it has there."""
    schedule = (given if isinstance(given, Schedule) else Schedule.from_torch(given)).compute_only()
    names = [schedule.name, "yours", "yours, 2"]
    name = next(name for name in names if name and name not in PAPERS and name not in own)
    own[name] = to_csv(schedule)
    return name
