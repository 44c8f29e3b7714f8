"""The plans that `layout_lab` shows for the settings of its controls, without its widget and without drawing.

They are estimates of about a hundred plans, and the best one's forecast. A forecast simulates a plan's pipeline, an
estimate uses paths that were found earlier; see `tplab.forecast.pipelines.makespans`.

The model may be the reader's own: its sizes as text, "layers=32, hidden=4096, ...".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from tplab.cost import NAMED, Cluster
from tplab.errors import PlanError, TplabError
from tplab.forecast import MODELS, Forecast, Model, Plan, forecast, plans
from tplab.forecast.memory import room
from tplab.forecast.ranking import Estimate
from tplab.forecast.stacks import STACKS
from tplab.units import plain, range_text
from tplab.widgets.layouts import words
from tplab.widgets.layouts.words import GIB
from tplab.widgets.paper.measured import check_measured
from tplab.widgets.paper.task import Bench

MANY = 100
"""The most plans that are shown, apart from the best and those that are added."""
EXACT = 5
"""How many of the fastest plans are simulated to find the best. Nineteen of twenty estimates equal the forecast, the
others are up to 1 % off."""


@dataclass(frozen=True)
class Survey:
    """The result of a search.

    shown       the plans that are worth comparing, the fastest first
    best        the fastest plan that fits; if none fits, the one that needs the least memory
    considered  how many plans are possible     fitting   how many of them fit
    """

    shown: tuple[Estimate, ...]
    best: Forecast
    considered: int
    fitting: int


@lru_cache(maxsize=64)
def survey(model: Model, cluster: Cluster, gpus: int, batch: int, sequence: int, stack: str) -> Survey:
    """The plans to show. Raises PlanError if none is possible."""
    found = plans(model, cluster, gpus=gpus, batch=batch, sequence=sequence, stack=stack, exact=EXACT)
    listed = {one.plan: one for one in found.notable(MANY)}
    smallest = min(listed.values(), key=lambda one: one.bytes).plan
    best = found[0] if len(found) else exactly(model, smallest, cluster, batch, sequence, stack)
    listed.setdefault(best.plan, Estimate(best.plan, best.seconds, best.peak.total))
    shown = sorted(listed.values(), key=lambda one: (one.seconds, one.bytes))
    return Survey(tuple(shown), best, found.considered, len(found))


@lru_cache(maxsize=1024)
def exactly(model: Model, plan: Plan, cluster: Cluster, batch: int, sequence: int, stack: str) -> Forecast:
    """The forecast of one plan."""
    return forecast(model, plan, cluster, batch=batch, sequence=sequence, stack=stack)


OWN = {
    "layers": ("layers", 1024),
    "hidden": ("hidden", 2**17),
    "heads": ("query heads", 1024),
    "kv_heads": ("key, value heads", 1024),
    "head_dim": ("features per head", 1024),
    "ffn": ("MLP's features", 2**20),
    "vocab": ("vocabulary", 2**21),
    "experts": ("experts, or 0", 4096),
    "experts_per_token": ("of them per token", 256),
}
"""Field of a Model -> the name of its control, and the largest number it accepts."""
OWN_NAME = "your model"


def is_own(text: str) -> bool:
    """Whether a setting of the control "model" consists of sizes rather than a name."""
    return "=" in text


def sizes_of(text: str) -> dict[str, int]:
    """The sizes in such a text. Raises ValueError if one is missing, or is not a number that its control accepts."""
    found = {}
    for pair in text.split(","):
        name, _, number = (part.strip() for part in pair.partition("="))
        most = OWN[name][1] if name in OWN else 0
        if not most or not number.isdecimal() or int(number) > most:
            about = f"it must be a whole number, {most:,} at most" if most else f"there are {', '.join(OWN)}"
            raise ValueError(f"{name} is {number!r} in a model of your own; {about}")
        found[name] = int(number)
    missing = [name for name in OWN if name not in found]
    if missing:
        raise ValueError(f"a model of your own has no {', '.join(missing)}")
    return found


def own_model(text: str) -> Model:
    """A Llama-like model of these sizes, with a gated MLP, rotary positions, no biases and an untied head. Raises
    ShapeError for sizes that do not fit together."""
    given: dict[str, Any] = {**sizes_of(text), "name": OWN_NAME}
    return Model(**given)


def sizes(model: Model) -> dict[str, int]:
    """The sizes of any model for the controls."""
    widths = {"kv_heads": model.num_kv_heads, "head_dim": model.head_width, "ffn": model.ffn_width}
    return {name: widths[name] if name in widths else getattr(model, name) for name in OWN}


SIZES = {
    "gpus": [2**power for power in range(13)],
    "batch": [2**power for power in range(14)],
    "sequence": [2**power for power in range(9, 18)],
}
"""The options of the controls besides the given numbers; any whole number from 1 to the last one is possible."""


class Measured(NamedTuple):
    """A measurement of a plan: seconds of a step, and GiB of the fullest rank, if published."""

    plan: Plan
    seconds: float
    gib: float | None


class Candidates(Bench):
    """Plans for training a model, one of which is chosen.

    settings   the state of the controls: model (a name, or text as in `sizes_of`), cluster, gpus, batch, sequence,
               stack; and the task that the reader works on, "" for none
    survey     the search's result for them
    shown      the plans in the picture, the fastest first; added ones come last. Each has an estimate or a forecast:
               the best, the chosen and the measured plans always have a forecast
    best, chosen    indices into `shown`
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        models: Mapping[str, Model] | None = None,
        clusters: Mapping[str, Cluster] | None = None,
        measured: Sequence[Measured] = (),
        by: str = "",
    ):
        self.models, self.clusters = {**MODELS, **(models or {})}, {**NAMED, **(clusters or {})}
        self.check(settings)
        self._measured, self.by = tuple(measured), by
        self._of_measured = {name: settings[name] for name in settings if name != "task"}
        for plan, seconds, gib in measured:
            check_measured(str(plan), seconds, by)
            check_measured(str(plan), gib or 0, by)
            if plan.ranks != settings["gpus"]:
                raise PlanError(f"{plan} was measured on {plan.ranks} ranks, and gpus is {settings['gpus']}")
        self._show(settings)

    @property
    def limit(self) -> float:
        """GiB of a GPU's memory that programs can use."""
        return self.forecast(self.best).usable / GIB

    @property
    def measured(self) -> tuple[Measured, ...]:
        """The measurements with these settings."""
        return self._measured if self._of_measured.items() <= self.settings.items() else ()

    def forecast(self, index: int) -> Forecast:
        """The forecast of a plan in the picture, computed on first use."""
        plan = self.shown[index].plan
        if plan not in self.forecasts:
            one, best = self._exactly(plan), self.forecasts[self.shown[self.best].plan]
            self.forecasts[plan] = one
            if one.surely_fits and (one.seconds < best.seconds or not best.surely_fits):
                self.best = index  # its estimate was too high
        return self.forecasts[plan]

    def _exactly(self, plan: Plan) -> Forecast:
        asked = self.settings
        model, cluster = self._model(asked["model"]), self.clusters[asked["cluster"]]
        return exactly(model, plan, cluster, asked["batch"], asked["sequence"], asked["stack"])

    def _model(self, setting: str) -> Model:
        return own_model(setting) if is_own(setting) else self.models[setting]

    # --- requests ------------------------------------------------------------------------------------------------

    def check(self, settings: Mapping[str, Any]) -> None:
        known = {"model": [*self.models], "cluster": [*self.clusters], "stack": [*STACKS]}
        names = {*known, *SIZES}
        if settings.keys() - {"task"} != names:
            raise ValueError(f"settings are {', '.join(sorted(settings))}; there must be {', '.join(sorted(names))}")
        self.tasks.check(settings.get("task", ""))
        if is_own(str(settings["model"])):
            sizes_of(settings["model"])
            del known["model"]
        for name, options in known.items():
            if settings[name] not in options:
                raise ValueError(f"{name} is {settings[name]!r}; it must be one of {', '.join(options)}")
        for name, offered in SIZES.items():
            value = settings[name]
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= offered[-1]:
                raise ValueError(f"{name} is {value!r}; it must be a whole number from 1 to {offered[-1]:,}")

    def ask(self, settings: Mapping[str, Any]) -> None:
        self.check(settings)
        settings = {"task": "", **settings}
        if settings == self.settings and not self.is_stale:
            return
        try:
            self._show(settings)
        except TplabError as error:
            self.settings, self.notice, self.is_stale = settings, str(error), True

    def _show(self, settings: Mapping[str, Any]) -> None:
        model, cluster = self._model(settings["model"]), self.clusters[settings["cluster"]]
        self.survey = survey(model, cluster, *(settings[name] for name in ("gpus", "batch", "sequence", "stack")))
        self.settings, self.notice, self.is_stale = {"task": "", **settings}, "", False
        self.shown, self.forecasts = list(self.survey.shown), {self.survey.best.plan: self.survey.best}
        self.best = self.chosen = self.place(self.survey.best.plan)
        for one in self.measured:
            self._add(one.plan)

    def choose(self, chosen: Plan | int) -> None:
        """Choose a plan, which is added if it is not shown, or the one at an index. Raises PlanError if it cannot train
        the model, and ValueError for an invalid index."""
        if isinstance(chosen, int):
            if not 0 <= chosen < len(self.shown):
                raise ValueError(f"chosen is {chosen}; there are plans 0 to {len(self.shown) - 1}")
        elif chosen.ranks != self.settings["gpus"]:
            raise PlanError(f"{chosen} has {chosen.ranks} ranks, and gpus is {self.settings['gpus']}")
        self.chosen = chosen if isinstance(chosen, int) else self._add(chosen)
        self.forecast(self.chosen)

    def complete(self) -> None:
        """Forecast every plan in the picture, so that all can be chosen without Python."""
        for index in range(len(self.shown)):
            self.forecast(index)

    def _add(self, plan: Plan) -> int:
        """The index of a plan, added with its forecast if it is not shown."""
        if all(one.plan != plan for one in self.shown):
            one = self._exactly(plan)
            self.shown.append(Estimate(plan, one.seconds, one.peak.total))
        self.forecast(self.place(plan))
        return self.place(plan)

    def place(self, plan: Plan) -> int:
        """The index of a shown plan."""
        return next(index for index, one in enumerate(self.shown) if one.plan == plan)

    # --- what is shown -------------------------------------------------------------------------------------------

    @property
    def title(self) -> str:
        one = self.forecast(self.best)
        return f"Which layout for {one.model.name or 'this model'} on {one.plan.ranks:,} GPUs?"

    @property
    def about(self) -> str:
        one = self.forecast(self.best)
        return f"{one.batch:,} x {one.sequence:,} tokens per step, {one.stack.name} on {one.cluster.name}"

    @property
    def sentence(self) -> str:
        text = words.sentence(self.forecast(self.best), self.survey.considered, self.survey.fitting)
        if not self.measured:
            return f"{text}."
        several = f"{len(self.measured)} plans, {range_text([one.seconds for one in self.measured], plain)} s"
        said = several if len(self.measured) > 3 else words.measured_text(self.measured)
        return f"{text}. Measured by {self.by}: {said}."

    def says(self, index: int) -> str:
        """A sentence about a plan."""
        return words.says(self.forecast(index), self.forecast(self.best))

    def points(self) -> dict[str, np.ndarray]:
        """For each plan: seconds, GiB of the fullest rank, whether it is on the Pareto front, and whether it fits: 0
        for no, 1 for perhaps, 2 for yes."""
        best = self.forecast(self.best)
        exact = [self.forecasts.get(one.plan) for one in self.shown]
        seconds = np.array([one.seconds if of is None else of.seconds for one, of in zip(self.shown, exact)])
        held = np.array([one.bytes if of is None else of.peak.total for one, of in zip(self.shown, exact)], float)
        order = np.lexsort((held, seconds))
        least = np.minimum.accumulate(held[order])
        front = np.zeros(len(order), np.int8)
        front[order[np.append(True, least[1:] < least[:-1])]] = 1
        sure, most = room(best.cluster.chip, best.stack)
        fits = (held <= sure).astype(np.int8) + (held <= most)
        return {"seconds": seconds, "gib": held / GIB, "front": front, "fits": fits}

    def choices(self) -> dict[str, list[Any]]:
        """The options of the controls."""
        given = {name: sorted({*sizes, self.settings[name]}) for name, sizes in SIZES.items()}
        offered = {"model": [*self.models], "cluster": [*self.clusters], **given, "stack": [*STACKS]}
        own_sizes = [[name, *about] for name, about in OWN.items()]
        return offered | {"own": own_sizes, "tasks": self.tasks.shown()}
