"""A sheet that keeps what is drawn on it: a still picture and the browser (static/scene.js) paint the same things."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tplab.widgets.paper.action import Sheet
from tplab.widgets.paper.letters import about_width, one_line
from tplab.widgets.paper.measured import draw_diamond
from tplab.widgets.paper.palette import INK, Colour, token

Rows = Sequence[tuple[str, str]]
"""What a hint says: (what, text) for each row. A row without `what` is a heading."""
_FINE = 20  # lengths are sent in twentieths of a pixel
_LARGER = 1.05  # letters in the browser, most of whose fonts are narrower, than in a still picture


@dataclass(frozen=True)
class Mark:
    """What a thing is that one can point at: what the hint says, and a key that the widget knows it by."""

    rows: tuple[tuple[str, str], ...] = ()
    key: Any = None


class Key(NamedTuple):
    """An entry of a legend: a text, and how what it explains looks. sign: "box", or in this colour "hatch", "dashes",
    "stair"; "cross" and "disc" in the fill's; "diamond", the mark of what was measured."""

    text: str
    fill: Colour | None = None
    edge: Colour | None = None
    sign: str = "box"

    def draw(self, sheet: Sheet, x: float, y: float) -> None:
        """In a box of 18 x 11 pixels."""
        edge, middle = self.edge or INK, y + 5.5
        if self.sign == "diamond":
            draw_diamond(sheet, x + 9, middle)
        elif self.sign == "disc":
            sheet.box(x + 5, middle - 4, 8, 8, fill=self.fill, edge=self.edge, radius=4)
        elif self.sign == "cross":
            for up in (-3.2, 3.2):
                sheet.line([(x + 5.8, middle - up), (x + 12.2, middle + up)], self.fill or INK, 1.6)
        elif self.sign == "stair":
            sheet.line([(x, y + 2), (x + 9, y + 2), (x + 9, y + 9), (x + 18, y + 9)], edge, 1)
        elif self.sign == "dashes":
            dashes(sheet, x, x + 18, middle)
        else:
            is_box = self.sign == "box"
            sheet.box(x, y, 18, 11, fill=self.fill, edge=self.edge if is_box else None, radius=3 * is_box)
            if not is_box:
                sheet.hatch(x, y, 18, 11, edge)


class When(NamedTuple):
    """Where the playhead is while a thing is there: after `begin`, and up to `end`."""

    begin: float = -math.inf
    end: float = math.inf


class Part(NamedTuple):
    """A thing that was drawn: the name of the sheet's method, where it is, and how it looks."""

    method: str
    place: tuple[float, ...]
    points: tuple[tuple[float, float], ...]
    text: str
    look: tuple[tuple[str, Any], ...]
    when: When
    path: int
    mark: int


class Scene:
    """A sheet of `width` x `height` pixels for pictures that have a playhead.

    Everything drawn inside `during` is there for some of its positions only, inside `moving` it follows it, and inside
    `about` it says what it is. `paint` draws the picture at one position on another sheet.
    """

    def __init__(self, width: float, height: float, label: str = ""):
        self.width, self.height, self.label = width, height, label
        self.narrow: Scene | None = None  # what is painted instead where there is little room
        self.parts: list[Part] = []
        self.marks: list[Mark] = []
        self.paths: list[list[tuple[float, float, float]]] = []
        self._when, self._path, self._mark = When(), -1, -1

    @contextmanager
    def during(self, begin: float = -math.inf, end: float = math.inf) -> Iterator[None]:
        before, self._when = self._when, When(begin, end)
        yield
        self._when = before

    @contextmanager
    def about(self, rows: Rows, key: Any = None) -> Iterator[None]:
        before, self._mark = self._mark, len(self.marks)
        self.marks.append(Mark(tuple(rows), key))
        yield
        self._mark = before

    @contextmanager
    def moving(self, stops: Sequence[tuple[float, float, float]]) -> Iterator[None]:
        """`stops` are (position, x, y): how far it is moved then, and in between on a straight line."""
        before, self._path = self._path, len(self.paths)
        self.paths.append(list(stops))
        yield
        self._path = before

    def _add(self, method: str, place: Sequence[float], points: Any = (), text: str = "", **look: Any) -> None:
        said = tuple(sorted((name, value) for name, value in look.items() if value))
        part = Part(method, tuple(place), tuple(points), text, said, self._when, self._path, self._mark)
        self.parts.append(part)

    def box(self, x: float, y: float, width: float, height: float, *, fill: Colour | None = None,
            edge: Colour | None = None, radius: float = 0, line: float = 1) -> None:  # fmt: skip
        """Without a fill and an edge, it is only there to be pointed at."""
        self._add("box", (x, y, width, height), fill=fill, edge=edge, radius=radius, line=line)

    def line(self, points: Sequence[tuple[float, float]], colour: Colour, line: float = 1) -> None:
        self._add("line", (), points, colour=colour, line=line)

    def area(self, points: Sequence[tuple[float, float]], fill: Colour) -> None:
        self._add("area", (), points, fill=fill)

    def hatch(self, x: float, y: float, width: float, height: float, colour: Colour) -> None:
        self._add("hatch", (x, y, width, height), colour=colour)

    def width_of(self, text: str, size: float = 11, bold: bool = False, mono: bool = False) -> float:
        return _LARGER * about_width(text, size, bold, mono)

    def text(self, x: float, y: float, text: str, *, size: float = 11, bold: bool = False, fill: Colour = INK,
             anchor: str = "mm", mono: bool = False) -> float:  # fmt: skip
        if text:
            self._add("text", (x, y), text=one_line(text), size=size, bold=bold, fill=fill, anchor=anchor, mono=mono)
        return self.width_of(text, size, bold, mono)

    def paint(self, sheet: Sheet, position: float = 0, x: float = 0, y: float = 0) -> None:
        """Draw on another sheet, with the upper left corner at (x, y), what is there at this position."""
        for part in self.parts:
            if not part.when.begin < position <= part.when.end:
                continue
            left, top = (x, y) if part.path < 0 else _moved(self.paths[part.path], position, x, y)
            draw, look = getattr(sheet, part.method), dict(part.look)
            if part.points:
                draw([(left + a, top + b) for a, b in part.points], **look)
            else:
                text = [part.text] if part.method == "text" else []
                draw(left + part.place[0], top + part.place[1], *part.place[2:], *text, **look)


