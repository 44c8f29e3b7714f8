"""`pipeline_lab()`: choose a rule and its numbers, see the schedule, change it by hand, hold it beside another."""

from __future__ import annotations

import inspect
import json
from typing import Any

import traitlets

from tplab.errors import ScheduleError, TplabError
from tplab.schedules import RULES, Costs, Schedule, Simulation, auto_schedule, faults, simulate, to_csv
from tplab.widgets.gantt import SCRIPTS, Gantt
from tplab.widgets.paper.card import script, style
from tplab.widgets.schedule import payload
from tplab.widgets.schedule.papers import PAPERS

LIMITS: dict[str, tuple[float, float, float]] = {
    "ranks": (1, 16, 1),
    "microbatches": (1, 64, 1),
    "virtual_stages": (1, 8, 1),
    "forward": (0.25, 4, 0.25),
    "input_grad": (0.25, 4, 0.25),
    "weight_grad": (0.25, 4, 0.25),
    "transfer": (0, 2, 0.1),
}
"""What each slider goes from, to, and by."""

QUICK_FROM = 48  # ranks x microbatches: above it the scheduler's first guesses have to do, for an answer at once
EDITED = "edited"
AUTO = "auto"


class PipelineLab(Gantt):
    """The card that `pipeline_lab` makes.

    settings   what the controls say; setting it from Python moves them. `memory_limit` and `compare` may be None
    schedule, run   what is shown
    notice     why something is not so: a rule that does not fit, a move that is not legal, memory over its limit
    is_stale   whether the settings cannot be: what is shown is still the last schedule that could
    num_edits  how many moves by hand `undo` can take back
    """

    _esm = script(*SCRIPTS)
    _css = style()
    settings = traitlets.Dict().tag(sync=True)
    choices = traitlets.Dict().tag(sync=True)
    notice = traitlets.Unicode("").tag(sync=True)
    is_stale = traitlets.Bool(False).tag(sync=True)
    num_edits = traitlets.Int(0).tag(sync=True)

    def __init__(self, settings: dict[str, Any]):
        self._edited: Schedule | None = None
        self._past: list[Schedule | None] = []  # what was edited before each move
        self._rule = settings.get("rule")  # the rule that is edited
        self._asked: dict[str, Any] = {}
        _check(settings)
        runs = self._runs(settings)
        super().__init__(runs, settings["memory_limit"])
        self.choices = {
            "rules": [*RULES, AUTO],
            "names": PAPERS,
            "virtual": [name for name, rule in RULES.items() if "virtual_stages" in inspect.signature(rule).parameters],
            "limits": {name: list(limit) for name, limit in LIMITS.items()},
        }
        self.settings = self._asked = dict(settings)
        self.notice = self._over_limit(runs, settings)
        self.observe(self._on_settings, "settings")
        self.on_msg(self._on_message)

    @property
    def run(self) -> Simulation:
        return self.runs[0]

    @property
    def schedule(self) -> Schedule:
        return self.run.schedule

    # --- what is asked for ---------------------------------------------------------------------------------------

    @traitlets.validate("settings")
    def _check_settings(self, proposal: Any) -> dict[str, Any]:
        settings = {**self._asked, **proposal["value"]}
        _check(settings)
        return settings

    def _on_settings(self, change: Any) -> None:
        settings = change["new"]
        shape = ("rule", "ranks", "microbatches", "virtual_stages")
        if any(settings[name] != self._asked.get(name) for name in shape) and settings["rule"] != EDITED:
            self._forget_edits()
        if settings["rule"] != EDITED:
            self._rule = settings["rule"]
        self._asked = dict(settings)
        try:
            self._put(self._runs(settings), settings)
        except TplabError as error:
            self.notice, self.is_stale = str(error), True

    def _forget_edits(self) -> None:
        self._edited, self._past, self.num_edits = None, [], 0

    def _put(self, runs: list[Simulation], settings: dict[str, Any]) -> None:
        self.show(runs, settings["memory_limit"])
        if "_picture" in vars(self):
            del self._picture
        with self.hold_sync():
            self.step = min(self.step, float(self.num_steps))
            self.board = payload.board(self.runs, self.limit)
            self.notice, self.is_stale = self._over_limit(runs, settings), False

    def _runs(self, settings: dict[str, Any]) -> list[Simulation]:
        names = ("forward", "input_grad", "weight_grad", "transfer")
        costs = Costs(**{name: settings[name] for name in names})
        schedules = [self._edited or self._made(settings["rule"], settings, costs)]
        if settings["compare"]:
            schedules.append(self._made(settings["compare"], settings, costs))
        return [simulate(schedule, costs) for schedule in schedules]

    @staticmethod
    def _made(rule: str, settings: dict[str, Any], costs: Costs) -> Schedule:
        ranks, microbatches = settings["ranks"], settings["microbatches"]
        if rule == AUTO:
            solver = "heuristic" if ranks * microbatches <= QUICK_FROM else "quick"
            limit = settings["memory_limit"]
            return auto_schedule(ranks, microbatches, costs, memory_limit=limit, solver=solver).named(AUTO)
        more = {}
        if "virtual_stages" in inspect.signature(RULES[rule]).parameters:
            more["virtual_stages"] = settings["virtual_stages"]
        return RULES[rule](ranks=ranks, microbatches=microbatches, **more).named(rule)

    @staticmethod
    def _over_limit(runs: list[Simulation], settings: dict[str, Any]) -> str:
        limit = settings["memory_limit"]
        found = [] if limit is None else faults(runs[0].schedule, memory_limit=limit, at_most=1)
        return str(found[0]) if found else ""

    # --- by hand -------------------------------------------------------------------------------------------------

    def move(self, rank: int, index: int, to: int) -> bool:
        """Move the action at `index` of a rank's row to index `to`; says in `notice` why it is not legal."""
        try:
            moved = self.schedule.moved(rank, index, to).named(EDITED)
            found = faults(moved, at_most=1)
            if found:
                raise ScheduleError(f"not legal: {found[0]}")
            before, self._edited = self._edited, moved
            try:
                runs = self._runs(self._asked)
            except TplabError:
                self._edited = before
                raise
        except TplabError as error:
            self.notice = str(error)
            return False
        self._past.append(before)
        self._show_edited(runs)
        return True

    def undo(self) -> bool:
        """Take back the last move; False where there is none."""
        if not self._past:
            return False
        self._edited = self._past.pop()
        self._show_edited(None)
        return True

    def reset(self) -> bool:
        """Take back all moves; False where there is none."""
        del self._past[1:]
        return self.undo()

    def _show_edited(self, runs: list[Simulation] | None) -> None:
        self._asked = {**self._asked, "rule": EDITED if self._past else self._rule}
        self.num_edits = len(self._past)
        self.settings = dict(self._asked)
        self._put(runs or self._runs(self._asked), self._asked)

    def _on_message(self, _: Any, content: Any, buffers: Any) -> None:
        """The browser asks for a move or a file, or whether its settings have arrived. Every message has an answer, by
        which the browser knows that a kernel runs."""
        answer = {"answered": True}
        if "move" in content:
            self.move(*map(int, content["move"]))
        elif "undo" in content:
            self.undo()
        elif "reset" in content:
            self.reset()
        elif "export" in content:
            kind = content["export"]
            answer = {"file": f"{self.schedule.name or 'schedule'}.{_SUFFIX[kind]}", "text": self.export(kind)}
        self.send(answer)

    def export(self, kind: str) -> str:
        """The schedule as text: "svg", "csv" (torch's form) or "perfetto" (JSON that ui.perfetto.dev opens)."""
        if kind == "svg":
            return self.to_svg()
        if kind == "csv":
            return to_csv(self.schedule)
        if kind == "perfetto":
            from tplab.trace.perfetto import chrome_trace

            return json.dumps(chrome_trace(self.run.trace))
        raise ValueError(f"export is {kind!r}; it must be one of svg, csv, perfetto")


