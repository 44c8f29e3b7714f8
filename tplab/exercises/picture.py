"""A picture that is also a sentence."""

from __future__ import annotations

import base64
import io
from typing import Any

from PIL import Image

from tplab.widgets.matrices import Panel, matrices
from tplab.widgets.paper.palette import PAPER
from tplab.widgets.paper.pen import Pen

__all__ = ["Panel", "Picture", "below", "matrices"]


class Picture:
    """A PNG: in a notebook the picture is shown, elsewhere the sentence."""

    def __init__(self, sentence: str, png: bytes):
        self.sentence, self.png = sentence, png

    def __repr__(self) -> str:
        return self.sentence

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        return {"text/plain": self.sentence, "image/png": base64.b64encode(self.png).decode()}


def below(text: str, png: bytes) -> bytes:
    """A PNG of this picture, below the lines of a text, whose first line is its title."""
    picture = Image.open(io.BytesIO(png)).convert("RGB")
    title, *lines = text.splitlines()
    pen = Pen(picture.width, 30 + 17 * len(lines) + 8)
    pen.text(18, 18, title, size=13, bold=True, anchor="lm")
    for index, line in enumerate(lines):
        pen.text(18, 40 + 17 * index, line, size=11.5, anchor="lm")
    sheet = Image.new("RGB", (picture.width, pen.height + picture.height), PAPER)
    sheet.paste(pen.image(), (0, 0))
    sheet.paste(picture, (0, pen.height))
    out = io.BytesIO()
    sheet.save(out, "PNG")
    return out.getvalue()
