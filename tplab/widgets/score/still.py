"""The picture of a score when no kernel runs: a PNG, or an animated PNG that loops, with a pause at both ends."""

from __future__ import annotations

import textwrap

import numpy as np
from PIL import Image

from tplab.units import plain, range_text, time_text
from tplab.widgets.paper.action import draw_action
from tplab.widgets.paper.apng import encode
from tplab.widgets.paper.measured import Durations, draw_diamond
from tplab.widgets.paper.palette import DIM, GRADIENT, HATCH, KINDS, LINE, OPS, PAPER, SOFT, WORK, mix
from tplab.widgets.paper.pen import Pen, fitted, text_width
from tplab.widgets.paper.scene import Scene
from tplab.widgets.score import ranks, table, words
from tplab.widgets.score.frame import Frame, frame
from tplab.widgets.score.score import Score
from tplab.widgets.score.still_lanes import Lanes
from tplab.widgets.score.still_warning import Warned

MAX_BYTES = 300_000
SECONDS = 4.5  # from one pause to the next
PAUSE = 1800  # milliseconds
MARGIN = 18
_WARNED = 43  # the top of the warnings, under the head
_CARRIES = {"activations": KINDS["F"], "gradients": GRADIENT, "rest": WORK}
_ACTIONS = [
    ("F", "F forward"),
    ("B", "B backward"),
    ("activations", "activations sent"),
    ("gradients", "gradients sent"),
    ("rest", "other work and messages"),
]
"""The legend of a pipeline's timeline: kind -> what it says."""
_KEY = 24  # from where a legend's colour begins to its text


class Picture:
    """Draws a score at any position."""

    def __init__(self, score: Score):
        self.score, self.sentences = score, words.sentences(score)
        scenes = [scene for scene in (ranks.draw(score), table.draw(score)) if scene]
        beside = sum(scene.width for scene in scenes) + 30 * (len(scenes) - 1)
        is_beside = beside <= 930
        self.width = max((beside if is_beside else max(scene.width for scene in scenes)) + 2 * MARGIN, 640)
        self.warned = Warned(score.trace, self.width, MARGIN)
        top = y = 54.0 + self.warned.height
        heights = [scene.height for scene in scenes]
        body = max(heights) if is_beside else sum(heights) + 16 * (len(scenes) - 1)
        free = (self.width - beside + 30 * (len(scenes) - 1)) / (len(scenes) + 1)  # left of, between and right of them
        self.scenes: list[tuple[Scene, float, float]] = []
        x = free
        for scene in scenes:
            if is_beside:
                self.scenes.append((scene, x, top + (body - scene.height) / 2))
            else:
                self.scenes.append((scene, (self.width - scene.width) / 2, y))
            x, y = x + scene.width + free, y + scene.height + 16
        self.lanes = Lanes(score, MARGIN, top + body + 12, self.width - 2 * MARGIN)
        self.saying = self.lanes.top + self.lanes.height + 14
        self.height = self.saying + (40 if self._fits() else 57)
        self.base = Pen(self.width, self.height)  # the parts that do not change
        _head(self.base, score)
        self.warned.draw(self.base, _WARNED)
        self.lanes.draw(self.base)

    def _fits(self) -> bool:
        """Whether every sentence fits on one line."""
        return max(map(len, self.sentences)) + 20 <= (self.width - 2 * MARGIN) / 6.8

    def draw(self, position: float) -> Image.Image:
        """The picture at one position."""
        pen, now = self.base.copy(), frame(self.score, position)
        for scene, x, y in self.scenes:
            scene.paint(pen, now.time, x, y)
        self.lanes.draw_playhead(pen, now.time)
        self._say(pen, now)
        return pen.image()

    def _say(self, pen: Pen, now: Frame) -> None:
        head = f"step {now.round} of {self.score.num_steps}" if now.round else "before the first step"
        length = int((self.width - 2 * MARGIN) / 6.8)
        lines = textwrap.wrap(f"{head}  —  {self.sentences[now.round]}", length, max_lines=2, placeholder=" …")
        y = self.saying + 8
        width = pen.text(MARGIN, y, head, size=11.5, bold=True, anchor="lm")
        pen.text(MARGIN + width, y, lines[0][len(head) :], size=11.5, anchor="lm")
        for line in lines[1:]:
            y += 17
            pen.text(MARGIN, y, line, size=11.5, anchor="lm")
        pen.text(MARGIN, y + 18, words.sent_text(self.score, now.sent), size=11, fill=DIM, anchor="lm")


def still(score: Score, position: float) -> bytes:
    """One picture, as PNG."""
    return encode([Picture(score).draw(position)], [0])


