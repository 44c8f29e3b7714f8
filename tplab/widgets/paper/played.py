"""A card of scenes under one playhead, drawn by static/tiles.js."""

from __future__ import annotations

from collections.abc import Sequence

import traitlets

from tplab.widgets.paper.card import Card, Step, script
from tplab.widgets.paper.legend import Key
from tplab.widgets.paper.scene import Scene, packed
from tplab.widgets.paper.wire import pack


class Played(Card):
    """`step` is the position of the playhead. The pictures repeat after `period` steps.

    says    for each step: its name, and what happens
    times   when the steps begin; `lanes` is drawn below the pictures, if there is a run
    """

    _esm = script("tiles")
    kept = ("step",)
    scene = traitlets.Bytes().tag(sync=True)
    score = traitlets.Bytes().tag(sync=True)
    step = Step().tag(sync=True)

    def __init__(
        self, scenes: Sequence[Scene], legend: Sequence[Key], title: str, about: str, says: Sequence[tuple[str, str]],
        period: int, step: float, note: str = "", times: Sequence[float] = (), lanes: bytes = b"",
    ):  # fmt: skip
        header, columns = packed(scenes, legend)
        header |= {"title": title, "about": about, "sentence": self.sentence, "note": note, "says": says}
        super().__init__(scene=pack({**header, "period": period, "times": times}, columns), score=lanes, step=step)
