"""`matrices({"X": x, "W": w})`: shows small matrices side by side, with every entry as a number."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import traitlets

from tplab.widgets.paper.apng import encode
from tplab.widgets.paper.card import Card, script
from tplab.widgets.paper.frame import draw_edge
from tplab.widgets.paper.palette import DIM, HUES, INK, LINE, PAPER, mix
from tplab.widgets.paper.pen import Pen, text_width
from tplab.widgets.paper.shown import a, numbers
from tplab.widgets.paper.still import paragraphs

CELL_WIDTH, CELL_HEIGHT, MARGIN, GAP, SMALL_GAP = 46, 25, 18, 34, 12
MAX_ROWS = MAX_COLUMNS = 8
MAX_WIDTH, TEXT_WIDTH = 920, 640
ABOVE, BELOW, WRONG = HUES[0], HUES[1], HUES[5]  # colours of positive, of negative, and of marked entries


@dataclass(frozen=True)
class Panel:
    """One matrix of the picture.

    title   what it is
    array   its entries: a vector is one row; dims before the last two are stacked one below the other
    wrong   the entries that are marked as wrong (an array of the same shape), or None
    """

    title: str
    array: Any
    wrong: np.ndarray | None = None


@dataclass(frozen=True)
class _Grid:
    """The part of a panel that is drawn: at most MAX_ROWS x MAX_COLUMNS entries."""

    title: str
    numbers: np.ndarray
    wrong: np.ndarray

    @property
    def width(self) -> float:
        return max(self.numbers.shape[1] * CELL_WIDTH, text_width(self.title, 11))


class Matrices(Card):
    """The card of `matrices`: a title, a text, and panels."""

    _esm = script("matrices")
    content = traitlets.Dict().tag(sync=True)

    def __init__(self, panels: Sequence[Panel], title: str = "", text: str = ""):
        self.title, self.paragraphs = title, paragraphs(text) if text else []
        self.grids = [_grid(panel) for panel in panels]
        sizes = [grid.numbers[np.isfinite(grid.numbers)] for grid in self.grids]
        self.largest = max((float(np.abs(size).max(initial=0)) for size in sizes), default=0.0)
        shapes = ", ".join(f"{panel.title} {list(np.shape(panel.array))}" for panel in panels) or "no matrices"
        self.sentence = "\n".join(filter(None, (title, text))) if text else ": ".join(filter(None, (title, shapes)))
        whole = sum(grid.width + SMALL_GAP for grid in self.grids)
        self.gap = SMALL_GAP if whole <= MAX_WIDTH < whole + len(self.grids) * (GAP - SMALL_GAP) else GAP
        drawn = [self._panel(grid) for grid in self.grids]
        super().__init__(content={"title": title, "text": self.paragraphs, "panels": drawn, "gap": self.gap})

    def _panel(self, grid: _Grid) -> dict[str, Any]:
        """Rows of [text, share of the largest entry (negative for a negative entry), marked?]."""
        rows = [
            [[number_text(number), round(self.share(number), 3), bool(wrong)] for number, wrong in zip(*pair)]
            for pair in zip(grid.numbers, grid.wrong)
        ]
        return {"title": grid.title, "rows": rows}

    def share(self, number: float) -> float:
        return float(number) / self.largest if self.largest and np.isfinite(number) else 0.0

    def picture(self) -> bytes:
        rows = _in_rows(self.grids, self.gap)
        widths = [sum(grid.width for grid in row) + self.gap * (len(row) - 1) for row in rows]
        said = min(max([text_width(line, 11.5) for line in self.paragraphs], default=0), TEXT_WIDTH)
        inner = max([text_width(self.title, 13, bold=True), said, *widths])
        lines = [line for part in self.paragraphs for line in _wrapped(part, inner)]
        top = MARGIN + (22 if self.title else 0) + 17 * len(lines) + (8 if self.title or lines else 0)
        heights = [24 + max(len(grid.numbers) for grid in row) * CELL_HEIGHT + 16 for row in rows]
        pen = Pen(inner + 2 * MARGIN, top + sum(heights) + 2)
        draw_edge(pen, pen.width, pen.height)
        if self.title:
            pen.text(MARGIN, MARGIN + 7, self.title, size=13, bold=True, anchor="lm")
        for index, line in enumerate(lines):
            pen.text(MARGIN, MARGIN + 7 + (22 if self.title else 0) + 17 * index, line, size=11.5, anchor="lm")
        for row, height in zip(rows, heights):
            x = MARGIN
            for grid in row:
                self._draw(pen, grid, x, top)
                x += grid.width + self.gap
            top += height
        return encode([pen.image()], [0])

    def _draw(self, pen: Pen, grid: _Grid, x: float, y: float) -> None:
        pen.text(x, y + 8, grid.title, size=11, bold=True, fill=DIM, anchor="lm")
        for (row, column), number in np.ndenumerate(grid.numbers):
            left, top = x + column * CELL_WIDTH, y + 22 + row * CELL_HEIGHT
            share = self.share(number)
            fill = mix(ABOVE if share > 0 else BELOW, 0.3 * abs(share), PAPER)
            pen.box(left, top, CELL_WIDTH - 2, CELL_HEIGHT - 2, fill=fill, edge=LINE, radius=4)
            if grid.wrong[row, column]:  # a frame and a corner, so that colour is not the only mark
                pen.box(left, top, CELL_WIDTH - 2, CELL_HEIGHT - 2, edge=WRONG, radius=4, line=1.6)
                pen.line([(left + CELL_WIDTH - 9, top + 1), (left + CELL_WIDTH - 3, top + 7)], WRONG, 1.6)
            at = left + CELL_WIDTH / 2 - 1, top + CELL_HEIGHT / 2 - 1
            pen.text(*at, number_text(number), size=10.5, fill=INK)


def matrices(arrays: Mapping[str, Any], title: str = "") -> Matrices:
    """Show a few small matrices of NumPy, torch or JAX side by side: {"X": x, "W": w}."""
    if not isinstance(arrays, Mapping):
        raise TypeError(f'matrices takes arrays by name, as {{"X": x, "W": w}}, not {a(type(arrays))}')
    return Matrices([Panel(name, array) for name, array in arrays.items()], title)


def number_text(number: float) -> str:
    """A number in at most six characters; a rounding error is 0."""
    if not np.isfinite(number):
        return str(float(number))
    size = abs(float(number))
    if size < 1e-9:
        return "0"
    if size < 1e5 and number == int(number):
        return str(int(number))
    if 0.005 <= size < 1e5:
        return f"{number:.2f}" if size < 100 else f"{number:.0f}"
    return f"{number:.0e}".replace("e-0", "e-").replace("e+0", "e")


def _grid(panel: Panel) -> _Grid:
    given = panel.array
    if "complex" in str(getattr(given, "dtype", "")):
        raise TypeError(f"{panel.title!r} has complex numbers; show their .real and .imag, each by itself")
    if hasattr(given, "detach"):  # a tensor of torch, which may need a gradient, be on a GPU, or have 16 bits
        given = given.detach().cpu().double()
    array = numbers(repr(panel.title), given)
    flat = array.reshape(math.prod(array.shape[:-1]), array.shape[-1] if array.ndim else 1)
    wrong = np.zeros(flat.shape, bool) if panel.wrong is None else np.asarray(panel.wrong, bool).reshape(flat.shape)
    cut = (slice(MAX_ROWS), slice(MAX_COLUMNS))
    shown = flat[cut]
    cut_to = "" if shown.size == flat.size else f", its first {shown.shape[0]} × {shown.shape[1]}"
    return _Grid(panel.title + cut_to, shown, wrong[cut])


def _in_rows(grids: Sequence[_Grid], gap: float) -> list[list[_Grid]]:
    """Rows of panels, with as many side by side as fit."""
    rows: list[list[_Grid]] = []
    for grid in grids:
        taken = sum(other.width + gap for other in rows[-1]) if rows else 0
        if rows and taken + grid.width <= MAX_WIDTH:
            rows[-1].append(grid)
        else:
            rows.append([grid])
    return rows


def _wrapped(text: str, width: float) -> list[str]:
    lines = [""]
    for word in text.split(" "):
        longer = f"{lines[-1]} {word}".lstrip()
        if lines[-1] and text_width(longer, 11.5) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines
