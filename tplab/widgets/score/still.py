"""The picture of a score when no kernel runs: a PNG, or an animated PNG that loops, with a pause at both ends."""

from __future__ import annotations

import math

import numpy as np
from PIL import Image

from tplab.widgets.paper.apng import encode
from tplab.widgets.paper.frame import MARGIN, Warned, draw_edge, draw_head, draw_playhead, draw_said
from tplab.widgets.paper.measured import Durations
from tplab.widgets.paper.pen import Pen
from tplab.widgets.paper.still import arranged, run_picture
from tplab.widgets.score import lanes, ranks, table, words
from tplab.widgets.score.payload import of_timeline
from tplab.widgets.score.score import Score

MAX_BYTES = 300_000
SECONDS = 4.5  # from one pause to the next
PAUSE = 1800  # milliseconds
_UNDER_HEAD = 43


class Picture:
    """Draws a score at any position."""

    def __init__(self, score: Score):
        self.score, self.sentences = score, words.sentences(score)
        scenes = [scene for scene in (ranks.draw(score), table.draw(score)) if scene]
        places, inside, body = arranged(scenes, 30, 640 - 2 * MARGIN)
        self.width = inside + 2 * MARGIN
        self.warned = Warned(words.warning(score.trace), self.width)
        top = 54.0 + self.warned.height
        self.scenes = [(scene, MARGIN + x, top + y) for scene, x, y in places]
        self.lanes, self.top = lanes.draw(score, self.width - 2 * MARGIN), top + body + 12
        self.saying = self.top + self.lanes.height + 14
        self.height = self.saying + (40 if self._fits() else 57)
        self.base = Pen(self.width, self.height)  # the parts that do not change
        draw_edge(self.base, self.width, self.height)
        draw_head(self.base, self.width, *_heading(score))
        self.warned.draw(self.base, _UNDER_HEAD)
        self.lanes.paint(self.base, 0, MARGIN, self.top)

    def _fits(self) -> bool:
        """Whether every sentence fits on one line."""
        return max(map(len, self.sentences)) + 20 <= (self.width - 2 * MARGIN) / 6.8

    def draw(self, position: float) -> Image.Image:
        """The picture at one position."""
        pen, time = self.base.copy(), self.score.time(position)
        for scene, x, y in self.scenes:
            scene.paint(pen, time, x, y)
        draw_playhead(pen, MARGIN + self.lanes.across(time), self.top, self.top + self.lanes.axes[0])
        step = min(math.ceil(position), self.score.num_steps)
        head = f"step {step} of {self.score.num_steps}" if step else "before the first step"
        sent = words.sent_text(self.score, time)
        draw_said(pen, self.width, self.saying + 8, head, self.sentences[step], sent)
        return pen.image()


def still(score: Score, position: float) -> bytes:
    """One picture, as PNG."""
    return encode([Picture(score).draw(position)], [0])


def timeline(score: Score, measured: Durations) -> bytes:
    """The timeline alone, as PNG."""
    drawn, keys = lanes.draw(score, 724, True, measured), of_timeline(score, measured)
    warning = words.warning(score.trace)
    return run_picture(drawn, *_heading(score), warning, keys, words.facts(score))


def _heading(score: Score) -> tuple[str, str, str]:
    """The title, the mesh and the clock."""
    return score.trace.title or "program", words.about(score), words.clock(score.trace)


def story(score: Score) -> float:
    """The most informative position if only one is shown: in the middle, with something in transit."""
    return min(score.num_steps // 2 + 0.5, float(score.num_steps))


def moving(score: Score, frames: int = 30) -> bytes:
    """The whole score as an animated PNG whose first frame is that of `story`; only that frame if there are too many
    ranks or steps."""
    picture, steps = Picture(score), score.num_steps
    if steps <= 4 * frames and score.trace.mesh.size <= 16:
        most = max(1, min(8, (frames - 2) // steps))
        for each in range(most, 0, -1):  # as many as fit
            positions = np.linspace(0, steps, min(steps * each, 2 * frames) + 1).tolist()
            drawn = [picture.draw(position) for position in (story(score), *positions)]
            time = round(1000 * SECONDS / len(drawn))
            data = encode(drawn, [PAUSE, *[time] * (len(positions) - 1), PAUSE], plays=0)
            if len(data) <= MAX_BYTES:
                return data
    return encode([picture.draw(story(score))], [0])
