"""What is said above a picture, in the picture."""

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
    """The lines of a text; one that ends inside a sentence goes on in the next."""
    return [line.replace("\n", " ") for line in re.split(r"(?<=[.?!:])\n", text)]


def below(text: str, png: bytes) -> bytes:
    """A PNG of this picture below a text, whose first line is the title. An animated picture stays animated."""
    picture = Image.open(io.BytesIO(png))
    heading, *lines = paragraphs(text)
    room = picture.width - 2 * MARGIN
    title, *more = textwrap.wrap(heading, int(room / 8.4))
    lines = more + [part for line in lines for part in textwrap.wrap(line, int(room / 6.6))]
    pen = Pen(picture.width, 30 + 17 * len(lines) + 8)
    pen.text(MARGIN, 18, title, size=13, bold=True, anchor="lm")
    for index, line in enumerate(lines):
        pen.text(MARGIN, 40 + 17 * index, line, size=11.5, anchor="lm")
    top, sheets, milliseconds = pen.image(), [], []
    for frame in ImageSequence.Iterator(picture):
        sheet = Image.new("RGB", (picture.width, top.height + picture.height), PAPER)
        sheet.paste(top, (0, 0))
        sheet.paste(frame.convert("RGB"), (0, top.height))
        sheets.append(sheet)
        milliseconds.append(int(picture.info.get("duration", 0)))
    return encode(sheets, milliseconds, plays=int(picture.info.get("loop", 0)))
