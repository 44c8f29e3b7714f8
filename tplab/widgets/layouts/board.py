"""The data from which the browser draws `layout_lab`; static/layouts.js reads it."""

from __future__ import annotations

from tplab.forecast.plan import AXES
from tplab.widgets.layouts import drawing, nodes, own, words
from tplab.widgets.layouts import pipeline as pipelines
from tplab.widgets.layouts.workbench import Workbench
from tplab.widgets.paper.scene import packed
from tplab.widgets.paper.wire import pack


class Board:
    """The pictures of all plans, and the texts of those with a forecast. They are redrawn only if the plans change or
    there are more forecasts."""

    def __init__(self, bench: Workbench):
        self._bench, self._of, self._drawn = bench, None, packed([])

    def packed(self) -> bytes:
        bench, best = self._bench, self._bench.forecast(self._bench.best)
        known = [index for index, one in enumerate(bench.shown) if one.plan in bench.forecasts]
        of = (bench.survey, tuple(bench.shown), tuple(known), bench.best)
        if of != self._of:
            scenes = [drawing.plan_map(bench), drawing.step(bench)]
            self._of, self._drawn = of, packed(scenes, drawing.legend(bench))
        forecasts = [bench.forecast(index) for index in known]
        pipeline, of_pipeline = pipelines.board(bench.forecast(bench.chosen), bench.chosen)
        node_size, found = best.cluster.node_size, bench.points()
        header, columns = self._drawn
        header |= {
            "title": bench.title, "about": bench.about, "badge": words.badge(best), "best": bench.best,
            "own": own.sizes(best.model), "note": drawing.note(bench),
            "plans": [str(one.plan) for one in bench.shown],
            "axes": [[getattr(one.plan, axis) for axis in AXES] for one in bench.shown],
            "known": known,
            "says": [words.says(one, best) for one in forecasts],
            "nodes": [nodes.on_nodes(one.plan, node_size) for one in forecasts],
            "groups": [nodes.groups(one.plan, node_size) for one in forecasts],
            "node": node_size or best.plan.ranks,
            "pipeline": pipeline,
        }  # fmt: skip
        chart = {f"pipeline.{name}": column for name, column in of_pipeline.items()}  # a scene has an "end0", too
        return pack(header, {**columns, "seconds": found["seconds"], "gib": found["gib"], **chart})
