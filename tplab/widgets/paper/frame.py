"""The card around a still picture, on any sheet: its heading, its warnings and figures, its playhead and time
axis; and where a playhead rests."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable

import numpy as np

from tplab.units import ticks, time_text
from tplab.widgets.paper.action import Sheet
from tplab.widgets.paper.letters import fitted
from tplab.widgets.paper.palette import ACCENT, DIM, HUES, LINE, PAPER

MARGIN = 18
MAX_STEPS = 400  # of a playhead
_LINE = 16


def draw_edge(sheet: Sheet, width: float, height: float) -> None:
    sheet.box(0.5, 0.5, width - 1, height - 1, edge=LINE, radius=12)


def draw_head(sheet: Sheet, width: float, title: str, about: str, badge: str, margin: float = MARGIN) -> None:
    """The title and the description, and on the right the clock."""
    x, right = margin + sheet.text(margin, 26, title, size=14, bold=True, anchor="lm") + 10, width - margin
    room = sheet.width_of(badge, 10.5) + 18 if badge else 0
    sheet.text(x, 26.5, fitted(about, 11, right - room - 8 - x, sheet.width_of), size=11, fill=DIM, anchor="lm")
    if badge:
        sheet.box(right - room, 16, room, 21, fill=PAPER, edge=LINE, radius=10)
        sheet.text(right - room / 2, 26.5, badge, size=10.5, fill=DIM)


def draw_facts(sheet: Sheet, facts: Iterable[tuple[str, str, str]], y: float) -> None:
    """Figures side by side: the name of each, the figure, and a note."""
    x = float(MARGIN)
    for name, figure, note in facts:
        sheet.text(x, y, name, size=10, fill=DIM, anchor="lm")
        wide = sheet.text(x, y + 17, figure, size=13, bold=True, anchor="lm")
        if note:
            wide += 6 + sheet.text(x + wide + 6, y + 17.5, note, size=10, fill=DIM, anchor="lm")
        x += max(sheet.width_of(name, 10), wide) + 26


def draw_axis(
    sheet: Sheet, at: Callable[[float], float], end: float, unit: str, most: int, right: float, y: float
) -> None:
    """About `most` times from 0 to `end`, each at x = at(time)."""
    for time in ticks(0.0, end, most, unit):
        sheet.text(min(at(time), right), y, time_text(time, unit, end), size=10, fill=DIM)


def draw_playhead(sheet: Sheet, x: float, top: float, bottom: float) -> None:
    sheet.line([(x, top), (x, bottom)], ACCENT, 1.6)
    sheet.box(x - 3.2, top - 4.2, 6.4, 6.4, fill=ACCENT, radius=3.2)


def rests(ends: np.ndarray, last: float = 0.0, begin: float = 0.0) -> np.ndarray:
    """The times at which the playhead rests: `begin`, every distinct moment at which an action ends, and `last`, if it
    is later; or, if those are too many, evenly spaced times."""
    ends = np.sort(np.append(ends, last))
    last = float(ends[-1])
    near = 1e-9 * (last - begin)
    ends = ends[(ends - begin > near) & (np.diff(ends, append=np.inf) > near)]
    if len(ends) > MAX_STEPS:
        return np.linspace(begin, last, MAX_STEPS + 1)
    return np.append(begin, ends if len(ends) else last)


def lines_said(width: float, head: str, said: str) -> list[str]:
    """The position of the playhead, and what happens there, in at most two lines."""
    return textwrap.wrap(f"{head}  —  {said}", int((width - 2 * MARGIN) / 6.8), max_lines=2, placeholder=" …")


def draw_said(sheet: Sheet, width: float, y: float, head: str, said: str, after: str) -> None:
    """Draw these lines, and one below them."""
    first, *lines = lines_said(width, head, said)
    x = MARGIN + sheet.text(MARGIN, y, head, size=11.5, bold=True, anchor="lm")
    sheet.text(x, y, first[len(head) :], size=11.5, anchor="lm")
    for line in lines:
        y += 17
        sheet.text(MARGIN, y, line, size=11.5, anchor="lm")
    sheet.text(MARGIN, y + 18, after, size=11, fill=DIM, anchor="lm")


class Warned:
    """A trace's warnings, in lines for a picture `width` wide. `height` is their height; 0 without any."""

    def __init__(self, text: str, width: float):
        most = int((width - 2 * MARGIN - 10) / 6.2)
        self._lines = [line for said in text.splitlines() for line in textwrap.wrap(said, most)]
        self.height = _LINE * len(self._lines) + 8 if self._lines else 0

    def draw(self, sheet: Sheet, top: float) -> None:
        if self._lines:
            sheet.box(MARGIN, top, 3, _LINE * len(self._lines), fill=HUES[1])
        for index, line in enumerate(self._lines):
            sheet.text(MARGIN + 10, top + _LINE * (index + 0.5), line, size=11.5, anchor="lm")
