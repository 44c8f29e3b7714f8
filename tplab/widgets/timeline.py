"""`timeline(trace)`: where the time of every rank goes."""

from __future__ import annotations

import traitlets

from tplab.trace import Trace
from tplab.widgets import payload, still, words
from tplab.widgets.card import Card, script, style
from tplab.widgets.score import Score, score
from tplab.widgets.step import Step


class Timeline(Card):
    """The card that `timeline` makes. `step` is where the playhead is, as in `Animation`."""

    _esm = script("units", "wire", "score", "shell", "player", "bars", "canvas", "lanes", "timeline")
    _css = style()
    score = traitlets.Bytes().tag(sync=True)
    step = Step().tag(sync=True)

    def __init__(self, of: Score, step: float = 0):
        self.of, self.sentence = of, words.summary(of, "Timeline")
        super().__init__(score=payload.lanes(of), step=step)

    @property
    def num_steps(self) -> int:
        return self.of.num_steps

    def picture(self) -> bytes:
        return still.timeline(self.of)


def timeline(trace: Trace, step: float = 0) -> Timeline:
    """Show where the time of every rank goes: computing, messages beside it, and waiting; how busy each rank is; and
    the critical path, the chain of events that sets the makespan.

    step    where the playhead stands at first
    """
    return Timeline(score(trace), step)
