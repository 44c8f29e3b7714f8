"""The text above a picture, drawn into it."""

from __future__ import annotations

import io
import re
import textwrap

from PIL import Image, ImageSequence

from tplab.widgets.paper.apng import encode
from tplab.widgets.paper.frame import MARGIN
from tplab.widgets.paper.palette import PAPER
from tplab.widgets.paper.pen import Pen


def paragraphs(text: str) -> list[str]:
    """The paragraphs of a text; a line that ends within a sentence is joined with the next."""
    return [line.replace("\n", " ") for line in re.split(r"(?<=[.?!:])\n", text)]


def below(text: str, png: bytes) -> bytes:
    """A PNG of this picture below a text, whose first paragraph is the title. An animated picture stays animated."""
    picture = Image.open(io.BytesIO(png))
    heading, *lines = paragraphs(text)
    room = picture.width - 2 * MARGIN
    title = textwrap.wrap(heading, int(room / 8.4))
    lines = [part for line in lines for part in textwrap.wrap(line, int(room / 6.6))]
    pen = Pen(picture.width, 21 + 17 * len(title + lines))
    for index, line in enumerate(title + lines):
        is_title = index < len(title)
        y = 18 + 17 * index + (0 if is_title else 5)
        pen.text(MARGIN, y, line, size=13 if is_title else 11.5, bold=is_title, anchor="lm")
    top, sheets, milliseconds = pen.image(), [], []
    for frame in ImageSequence.Iterator(picture):
        sheet = Image.new("RGB", (picture.width, top.height + picture.height), PAPER)
        sheet.paste(top, (0, 0))
        sheet.paste(frame.convert("RGB"), (0, top.height))
        sheets.append(sheet)
        milliseconds.append(int(picture.info.get("duration", 0)))
    return encode(sheets, milliseconds, plays=int(picture.info.get("loop", 0)))
