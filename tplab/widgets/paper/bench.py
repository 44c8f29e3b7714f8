"""What a lab computes without its widget. A card in a kernel calls it; a page without a kernel asks it in JSON."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from tplab.widgets.paper.task import Tasks


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
    _sent = b""  # the board that the page has

    @abstractmethod
    def check(self, settings: Mapping[str, Any]) -> None:
        """Raise ValueError for settings that the controls do not have."""

    @abstractmethod
    def ask(self, settings: Mapping[str, Any]) -> None:
        """Apply these settings. Raises ValueError for settings that no control can produce; `notice` has other
        problems."""

    @abstractmethod
    def answer(self, message: Mapping[str, Any], colour: str = "kind") -> dict[str, Any]:
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

        question   {"settings": state of the controls, "message": the request, "colour": what the colours mean}
        ->         {"traits": what the widget must show, "answer": the answer to the message}, and the board, which is
                   empty if it has not changed
        """
        asked = json.loads(question)
        self.ask(asked["settings"])
        answer, board = self.answer(asked["message"], asked.get("colour", "kind")), self.board()
        changed = board if board != self._sent else b""
        self._sent = board
        return json.dumps({"traits": self.traits(), "answer": answer}), changed
