"""A trace's warnings under the head of its still picture."""

from __future__ import annotations

import textwrap

from tplab.trace.trace import Trace
from tplab.widgets.paper.palette import HUES
from tplab.widgets.paper.pen import Pen
from tplab.widgets.score import words

_LINE = 16


class Warned:
    """The warnings of `trace`, in lines for a picture `width` wide. `height` is what they take; 0 without any."""

    def __init__(self, trace: Trace, width: float, margin: float):
        self._lines = textwrap.wrap(words.warning(trace), int((width - 2 * margin - 10) / 6.2))
        self._margin = margin
        self.height = _LINE * len(self._lines) + 8 if self._lines else 0

    def draw(self, pen: Pen, top: float) -> None:
        if self._lines:
            pen.box(self._margin, top, 3, _LINE * len(self._lines), fill=HUES[1])
        for index, line in enumerate(self._lines):
            pen.text(self._margin + 10, top + _LINE * (index + 0.5), line, size=11.5, anchor="lm")
