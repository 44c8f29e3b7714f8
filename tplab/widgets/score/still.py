"""The picture of a score when no kernel runs: a PNG, or an animated PNG that loops, with a pause at both ends."""

from __future__ import annotations

import math

import numpy as np
from PIL import Image

from tplab.widgets.paper.action import draw_action
from tplab.widgets.paper.apng import encode
from tplab.widgets.paper.frame import (
    MARGIN,
    Warned,
    draw_axis,
    draw_edge,
    draw_facts,
    draw_head,
    draw_playhead,
    draw_said,
)
from tplab.widgets.paper.legend import draw_legend, legend_height
from tplab.widgets.paper.letters import fitted
from tplab.widgets.paper.measured import Durations, draw_diamond
from tplab.widgets.paper.palette import DIM, HATCH, INK, PAPER, SOFT, mix
from tplab.widgets.paper.pen import Pen, text_width
from tplab.widgets.paper.still import arranged
from tplab.widgets.score import pipeline, ranks, table, words
from tplab.widgets.score.payload import of_timeline
from tplab.widgets.score.score import COMPUTE, SEND, WAIT, Score

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
    draw_head(pen, pen.width, score.trace.title or "program", words.about(score), words.clock(score.trace))


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


_MEASURED = 17.0  # the height of what was measured


class Lanes:
    """The timeline under the picture: one lane per rank.

    by_kind    colour collectives by their effect; otherwise each bar has the colour of what it carries
    measured   durations to draw below the lanes
    """

    def __init__(
        self,
        score: Score,
        left: float,
        top: float,
        width: float,
        by_kind: bool = False,
        measured: Durations | None = None,
    ):
        self.measured = measured = measured or Durations()
        self.score, self.top, self.by_kind = score, top, by_kind
        ranks = score.trace.mesh.size
        self.lane = 19.0 if ranks <= 4 else 15.0 if ranks <= 16 else max(2.5, 160 / ranks)
        if score.computes and ranks <= 16:
            self.lane *= 1.6
        self.left, self.width = left + 56, width - 56
        self.bottom = top + ranks * self.lane + _MEASURED * len(measured.rows)
        self.height = self.bottom - top + 20
        self.start, self.last = float(score.times[0]), float(score.times[-1])
        self.end = max(self.last, self.start + measured.longest)

    def x(self, time: float) -> float:
        span = self.end - self.start
        return self.left + (self.width * (time - self.start) / span if span else 0)

    def draw(self, pen: Pen) -> None:
        score, bars = self.score, self.score.bars
        gap = 2 if self.lane > 8 else 0.5
        work = (self.lane - gap) / 2 if score.computes else 0.0
        talk = self.lane - gap - work
        ranks, width = score.trace.mesh.size, self.x(self.last) - self.left if self.end > self.last else self.width
        for rank in range(ranks):
            y = self.top + rank * self.lane
            pen.box(self.left, y, width, self.lane - gap, fill=SOFT)
            if score.computes and self.lane > 8:
                pen.hatch(self.left, y, width, work, HATCH)
            if ranks <= 16 or rank % 8 == 0:
                pen.text(self.left - 10, y + self.lane / 2 - 1, f"rank {rank}", size=10.5, fill=DIM, anchor="rm")
        colours = score.colours(self.by_kind)
        for row in np.argsort(bars["kind"], kind="stable").tolist():
            kind, item, rank = int(bars["kind"][row]), int(bars["item"][row]), int(bars["rank"][row])
            x, right = self.x(float(bars["start"][row])), self.x(float(bars["end"][row]))
            if kind == WAIT or right - x < 0.2:
                continue
            y = self.top + rank * self.lane + (0 if kind == COMPUTE else work)
            height = work if kind == COMPUTE else talk
            if score.actions[row] >= 0:
                names = score.ops[bars["op"][row]].split("+")  # a pair: one above the other
                for place, name in enumerate(names):
                    size = height / len(names)
                    draw_action(pen, pipeline.kind_of(name), name, x, right, y + place * size, size)
                continue
            colour = colours[row]
            fill = mix(colour, 0.55 if kind == COMPUTE else 0.24)
            edge = colour if height > 6 else None
            pen.box(x + 0.5, y, max(right - x - 1, 0.7), height, fill=fill, edge=edge, radius=2)
            text = score.op_names[bars["op"][row]]
            if kind == SEND and item >= 0:
                text = f"send {score.items[item].name}" if right - x > 50 else score.items[item].name
            if height > 8 and text_width(text, 9.5) < right - x - 8:
                pen.text(x + 6, y + height / 2, text, size=9.5, anchor="lm", fill=INK)
        for place, (name, seconds, text) in enumerate(self.measured.rows):
            y = self.bottom + _MEASURED * (place - len(self.measured.rows)) + 7
            x = self.x(self.start + seconds)
            pen.text(self.left - 10, y, fitted(name, 10.5, 46, text_width), size=10.5, fill=DIM, anchor="rm")
            pen.line([(self.left, y), (x, y)], INK, 1.4)
            draw_diamond(pen, x, y)
            room = text_width(text, 10.5) + 8
            if x + 10 + room > self.left + self.width:
                pen.box(x - 8 - room, y - 7, room + 2, 14, fill=PAPER)
                pen.text(x - 12, y, text, size=10.5, anchor="rm")
            else:
                pen.text(x + 10, y, text, size=10.5, anchor="lm")
        right, unit = self.left + self.width - 12, score.trace.unit
        draw_axis(pen, lambda time: self.x(self.start + time), self.end - self.start, unit, 6, right, self.bottom + 9)

    def draw_playhead(self, pen: Pen, time: float) -> None:
        draw_playhead(pen, self.x(time), self.top - 4, self.top + self.score.trace.mesh.size * self.lane)
