"""The picture of a score when no kernel runs: a PNG, or an animated PNG that loops, with a pause at both ends."""

from __future__ import annotations

import math

import numpy as np
from PIL import Image

from tplab.widgets.paper.apng import encode
from tplab.widgets.paper.frame import MARGIN, Warned, draw_edge, draw_facts, draw_head, draw_said
from tplab.widgets.paper.legend import draw_legend, legend_height
from tplab.widgets.paper.measured import Durations
from tplab.widgets.paper.pen import Pen, text_width
from tplab.widgets.paper.still import arranged
from tplab.widgets.score import ranks, table, words
from tplab.widgets.score.legends import of_timeline
from tplab.widgets.score.score import Score
from tplab.widgets.score.still_lanes import Lanes

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
        self.lanes = Lanes(score, MARGIN, top + body + 12, self.width - 2 * MARGIN)
        self.saying = self.lanes.top + self.lanes.height + 14
        self.height = self.saying + (40 if self._fits() else 57)
        self.base = Pen(self.width, self.height)  # the parts that do not change
        _head(self.base, score)
        self.warned.draw(self.base, _UNDER_HEAD)
        self.lanes.draw(self.base)

    def _fits(self) -> bool:
        """Whether every sentence fits on one line."""
        return max(map(len, self.sentences)) + 20 <= (self.width - 2 * MARGIN) / 6.8

    def draw(self, position: float) -> Image.Image:
        """The picture at one position."""
        pen, time = self.base.copy(), self.score.time(position)
        for scene, x, y in self.scenes:
            scene.paint(pen, time, x, y)
        self.lanes.draw_playhead(pen, time)
        step = min(math.ceil(position), self.score.num_steps)
        head = f"step {step} of {self.score.num_steps}" if step else "before the first step"
        sent = words.sent_text(self.score, time)
        draw_said(pen, self.width, self.saying + 8, head, self.sentences[step], sent)
        return pen.image()


def still(score: Score, position: float) -> bytes:
    """One picture, as PNG."""
    return encode([Picture(score).draw(position)], [0])


def timeline(score: Score, measured: Durations | None = None) -> bytes:
    """The timeline alone, as PNG."""
    width, measured = 760, measured or Durations()
    keys, room = of_timeline(score, measured), width - 2 * MARGIN
    legend = legend_height(keys, room, text_width)
    warned = Warned(words.warning(score.trace), width)
    top = _UNDER_HEAD + 9 + warned.height + legend
    lanes = Lanes(score, MARGIN, top, room, by_kind=True, measured=measured)
    pen = Pen(width, top + lanes.height + 44)
    _head(pen, score)
    warned.draw(pen, _UNDER_HEAD)
    draw_legend(pen, keys, MARGIN, _UNDER_HEAD + 8 + warned.height, room)
    lanes.draw(pen)
    draw_facts(pen, words.facts(score), top + lanes.height + 12)
    return encode([pen.image()], [0])


def _head(pen: Pen, score: Score) -> None:
    """The title, the mesh and the clock."""
    draw_edge(pen, pen.width, pen.height)
    draw_head(pen, pen.width, score.trace.title or "program", words.about(score), words.badge(score))


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
