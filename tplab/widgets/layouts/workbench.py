"""The layout lab without its widget: from the settings of the controls to everything that is shown.

It is plain Python over `tplab.forecast`, so a kernel and a browser (with Pyodide) run the same code. Neither this
file nor anything it imports needs ipywidgets, a font or Pillow.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tplab.forecast import Forecast
from tplab.forecast.plan import AXES
from tplab.widgets.layouts import drawing, views, words
from tplab.widgets.layouts.candidates import Candidates, sizes
from tplab.widgets.layouts.tasks import TASKS
from tplab.widgets.paper.scene import packed
from tplab.widgets.paper.wire import pack


class Workbench(Candidates):
    """The candidates with everything that is drawn and said of them."""

    tasks = TASKS
    _of: Any = None  # the state that `_drawn` shows
    _drawn: tuple[dict[str, Any], dict[str, Any]]

    def answer(self, message: Mapping[str, Any]) -> dict[str, Any]:
        if "choose" in message:
            self.choose(int(message["choose"]))
        return {"answered": True}

    def judged(self) -> tuple[Forecast, Forecast]:
        chosen = self.forecast(self.chosen)  # which may turn out to be faster than the best so far
        return chosen, self.forecast(self.best)

    def traits(self) -> dict[str, Any]:
        return {**super().traits(), "chosen": self.chosen}

    def board(self) -> bytes:
        """The pictures of all plans, and the texts of those with a forecast; static/layouts.js reads it. The pictures
        are drawn again only if the plans change or there are more forecasts."""
        best = self.forecast(self.best)
        known = [index for index, one in enumerate(self.shown) if one.plan in self.forecasts]
        of = (self.survey, tuple(self.shown), tuple(known), self.best)
        if of != self._of:
            scenes = [drawing.plan_map(self), drawing.step(self)]
            self._of, self._drawn = of, packed(scenes, drawing.legend(self))
        forecasts = [self.forecast(index) for index in known]
        pipeline, of_pipeline = views.board(self.forecast(self.chosen), self.chosen)
        node_size, found = best.cluster.node_size, self.points()
        header, columns = self._drawn
        header |= {
            "title": self.title, "about": self.about, "badge": words.badge(best), "best": self.best,
            "own": sizes(best.model), "note": drawing.note(self),
            "plans": [str(one.plan) for one in self.shown],
            "axes": [[getattr(one.plan, axis) for axis in AXES] for one in self.shown],
            "known": known,
            "says": [words.says(one, best) for one in forecasts],
            "nodes": [views.on_nodes(one.plan, node_size) for one in forecasts],
            "groups": [views.groups(one.plan, node_size) for one in forecasts],
            "node": node_size or best.plan.ranks,
            "pipeline": pipeline,
        }  # fmt: skip
        chart = {f"pipeline.{name}": column for name, column in of_pipeline.items()}  # a scene has an "end0", too
        return pack(header, {**columns, "seconds": found["seconds"], "gib": found["gib"], **chart})