def _moved(stops: Sequence[tuple[float, float, float]], position: float, x: float, y: float) -> tuple[float, float]:
    at, across, down = zip(*stops)
    return x + float(np.interp(position, at, across)), y + float(np.interp(position, at, down))


def packed(scenes: Sequence[Scene], legend: Sequence[Key] = ()) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The scenes of a card as static/scene.js reads them: a header, and columns whose names end in a scene's number."""
    tables: list[dict[str, Any]] = []
    hints = _Once()
    columns: dict[str, np.ndarray] = {}
    narrow = [scene.narrow for scene in scenes if scene.narrow]
    swatches = [Scene(18, 11) for _ in legend]
    for key, swatch in zip(legend, swatches):
        key.draw(swatch, 0, 0)
    for number, scene in enumerate([*scenes, *narrow, *swatches]):
        about, found = _table(scene, hints)
        tables.append({**about, "narrow": len(scenes) + narrow.index(scene.narrow) if scene.narrow else number})
        columns |= {f"{name}{number}": column for name, column in found.items()}
    first = len(scenes) + len(narrow)
    keys = [[key.text, number] for number, key in enumerate(legend, first)]
    return {"tables": tables, "scenes": len(scenes), "hints": list(hints.found), "legend": keys}, columns


def _table(scene: Scene, hints: _Once) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    looks, texts = _Once(), _Once()
    parts, marks = scene.parts, scene.marks
    places = np.array([(*part.place, 0, 0, 0, 0)[:4] for part in parts], float).reshape(-1, 4)
    columns = {name: _fine(places[:, number]) for number, name in enumerate("xywh")}
    columns |= {
        "look": np.array([looks((part.method, part.look)) for part in parts], int),
        "text": np.array([texts(part.text) if part.text else -1 for part in parts], int),
        "begin": np.array([part.when.begin for part in parts], "f4"),
        "end": np.array([part.when.end for part in parts], "f4"),
        "path": np.array([part.path for part in parts], int),
        "mark": np.array([part.mark for part in parts], int),
        "points": _fine(np.array([length for part in parts for point in part.points for length in point])),
        "pointing": np.cumsum([0, *(len(part.points) for part in parts)]),
        "rows": np.array([hints(row) for mark in marks for row in mark.rows], int),
        "saying": np.cumsum([0, *(len(mark.rows) for mark in marks)]),
    }
    header = {
        "width": scene.width,
        "height": scene.height,
        "label": scene.label,
        "looks": [{"is": method, **_sent(dict(look))} for method, look in looks.found],
        "texts": list(texts.found),
        "keys": [mark.key for mark in marks] if any(mark.key is not None for mark in marks) else [],
        "paths": scene.paths,
    }
    return header, columns


def _fine(lengths: np.ndarray) -> np.ndarray:
    return np.round(lengths * _FINE).astype(int)


def _sent(look: Mapping[str, Any]) -> dict[str, Any]:
    """Colours by their names in the style sheet."""
    return {name: token(value) if name in ("fill", "edge", "colour") else value for name, value in look.items()}


def dashes(sheet: Sheet, left: float, right: float, y: float) -> None:
    """A dashed line, for a limit."""
    for x in np.arange(left, right, 8.0).tolist():
        sheet.line([(x, y), (min(x + 5, right), y)], INK, 1.4)


def spans(positions: Collection[int]) -> Iterator[tuple[float, float]]:
    """Whole positions as stretches of consecutive ones: (begin, end) for `during`."""
    ordered = sorted(positions)
    first = 0
    for place, position in enumerate(ordered):
        if place + 1 == len(ordered) or ordered[place + 1] > position + 1:
            yield ordered[first] - 0.5, position + 0.5
            first = place + 1


class _Once:
    """Numbers things in the order in which they first appear."""

    def __init__(self) -> None:
        self.found: dict[Any, int] = {}

    def __call__(self, thing: Any) -> int:
        return self.found.setdefault(thing, len(self.found))
