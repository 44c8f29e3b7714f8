"""A workbench that is asked in JSON: what a page without a kernel has in place of the widget."""

from __future__ import annotations

import json

from tplab.widgets.schedule.workbench import Workbench


class Remote:
    """The pipeline lab of a page. `settings` is what its controls said when the page was made, as JSON."""

    def __init__(self, settings: str):
        self._bench = Workbench(json.loads(settings))
        self._sent = self._bench.runs

    def ask(self, question: str) -> tuple[str, bytes]:
        """Answer what a widget in the browser asks its kernel.

        question   {"settings": what the controls say, "message": what is asked for, "colour": the colours' meaning}
        ->         {"traits": what the widget is to show, "answer": the answer to the message}, and the board, which is
                   empty where it has not changed
        """
        asked = json.loads(question)
        self._bench.ask(asked["settings"])
        answer = self._bench.answer(asked["message"], asked["colour"])
        changed = self._bench.runs is not self._sent
        self._sent = self._bench.runs
        board = self._bench.board() if changed else b""
        return json.dumps({"traits": self._bench.traits(), "answer": answer}), board
