"""A workbench that answers requests in JSON: a page without a kernel uses it instead of the widget."""

from __future__ import annotations

import json

from tplab.widgets.layouts.board import Board
from tplab.widgets.layouts.workbench import Workbench


class Remote:
    """The layout lab of a page. `settings` is the state of its controls when the page was made, as JSON."""

    def __init__(self, settings: str):
        self._bench = Workbench(json.loads(settings))
        self._board, self._sent = Board(self._bench), b""

    def ask(self, question: str) -> tuple[str, bytes]:
        """Answer what a widget in the browser asks its kernel.

        question   {"settings": state of the controls, "message": the request}
        ->         {"traits": what the widget must show, "answer": the answer to the message}, and the board, which is
                   empty if it has not changed
        """
        asked = json.loads(question)
        self._bench.ask(asked["settings"])
        answer, board = self._bench.answer(asked["message"]), self._board.packed()
        changed = board if board != self._sent else b""
        self._sent = board
        return json.dumps({"traits": self._bench.traits(), "answer": answer}), changed
