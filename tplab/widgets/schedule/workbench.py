"""The pipeline lab without its widget: from the settings of the controls to everything that is shown.

It is plain Python over `tplab.schedules`, so a kernel and a browser (with Pyodide) run the same code. Neither this file
nor anything it imports needs ipywidgets, a font or Pillow.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, SupportsFloat

from tplab.errors import ScheduleError, TplabError
from tplab.schedules import RULES, Costs, Schedule, Simulation, auto_schedule, faults, simulate, to_csv
from tplab.schedules.action import in_words
from tplab.trace.perfetto import chrome_trace
from tplab.units import plain
from tplab.widgets.paper.svg import svg
from tplab.widgets.paper.task import Bench
from tplab.widgets.schedule import still
from tplab.widgets.schedule.facts import PAPERS
from tplab.widgets.schedule.tasks import TASKS

LIMITS: dict[str, tuple[float, float, float]] = {
    "ranks": (1, 16, 1),
    "microbatches": (1, 64, 1),
    "virtual_stages": (1, 8, 1),
    "forward": (0.25, 4, 0.25),
    "input_grad": (0.25, 4, 0.25),
    "weight_grad": (0.25, 4, 0.25),
    "transfer": (0, 2, 0.1),
    "overlap": (0, 1, 0.25),
}
"""Start, end and step of each slider."""

SHAPE = ("ranks", "microbatches")
COSTS = ("forward", "input_grad", "weight_grad", "transfer", "overlap")
MOST = 100.0  # the most that a part of the model may cost
QUICK_FROM = 48  # ranks x microbatches above which only the scheduler's first guesses are used, for an immediate answer
EDITED = "edited"
AUTO = "auto"
PASTED = "pasted"


class Workbench(Bench):
    """A schedule, the numbers it is simulated with, and its changes by hand.

    settings   `memory_limit` and `compare` may be None; `stage_costs` is text, see `parts_of`; `own` has your own
               schedules by name, as CSV: these names are rules too. One of them is "edited", the result of changes by
               hand
    runs       what is shown: the simulated schedule, and the one beside it
    """

    tasks = TASKS

    def __init__(self, settings: Mapping[str, Any]):
        check_settings(settings)
        self.settings = {"task": "", **settings}
        self._past: list[dict[str, Any]] = []  # the settings before each change by hand
        self.notice, self.is_stale = "", False
        self._answer()
        self._sent = self.board()  # a page is made with it

    @property
    def run(self) -> Simulation:
        return self.runs[0]

    @property
    def schedule(self) -> Schedule:
        return self.run.schedule

    @property
    def limit(self) -> float | None:
        return self.settings["memory_limit"]

    @property
    def num_edits(self) -> int:
        """How many changes by hand can be undone."""
        return len(self._past)

    # --- requests ------------------------------------------------------------------------------------------------

    def check(self, settings: Mapping[str, Any]) -> None:
        check_settings(settings)

    def ask(self, settings: Mapping[str, Any]) -> None:
        check_settings(settings)
        before, self.settings = self.settings, {"task": "", **settings}
        changed = {name for name in before if before[name] != self.settings[name]} - {"task"}
        if not changed:
            return
        if settings["rule"] != EDITED and changed & {"rule", *SHAPE, "virtual_stages"}:
            self._edit(None)
            self._past = []
        self._update()

    def _answer(self) -> None:
        """Apply the settings, or raise. A schedule that was changed by hand, or is your own, keeps its size."""
        if own := self.settings["own"].get(self.settings["rule"]):
            given = _read(own)
            size = {"ranks": given.num_ranks, "microbatches": given.num_microbatches}
            self.settings = {**self.settings, **size}
        self._show(self._runs())

    def _update(self) -> None:
        """Apply the settings. If they are impossible, keep what is shown, and say why in the notice."""
        try:
            self._answer()
        except TplabError as error:
            self.notice, self.is_stale = str(error).replace("stage_costs", "cost of each stage"), True

    def _show(self, runs: list[Simulation]) -> None:
        self.runs, self._board = runs, b""
        found = [] if self.limit is None else faults(self.schedule, memory_limit=self.limit, at_most=1)
        self.notice, self.is_stale = (str(found[0]) if found else ""), False

    def _runs(self) -> list[Simulation]:
        settings = self.settings
        costs = Costs(**{name: settings[name] for name in COSTS}, stage_costs=parts_of(settings["stage_costs"]))
        schedules = [self._made(settings["rule"], costs)]
        if settings["compare"]:
            schedules.append(self._made(settings["compare"], costs))
        return [simulate(schedule, costs) for schedule in schedules]

    def _made(self, rule: str, costs: Costs) -> Schedule:
        ranks, microbatches = (self.settings[name] for name in SHAPE)
        if own := self.settings["own"].get(rule):
            return _read(own).named(rule)
        if rule == AUTO:
            solver = "heuristic" if ranks * microbatches <= QUICK_FROM else "quick"
            return auto_schedule(ranks, microbatches, costs, memory_limit=self.limit, solver=solver).named(AUTO)
        if rule not in RULES:
            raise ScheduleError("there is no schedule to go on with; choose a rule")
        more = {"virtual_stages": self.settings["virtual_stages"]} if _is_virtual(rule) else {}
        return RULES[rule](ranks=ranks, microbatches=microbatches, **more).named(rule)

    # --- by hand -------------------------------------------------------------------------------------------------

    def move(self, rank: int, index: int, to: int) -> bool:
        """Move the action at `index` of a rank's row to index `to`, or to the end of the row that is nearest to it. If
        that is not legal, `notice` says why."""
        row = self.schedule.by_rank()[rank] if 0 <= rank < self.schedule.num_ranks else []
        if index == min(max(to, 0), len(row) - 1) != to and index >= 0:
            end = "first" if index == 0 else "last"
            self.notice = f"{in_words(row[index])} is already the {end} action of rank {rank}"
            return False
        to = min(max(to, 0), len(row) - 1)
        return self._change(lambda: self.schedule.moved(rank, index, to), "not legal: ")

    def paste(self, text: str) -> bool:
        """Show your own schedule, as CSV in either of torch's forms. If it is wrong, `notice` says why."""
        if not self._change(lambda: _read(text), "not a schedule that can run: "):
            return False
        self.settings = {**self.settings, "own": {**self.settings["own"], PASTED: to_csv(self.schedule)}}
        return True

    def _edit(self, csv: str | None) -> None:
        """Keep a schedule made by hand, or none, among your own."""
        own = {name: text for name, text in self.settings["own"].items() if name != EDITED}
        self.settings = {**self.settings, "own": own | ({} if csv is None else {EDITED: csv})}

    def _change(self, make: Callable[[], Schedule], wrong: str) -> bool:
        before = self.settings
        try:
            made = make().named(EDITED)
            found = faults(made, at_most=1)
            if found:
                raise ScheduleError(f"{wrong}{found[0]}")
            self._edit(to_csv(made))
            self.settings["rule"] = EDITED
            self._answer()
        except TplabError as error:
            self.settings, self.notice = before, str(error)
            return False
        self._past.append(before)
        return True

    def undo(self) -> bool:
        """Undo the last change by hand; False if there is none."""
        if not self._past:
            return False
        before = self._past.pop()
        self._edit(before["own"].get(EDITED))
        self.settings |= {name: before[name] for name in ("rule", *SHAPE)}
        self._update()
        return True

    def reset(self) -> bool:
        """Undo all changes by hand; False if there are none."""
        del self._past[1:]
        return self.undo()

    # --- what is shown -------------------------------------------------------------------------------------------

    def board(self) -> bytes:
        self._board = self._board or still.board(self.runs, self.limit)
        return self._board

    def export(self, kind: str, colour: str = "kind") -> str:
        """The schedule as text: "svg", "csv" (torch's form) or "perfetto" (JSON that ui.perfetto.dev opens).

        colour   what the colours of the SVG mean: "kind", "microbatch" or "stage"
        """
        if kind == "svg":
            return to_svg(self.runs, self.limit, colour)
        if kind == "csv":
            return to_csv(self.schedule)
        if kind == "perfetto":
            return json.dumps(chrome_trace(self.run.trace))
        raise ValueError(f"export is {kind!r}; it must be one of svg, csv, perfetto")

    def answer(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """The browser asks for a change by hand, or for a file in these colours. The answer to a move describes it."""
        if "move" in message:
            rank, index, to = map(int, message["move"])
            before = self.run.makespan
            if self.move(rank, index, to):
                return {"answered": True, "did": self._moved(rank, to, before)}
        elif "paste" in message:
            self.paste(str(message["paste"]))
        elif "undo" in message:
            self.undo()
        elif "reset" in message:
            self.reset()
        elif "export" in message:
            kind = message["export"]
            text = self.export(kind, message.get("colour", "kind"))
            return {"file": f"{self.schedule.name or 'schedule'}.{_SUFFIX[kind]}", "text": text}
        return {"answered": True}

    def _moved(self, rank: int, to: int, before: float) -> str:
        """The effect of a move: the new place of the action, and the change of the makespan."""
        row, makespan = self.schedule.by_rank()[rank], plain(self.run.makespan)
        where = f"after {in_words(row[to - 1])}" if to else "first"
        change = f"stays {makespan}" if before == self.run.makespan else f"goes from {plain(before)} to {makespan}"
        return f"Rank {rank} now runs {in_words(row[to])} {where}. The makespan {change}."

    def judged(self) -> tuple[Simulation]:
        return (self.run,)

    def traits(self) -> dict[str, Any]:
        return {**super().traits(), "num_edits": self.num_edits}


_SUFFIX = {"svg": "svg", "csv": "csv", "perfetto": "json"}


def choices() -> dict[str, Any]:
    """The options of the controls."""
    return {
        "rules": [*RULES, AUTO],
        "names": PAPERS,
        "virtual": [name for name in RULES if _is_virtual(name)],
        "pairs": [name for name in RULES if RULES[name](ranks=2, microbatches=4).joined.any()],
        "limits": {name: list(limit) for name, limit in LIMITS.items()},
        "tasks": TASKS.shown(),
    }


def to_svg(runs: Sequence[Simulation], limit: float | None = None, colour: str = "kind") -> str:
    """The picture of these runs as an SVG document."""
    return svg(still.draw(runs, limit, colour), still.sentence(runs))


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise ValueError for settings that the controls do not have."""
    names = {"rule", "compare", "memory_limit", "stage_costs", "own", "task", *LIMITS}
    if spare := sorted(settings.keys() - names):
        raise ValueError(f"there is no setting {spare[0]!r}; there are {', '.join(sorted(names))}")
    TASKS.check(settings.get("task", ""))
    own = settings["own"]
    if not isinstance(own, Mapping) or not all(isinstance(text, str) for pair in own.items() for text in pair):
        raise ValueError(f"own is {own!r}; it must have schedules as CSV, by name")
    for name in ("rule", "compare"):
        chosen = settings[name]
        known = [*RULES, AUTO, *own, *([EDITED] if name == "rule" else [])]
        if chosen not in known and not (name == "compare" and chosen is None):
            meant = [rule for rule, paper in PAPERS.items() if str(chosen).lower() == paper.lower()]
            way_out = f"did you mean {meant[0]}?" if meant else f"it must be one of {', '.join(known)}"
            raise ValueError(f"{name} is {chosen!r}; {way_out}")
    for name, (least, most, _) in LIMITS.items():
        value = settings[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise ValueError(f"{name} is {value!r}; it must be a number from {least:g} to {most:g}")
        if name in (*SHAPE, "virtual_stages") and value != int(value):
            raise ValueError(f"{name} is {value!r}; it must be a whole number")
    if not isinstance(settings["stage_costs"], str):
        raise ValueError(f"stage_costs is {settings['stage_costs']!r}; it must be text, such as '1, 1, 1, 2'")
    check_limit(settings["memory_limit"])


def check_limit(limit: Any) -> None:
    """Raise ValueError unless this can be a memory limit."""
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, SupportsFloat) or not float(limit) > 0):
        raise ValueError(f"memory_limit is {limit!r}; it must be None or a number above 0")


def parts_of(text: str) -> list[float] | None:
    """The relative costs of consecutive parts of the model, from "1, 1, 1, 2"; None for empty text."""
    parts = []
    for word in text.replace(",", " ").split():
        try:
            parts.append(float(word))
        except ValueError:
            raise ScheduleError(
                f"the stages cost {text.strip()!r}, and {word!r} is no number; write one number for each stage, such "
                "as 1, 1, 1, 2, or nothing where all cost the same"
            ) from None
        if not 0 <= parts[-1] <= MOST:
            raise ScheduleError(f"a stage costs {word}; it must be a number from 0 to {MOST:g}")
    return parts or None


def _is_virtual(rule: str) -> bool:
    """Whether a rule has a parameter for the number of stages per rank."""
    return "virtual_stages" in inspect.signature(RULES[rule]).parameters


@lru_cache(maxsize=8)
def _read(text: str) -> Schedule:
    """Your own schedule, no larger than the controls allow."""
    if not text.strip():
        raise ScheduleError("nothing was pasted; a schedule has one line per rank, for example 0F0,0F1,0B0,0B1")
    schedule = Schedule.from_csv(text).compute_only()
    sizes = {
        "ranks": schedule.num_ranks,
        "microbatches": schedule.num_microbatches,
        "virtual_stages": max(map(len, schedule.placement)),
    }
    for name, size in sizes.items():
        least, most, _ = LIMITS[name]
        if not least <= size <= most:
            what = "stages on a rank" if name == "virtual_stages" else name
            raise ScheduleError(
                f"your schedule has {size} {what}, and the lab shows {least:g} to {most:g}; "
                "gantt(Schedule.from_csv(text)) shows any number"
            )
    return schedule
