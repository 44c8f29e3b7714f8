"""`layout_lab(model)`: every layout of a model on GPUs, its seconds and its memory; choose one and see why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import traitlets

from tplab.cost import Cluster, find
from tplab.forecast import Forecast, Model, Plan
from tplab.widgets.layouts import drawing, views
from tplab.widgets.layouts.candidates import Measured
from tplab.widgets.layouts.tasks import START, TASKS
from tplab.widgets.layouts.words import badge
from tplab.widgets.layouts.workbench import Workbench
from tplab.widgets.paper.card import in_turn, script
from tplab.widgets.paper.lab import Lab
from tplab.widgets.paper.shown import check_is
from tplab.widgets.paper.still import still


class LayoutLab(Lab):
    """The card of `layout_lab`.

    chosen     the index of the chosen plan in `shown`
    view       "plans": seconds against memory, the step and the memory of the chosen plan; "pipeline": its schedule;
               "nodes": where its ranks are
    notice     what is wrong: no plan is possible with these settings
    """

    _esm = script("layouts")
    kept = ("settings", "chosen", "view")
    chosen = traitlets.Int(0).tag(sync=True)
    view = traitlets.Enum(("plans", "pipeline", "nodes"), "plans").tag(sync=True)

    def __init__(self, bench: Workbench):
        self._bench: Workbench = bench
        super().__init__(choices=bench.choices())
        self.listen()
        self.observe(self._on_chosen, "chosen")
        self.observe(lambda _: vars(self).pop("_picture", None), "view")

    @property
    def shown(self) -> tuple[Plan, ...]:
        """The plans in the picture: the fastest first, then those that were added."""
        return tuple(one.plan for one in self._bench.shown)

    @property
    def best(self) -> Forecast:
        """The fastest plan that fits; if none fits, the one that needs the least memory."""
        return self._bench.forecast(self._bench.best)

    @property
    def forecast(self) -> Forecast:
        """The forecast of the chosen plan."""
        return self._bench.forecast(self.chosen)

    @property
    def sentence(self) -> str:  # type: ignore[override]  # it changes with the settings
        return self._bench.sentence

    def picture(self) -> bytes:
        bench = self._bench
        chosen, best = bench.forecast(bench.chosen), bench.forecast(bench.best)
        words = {"about": bench.about, "badge": badge(best), "gap": 24}
        if self.view == "plans":
            scenes = [drawing.plan_map(bench), drawing.step(bench)]
            words |= {"legend": drawing.legend(bench), "note": drawing.note(bench)}
        else:
            scenes = [views.pipeline(chosen) if self.view == "pipeline" else views.nodes(chosen)]
        return still(bench.title, f"{chosen.plan} {bench.says(bench.chosen)}", scenes, bench.chosen, **words)

    @traitlets.validate("chosen")
    def _check_chosen(self, proposal: Any) -> int:
        if not 0 <= proposal["value"] < len(self.shown):
            raise traitlets.TraitError(f"chosen is {proposal['value']}; there are plans 0 to {len(self.shown) - 1}")
        return proposal["value"]

    @in_turn
    def _on_chosen(self, change: Any) -> None:
        self._bench.choose(change["new"])
        self._take()


def layout_lab(
    model: str | Model = "llama3-8b",
    *,
    cluster: str | Cluster = "h100-measured",
    gpus: int = 64,
    batch: int = 512,
    sequence: int = 8192,
    stack: str = "megatron",
    plan: Plan | None = None,
    measured: Sequence[tuple[Plan, float, float | None]] = (),
    by: str = "",
    task: str = "",
) -> LayoutLab:
    """Show the plans for training a model on a cluster: seconds per step against the memory of the fullest rank.

        layout_lab("llama3-70b", cluster="h100-measured", gpus=256, batch=1024, sequence=8192)

    model, cluster   by name, or your own, as for `forecast`. A measured cluster gives a forecast with its error, a data
                     sheet gives seconds at peak rates. With "your own ...", readers enter sizes of a Llama-like model
    gpus, batch, sequence, stack
                     as for `plans`: ranks, sequences per step, tokens per sequence, and the library that trains
    plan             the plan that is chosen at first; the best if None
    measured         published measurements with these settings: (plan, seconds of a step, GiB of the fullest rank, or
                     None), and `by`, who measured them
    task             the task under the picture, by its name in the list there; the forecast decides when it is solved.
                     It begins with its own settings, except for those that you give
    About a hundred plans are shown: the fastest, the best of each layout of ranks, and the Pareto front of time and
    memory. At first all of them are forecast, so that choosing one needs no kernel. After a change of the settings,
    only the chosen one and the best are; the others have the search's estimates, most within 1 %.
    Raises PlanError if no plan is possible, and ValueError for settings that no control has.
    """
    check_is("model", model, str, Model)
    check_is("plan", plan, Plan, type(None))
    for row in measured:
        check_is("a row of measured", row, tuple, list)
    models = {} if isinstance(model, str) else {model.name or "yours": replace(model, name=model.name or "yours")}
    clusters = {} if isinstance(cluster, str) else {find(cluster).name: cluster}
    settings = {"model": next(iter(models), model), "cluster": next(iter(clusters), cluster), "gpus": gpus}
    settings |= {"batch": batch, "sequence": sequence, "stack": stack, "task": task}
    bench = Workbench(TASKS.begun(settings, START), models, clusters, [Measured(*row) for row in measured], by)
    if plan is not None:
        bench.choose(plan)
    bench.complete()
    return LayoutLab(bench)
