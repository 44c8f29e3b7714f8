"""The card of a lab: the traits that its controls, its tasks and its notice need, and what it says to its browser."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import traitlets

from tplab.widgets.paper.card import Card, in_turn
from tplab.widgets.paper.task import Bench


class Lab(Card):
    """A card whose `Bench` does all the computing.

    settings   the state of the controls; setting it from Python moves them
    notice     a problem with them
    is_stale   whether they are impossible, so that what was possible last is still shown
    verdict    on the task in the settings: its name, whether it is solved, and why, in words; {} without a task
    """

    kept = ("settings",)
    settings = traitlets.Dict().tag(sync=True)
    choices = traitlets.Dict().tag(sync=True)
    board = traitlets.Bytes().tag(sync=True)
    notice = traitlets.Unicode("").tag(sync=True)
    is_stale = traitlets.Bool(False).tag(sync=True)
    verdict = traitlets.Dict().tag(sync=True)
    _bench: Bench

    def listen(self) -> None:
        """Show the state of the bench, and from now on answer the browser."""
        self._take()
        self.observe(self._on_settings, "settings")
        self.on_msg(self._on_message)

    @traitlets.validate("settings")
    def _check_settings(self, proposal: Any) -> dict[str, Any]:
        settings = {**self._bench.settings, **proposal["value"]}
        with as_of_traits():
            self._bench.check(settings)
        return settings

    @in_turn
    def _on_settings(self, change: Any) -> None:
        self._bench.ask(change["new"])
        self._take()

    @in_turn
    def _on_message(self, _: Any, content: Any, buffers: Any) -> None:
        answer = self._bench.answer(content)
        self._take()
        self.send(answer)

    def _take(self) -> None:
        """Show the state of the bench."""
        vars(self).pop("_picture", None)
        with self.hold_sync():
            self.board = self._bench.board()
            for name, value in self._bench.traits().items():
                setattr(self, name, value)


@contextmanager
def as_of_traits() -> Iterator[None]:
    """Raise TraitError, as ipywidgets does, for settings that no control can produce."""
    try:
        yield
    except ValueError as error:
        raise traitlets.TraitError(str(error)) from None
