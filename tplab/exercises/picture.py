"""A picture that is also a sentence."""

from __future__ import annotations

import base64
import io
import textwrap
from typing import Any

from PIL import Image, ImageSequence

from tplab.widgets.matrices import Panel, matrices
from tplab.widgets.paper.apng import encode
from tplab.widgets.paper.palette import PAPER
from tplab.widgets.paper.pen import Pen

__all__ = ["Panel", "Picture", "below", "matrices"]

MARGIN = 18


class Picture:
    """A PNG with a sentence: a notebook shows the picture, and everything else the sentence."""

    def __init__(self, sentence: str, png: bytes):
        self.sentence, self.png = sentence, png

    def __repr__(self) -> str:
        return self.sentence

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        return {"text/plain": self.sentence, "image/png": base64.b64encode(self.png).decode()}


def below(text: str, png: bytes) -> bytes:
    """A PNG of this picture below a text, whose first line is the title. An animated picture stays animated."""
    picture = Image.open(io.BytesIO(png))
    heading, *lines = text.splitlines()
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
