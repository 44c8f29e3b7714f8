"""What a lab asks of its reader, and what its card, or a page, asks of the lab.

A task is a goal to reach with the controls, judged by the lab's own simulator. A bench computes the lab.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from tplab.units import plain, plural


class Claim(NamedTuple):
    """One condition of a task: whether it holds, and the numbers in words."""

    holds: bool
    words: str


def at_most(says: str, value: float, most: float, wants: str = "it may be {} at most") -> Claim:
    """`says` and `wants` are texts with a place for their number, which may have its noun, as
    in "{:step}": "the bubble is {}%", "it may be {}% at most"."""
    return _compared(says, value, value <= most or math.isclose(value, most), wants, most)


def at_least(says: str, value: float, least: float, wants: str = "it must be {} at least") -> Claim:
    return _compared(says, value, value >= least or math.isclose(value, least), wants, least)


def below(says: str, value: float, bound: float, wants: str = "it must be below {}") -> Claim:
    return _compared(says, value, value < bound and not math.isclose(value, bound), wants, bound)


def _compared(says: str, value: float, holds: bool, wants: str, bound: float) -> Claim:
    text = _Amount(said(value))
    if text == said(bound) and not math.isclose(value, bound):
        text = _Amount(f"{value:.6g}")  # with fewer digits, the two would look equal
    return Claim(holds, says.format(text) if holds else f"{says.format(text)}, and {wants.format(said(bound))}")


class _Amount(str):
    """A number whose place in a text may have its noun: "{:microbatch}" becomes "1 microbatch", "2 microbatches"."""

    def __format__(self, noun: str) -> str:
        return f"{self!s} {noun if self == '1' else plural(noun)}" if noun else str(self)


def said(value: Any) -> str:
    """A setting or a figure as text: "1,024", "0.25", "none"."""
    if isinstance(value, float) and value != int(value):
        return plain(value)
    return f"{value:,.0f}" if isinstance(value, int | float) else str(value or "none")


@dataclass(frozen=True)
class Task:
    """A goal for the reader.

    name     in settings and links     lab   the number of the lab that it belongs to
    text     the goal, and its conditions
    start    the settings at the start
    keeps    the settings that must stay as they are in `start`: name -> the name of the control
    counts   the results for the present settings -> their claims, most important first. For a pipeline the result is
             its Simulation; for a layout, the Forecasts of the chosen plan and of the best one
    hints    each reveals more than the previous one
    """

    name: str
    lab: int
    title: str
    text: str
    start: Mapping[str, Any]
    keeps: Mapping[str, str]
    counts: Callable[..., Iterable[Claim]]
    hints: Sequence[str]

    def claims(self, settings: Mapping[str, Any], *computed: Any) -> list[Claim]:
        """The deciding claims: changed settings that must not change or, if there are none, all claims of the task."""
        changed = [
            Claim(False, f"{words} is set to {said(settings[name])}, and this task needs {said(self.start[name])}")
            for name, words in self.keeps.items()
            if settings[name] != self.start[name]
        ]
        return changed or list(self.counts(*computed))

    def verdict(self, settings: Mapping[str, Any], *computed: Any) -> dict[str, Any]:
        """Whether the task is solved, and why, in words, for the results `computed` under these settings."""
        claims = self.claims(settings, *computed)
        missing = [claim.words for claim in claims if not claim.holds]
        text = f"Not yet: {'; '.join(missing)}." if missing else f"Solved: {'; '.join(one.words for one in claims)}."
        return {"task": self.name, "is_solved": not missing, "text": text}

    def shown(self) -> dict[str, Any]:
        """The data for the browser, without the answer."""
        names = ("name", "lab", "title", "text")
        return {**{name: getattr(self, name) for name in names}, "start": {**self.start}, "hints": [*self.hints]}


class Tasks:
    """The tasks of a lab. `task` in its settings names the one that the reader works on; "" is none."""

    def __init__(self, *tasks: Task):
        self.by_name = {task.name: task for task in tasks}

    def check(self, name: Any) -> None:
        """Raise ValueError for an unknown task."""
        if name != "" and name not in self.by_name:
            raise ValueError(f"task is {name!r}; it must be one of {', '.join(self.by_name)}, or empty for none")

    def begun(self, settings: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
        """These settings with those that their task begins with, in place of the usual ones."""
        task = self.by_name.get(settings["task"])
        start = {} if task is None else task.start
        return {**settings, **{name: value for name, value in start.items() if settings[name] == usual[name]}}

    def verdict(self, settings: Mapping[str, Any], impossible: str, *computed: Any) -> dict[str, Any]:
        """The verdict on the task in the settings; {} if there is none. `impossible`: why `computed` does not belong to
        these settings, "" if it does."""
        task = self.by_name.get(settings["task"])
        if task is None:
            return {}
        if impossible:
            return {"task": task.name, "is_solved": False, "text": "Not yet: these settings are impossible."}
        return task.verdict(settings, *computed)

    def shown(self) -> list[dict[str, Any]]:
        return [task.shown() for task in self.by_name.values()]


class Bench(ABC):
    """A lab from the settings of its controls to everything that is shown.

    settings   the state of the controls, and the task that the reader works on; "" is none
    notice     a problem with them
    is_stale   whether they are impossible, so that what was possible last is still shown
    """

    tasks: ClassVar[Tasks]
    settings: dict[str, Any]
    notice: str
    is_stale: bool
    _sent = b""  # the board that the page has, if it is known

    @abstractmethod
    def check(self, settings: Mapping[str, Any]) -> None:
        """Raise ValueError for settings that the controls do not have."""

    @abstractmethod
    def ask(self, settings: Mapping[str, Any]) -> None:
        """Apply these settings. Raises ValueError for settings that no control can produce; `notice` has other
        problems."""

    @abstractmethod
    def answer(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Answer the browser, which asks for something, or whether its settings have arrived. Every message gets an
        answer, so the browser knows that Python is running."""

    @abstractmethod
    def board(self) -> bytes:
        """The data that the browser draws from."""

    @abstractmethod
    def judged(self) -> tuple[Any, ...]:
        """The results by which a task is judged."""

    def traits(self) -> dict[str, Any]:
        """The parts of the card besides the board; `settings` is also the state of its controls."""
        impossible = self.notice if self.is_stale else ""
        verdict = self.tasks.verdict(self.settings, impossible, *self.judged())
        found = {"settings": dict(self.settings), "notice": self.notice, "is_stale": self.is_stale}
        return {**found, "verdict": verdict}

    def reply(self, question: str) -> tuple[str, bytes]:
        """Answer what a widget in the browser asks its kernel.

        question   {"settings": state of the controls, "message": the request}
        ->         {"traits": what the widget must show, "answer": the answer to the message}, and the board, which is
                   empty if it has not changed
        """
        asked = json.loads(question)
        self.ask(asked["settings"])
        answer, board = self.answer(asked["message"]), self.board()
        changed = board if board != self._sent else b""
        self._sent = board
        return json.dumps({"traits": self.traits(), "answer": answer}), changed
