"""`animate(trace)`: shows the ranks, the pieces sent between them, and what each rank holds at each time."""

from __future__ import annotations

import traitlets

from tplab.trace.trace import Trace
from tplab.widgets.paper.card import Card, Step, script
from tplab.widgets.score import payload, still, words
from tplab.widgets.score.score import Score, score


class Animation(Card):
    """The card that `animate` makes. `step` is where the playhead is, in steps: 1.5 is half-way through the second.

    The playhead moves in the browser. Python is notified when a step is over and when it rests, and can set it.
    """

    _esm = script("animate")
    kept = ("step",)
    score = traitlets.Bytes().tag(sync=True)
    step = Step().tag(sync=True)

    def __init__(self, of: Score, step: float = 0):
        self.of, self.num_steps, self.sentence = of, of.num_steps, words.summary(of)
        super().__init__(score=payload.picture(of), step=step)

    def picture(self) -> bytes:
        return still.moving(self.of)


def animate(trace: Trace, step: float = 0) -> Animation:
    """Show a trace: the ranks on their mesh, the messages between them, and what each rank holds at each time.

    step    where the playhead starts: 0 is before the first round of communication, 1 after it
    """
    return Animation(score(trace), step)
