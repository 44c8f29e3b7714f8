"""The frame of a still picture: a card with its heading, legend, pictures and sentence, and the text above it."""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Iterable, Sequence

from PIL import Image, ImageSequence

from tplab.widgets.paper.apng import encode
from tplab.widgets.paper.frame import MARGIN as TEXT_MARGIN
from tplab.widgets.paper.frame import (
    Warned,
    draw_edge,
    draw_facts,
    draw_head,
    draw_playhead,
    draw_said,
    lines_said,
)
from tplab.widgets.paper.legend import SIZE, Key, draw_legend, legend_height
from tplab.widgets.paper.palette import DIM, PAPER
from tplab.widgets.paper.pen import Pen, text_width
from tplab.widgets.paper.scene import Scene

MARGIN, LINE_HEIGHT, WIDEST = 20, 17, 930


def arranged(
    scenes: Sequence[Scene], gap: float, least: float = 0
) -> tuple[list[tuple[Scene, float, float]], float, float]:
    """(scenes with their places, width, height): side by side, or below each other if they are too wide for that,
    centred in a width of at least `least`."""
    widths, heights = [scene.width for scene in scenes], [scene.height for scene in scenes]
    beside, places = sum(widths) + gap * (len(scenes) - 1), []
    across = beside <= WIDEST
    width, height = (beside, max(heights)) if across else (max(widths), sum(heights) + gap * (len(scenes) - 1))
    width = max(width, least)
    x, y = (width - beside) / 2, 0.0
    for scene in scenes:
        places.append((scene, x, (height - scene.height) / 2) if across else (scene, (width - scene.width) / 2, y))
        x, y = x + scene.width + gap, y + scene.height + gap
    return places, width, height


def still(
    title: str,
    sentence: str,
    scenes: Sequence[Scene],
    position: float = 0,
    *,
    about: str = "",
    badge: str = "",
    legend: Sequence[Key] = (),
    note: str = "",
    gap: float = 15,
) -> bytes:
    """The scenes at a position of the playhead. `note` is at the end of the legend's line."""
    least = max(40 + text_width(title, 14, bold=True) + text_width(about + badge, 11), 520)
    places, inside, body = arranged(scenes, gap, least)
    top = 48 + legend_height(legend, inside - text_width(note, SIZE), text_width)
    lines, bottom = textwrap.wrap(sentence, int(inside / 6.52)), top + body
    pen = Pen(inside + 2 * MARGIN, bottom + LINE_HEIGHT * len(lines) + 18)
    draw_edge(pen, pen.width, pen.height)
    draw_head(pen, pen.width, title, about, badge, MARGIN)
    draw_legend(pen, legend, MARGIN, 50, inside - text_width(note, SIZE))
    pen.text(MARGIN + inside, 50, note, size=SIZE, fill=DIM, anchor="rm")
    for scene, x, y in places:
        scene.paint(pen, position, MARGIN + x, top + y)
    for number, line in enumerate(lines):
        pen.text(MARGIN, bottom + 16 + LINE_HEIGHT * number, line, size=11.5, anchor="lm")
    return encode([pen.image()], [0])


def run_picture(
    scene: Scene, title: str, about: str, badge: str, warning: str, legend: Sequence[Key],
    facts: Iterable[tuple[str, str, str]], said: tuple[str, str, str] = ("", "", ""), time: float = 0,
) -> bytes:  # fmt: skip
    """Lanes over time with their figures; if something is `said` of a time, with the playhead there."""
    width, room = scene.width + 2 * TEXT_MARGIN, scene.width
    warned, lines = Warned(warning, width), lines_said(width, *said[:2]) if said[0] else []
    top = 52 + warned.height + legend_height(legend, room, text_width)
    bottom = top + scene.height
    pen = Pen(width, bottom + 44 + (17 * len(lines) + 28 if lines else 0))
    draw_edge(pen, pen.width, pen.height)
    draw_head(pen, width, title, about, badge)
    warned.draw(pen, 43)
    draw_legend(pen, legend, TEXT_MARGIN, 51 + warned.height, room)
    scene.paint(pen, 0, TEXT_MARGIN, top)
    draw_facts(pen, facts, bottom + 12)
    if lines:
        draw_playhead(pen, TEXT_MARGIN + scene.across(time), top, top + scene.axes[-1])
        draw_said(pen, width, bottom + 54, *said)
    return encode([pen.image()], [0])


def paragraphs(text: str) -> list[str]:
    """The paragraphs of a text; a line that ends within a sentence is joined with the next."""
    return [line.replace("\n", " ") for line in re.split(r"(?<=[.?!:])\n", text)]


def below(text: str, png: bytes) -> bytes:
    """A PNG of this picture below a text, whose first paragraph is the title. An animated picture stays animated."""
    picture = Image.open(io.BytesIO(png))
    heading, *lines = paragraphs(text)
    room = picture.width - 2 * TEXT_MARGIN
    title = textwrap.wrap(heading, int(room / 8.4))
    lines = [part for line in lines for part in textwrap.wrap(line, int(room / 6.6))]
    pen = Pen(picture.width, 21 + 17 * len(title + lines))
    for index, line in enumerate(title + lines):
        is_title = index < len(title)
        y = 18 + 17 * index + (0 if is_title else 5)
        pen.text(TEXT_MARGIN, y, line, size=13 if is_title else 11.5, bold=is_title, anchor="lm")
    top, sheets, milliseconds = pen.image(), [], []
    for frame in ImageSequence.Iterator(picture):
        sheet = Image.new("RGB", (picture.width, top.height + picture.height), PAPER)
        sheet.paste(top, (0, 0))
        sheet.paste(frame.convert("RGB"), (0, top.height))
        sheets.append(sheet)
        milliseconds.append(int(picture.info.get("duration", 0)))
    return encode(sheets, milliseconds, plays=int(picture.info.get("loop", 0)))