def timeline(score: Score, measured: Durations | None = None) -> bytes:
    """The timeline alone, as PNG."""
    width = 760
    warned = Warned(score.trace, width, MARGIN)
    top = 52 + warned.height
    lanes = Lanes(score, MARGIN, top, width - 2 * MARGIN, by_kind=True, measured=measured)
    legend = _ACTIONS if score.is_pipeline else score.work_legend + score.talk_legend
    legend = [*legend, ("idle", "idle")] if legend else []
    if measured and measured.rows:
        legend.append(("measured", fitted(f"measured by {measured.by}", 11, width - 2 * MARGIN - _KEY)))
    lines = _lines_of(legend, width - 2 * MARGIN) if legend else []
    pen = Pen(width, top + lanes.height + 38 + (4 + 18 * len(lines) if lines else 0))
    _head(pen, score)
    warned.draw(pen, _WARNED)
    lanes.draw(pen)
    span = score.trace.makespan
    busy = score.trace.busy() / span if span else score.trace.busy()
    facts = f"makespan {time_text(span, score.trace.unit)}" + " steps" * (score.trace.unit == "steps")
    if score.computes:
        facts += f" · each rank is busy {range_text((100 * busy).round().tolist(), plain)}% of it"
    pen.text(MARGIN, top + lanes.height + 18, facts, size=11.5, anchor="lm")
    for y, line in enumerate(lines):
        _draw_legend(pen, score, line, top + lanes.height + 40 + 18 * y)
    return encode([pen.image()], [0])


def _lines_of(legend: list[tuple[str, str]], width: float) -> list[list[tuple[str, str]]]:
    """The legend's entries, in as many lines as they need."""
    lines: list[list[tuple[str, str]]] = [[]]
    x = 0.0
    for kind, text in legend:
        if lines[-1] and x + _KEY + text_width(text, 11) > width:
            lines.append([])
            x = 0.0
        lines[-1].append((kind, text))
        x += _KEY + text_width(text, 11) + 16
    return lines


def _draw_legend(pen: Pen, score: Score, line: list[tuple[str, str]], y: float) -> None:
    x = float(MARGIN)
    for kind, text in line:
        if kind == "idle":
            pen.box(x, y - 5, 18, 11, fill=SOFT)
            pen.hatch(x, y - 5, 18, 11, HATCH)
        elif kind == "measured":
            draw_diamond(pen, x + 9, y)
        elif kind in ("F", "B"):
            draw_action(pen, "FB".index(kind), "", x, x + 18, y - 5, 11)
        elif kind in _CARRIES:
            pen.box(x, y - 5, 18, 11, fill=mix(_CARRIES[kind], 0.24), edge=_CARRIES[kind], radius=2)
        else:
            share = 0.24 if kind in score.talk_kinds else 0.55
            pen.box(x, y - 5, 18, 11, fill=mix(OPS[kind], share), edge=OPS[kind], radius=2)
        x += _KEY + pen.text(x + _KEY, y, text, size=11, fill=DIM, anchor="lm") + 16


def _head(pen: Pen, score: Score) -> None:
    """The card's edge, and its header: what ran, on what, and with which clock."""
    pen.box(0.5, 0.5, pen.width - 1, pen.height - 1, edge=LINE, radius=12)
    x = MARGIN + pen.text(MARGIN, 26, score.trace.title or "program", size=14, bold=True, anchor="lm") + 10
    note = words.badge(score)
    width = text_width(note, 10.5) + 18
    pen.text(
        x, 26.5, fitted(words.about(score), 11, pen.width - MARGIN - width - 8 - x), size=11, fill=DIM, anchor="lm"
    )
    pen.box(pen.width - MARGIN - width, 16, width, 21, fill=PAPER, edge=LINE, radius=10)
    pen.text(pen.width - MARGIN - width / 2, 26.5, note, size=10.5, fill=DIM)


def story(score: Score) -> float:
    """The position that says the most if only one is shown: in the middle, with something on its way."""
    return min(score.num_steps // 2 + 0.5, float(score.num_steps))


def moving(score: Score, frames: int = 30) -> bytes:
    """The whole score as an animated PNG whose first frame is that of `story`; only that frame if there are too many
    ranks or steps."""
    picture, steps = Picture(score), score.num_steps
    if steps <= 4 * frames and score.trace.mesh.size <= 16:
        most = max(1, min(8, (frames - 2) // steps))
        for each in range(most, 0, -1):  # as smooth as fits
            positions = np.linspace(0, steps, min(steps * each, 2 * frames) + 1).tolist()
            drawn = [picture.draw(position) for position in (story(score), *positions)]
            time = round(1000 * SECONDS / len(drawn))
            data = encode(drawn, [PAUSE, *[time] * (len(positions) - 1), PAUSE], plays=0)
            if len(data) <= MAX_BYTES:
                return data
    return encode([picture.draw(story(score))], [0])