_SUFFIX = {"svg": "svg", "csv": "csv", "perfetto": "json"}


def pipeline_lab(
    rule: str = "one_f_one_b", *, compare: str | None = None, ranks: int = 4, microbatches: int = 8,
    virtual_stages: int = 2, forward: float = 1.0, input_grad: float = 1.0, weight_grad: float = 1.0,
    transfer: float = 0.0, memory_limit: float | None = None,
) -> PipelineLab:  # fmt: skip
    """Choose a schedule and its numbers, and see at once what they do.

    rule, compare   names in `tplab.schedules.RULES`, or "auto": the scheduler, which keeps to the memory limit;
                    for many ranks and microbatches its solver="quick"
    forward, input_grad, weight_grad, transfer   as in `Costs`
    memory_limit    microbatches whose activations a rank may hold; None: any number
    Raises ScheduleError where the rule does not go with the numbers, traitlets.TraitError for what no slider has.
    """
    return PipelineLab(dict(locals()))


def _check(settings: dict[str, Any]) -> None:
    """Raise TraitError for settings that the controls do not have."""
    names = {"rule", "compare", "memory_limit", *LIMITS}
    if spare := sorted(settings.keys() - names):
        raise traitlets.TraitError(f"there is no setting {spare[0]!r}; there are {', '.join(sorted(names))}")
    for name in ("rule", "compare"):
        chosen = settings[name]
        known = [*RULES, AUTO, *([EDITED] if name == "rule" else [])]
        if chosen not in known and not (name == "compare" and chosen is None):
            raise traitlets.TraitError(f"{name} is {chosen!r}; it must be one of {', '.join(known)}")
    for name, (least, most, _) in LIMITS.items():
        value = settings[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise traitlets.TraitError(f"{name} is {value!r}; it must be a number from {least:g} to {most:g}")
        if name in ("ranks", "microbatches", "virtual_stages") and value != int(value):
            raise traitlets.TraitError(f"{name} is {value!r}; it must be a whole number")
    limit = settings["memory_limit"]
    if limit is not None and (not isinstance(limit, int | float) or limit <= 0):
        raise traitlets.TraitError(f"memory_limit is {limit!r}; it must be None or a number above 0")
