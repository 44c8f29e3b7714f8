"""A sheet that records what is drawn on it, to be painted in a still picture and in the browser (static/scene.js)."""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from tplab.widgets.paper.action import Sheet
from tplab.widgets.paper.legend import TALL, WIDE, Key, dashed
from tplab.widgets.paper.letters import about_width, one_line
from tplab.widgets.paper.palette import INK, Colour, token

Rows = Sequence[tuple[str, str]]
"""The rows of a tooltip: (what, text). A row without `what` is a heading."""
_FINE = 20  # lengths are sent in twentieths of a pixel
_PLACE = {"text": 2, "line": 0, "area": 0, "curve": 0}  # how many numbers give the place of a part, if not four
_LARGER = 1.05  # letters in the browser, where most fonts are narrower than in a still picture


Curve = Sequence[float]
"""The x and y of each point of a Bezier curve: its beginning, one or two control points, and its end."""


class Mark(NamedTuple):
    """Something that can be hovered over: the rows of its tooltip, and the widget's number for it; -1: none."""

    rows: tuple[tuple[str, str], ...] = ()
    key: int = -1


class When(NamedTuple):
    """The positions of the playhead at which something is visible: after `begin`, and up to `end`."""

    begin: float = -math.inf
    end: float = math.inf

    def share(self, position: float) -> float:
        """The share of it that has passed, from 0 to 1."""
        return 1.0 if math.isinf(self.begin) else (position - self.begin) / (self.end - self.begin)


class Part(NamedTuple):
    """Something that was drawn: the name of the sheet's method, its place, and its look. `path` is the number of the
    curve that it is, or along which it moves; -1 for none."""

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

    Everything drawn inside `during` is visible only at some of its positions, inside `along` it moves meanwhile, and
    inside `about` it has a tooltip. `paint` draws the picture at one position on another sheet.
    """

    def __init__(self, width: float, height: float, label: str = ""):
        self.width, self.height, self.label = width, height, label
        self.narrow: Scene | None = None  # painted instead if there is little room
        self.paths, self.looks, self.texts, self.hints = Once(), Once(), Once(), Once()
        self._lengths = array("d")  # of each part: x, y, width, height, and when it is visible
        self._codes = array("q")  # its look, text, path and mark, and where its points end
        self._points = array("d")
        self.keys, self.rows, self.ends = array("q"), array("q"), array("q", [0])  # of marks
        self._when, self._path, self._mark = When(), -1, -1

    @property
    def lengths(self) -> np.ndarray:
        return np.array(self._lengths).reshape(-1, 6)

    @property
    def codes(self) -> np.ndarray:
        return np.array(self._codes, int).reshape(-1, 5)

    @property
    def points(self) -> np.ndarray:
        return np.array(self._points).reshape(-1, 2)

    @property
    def parts(self) -> list[Part]:
        return self._parts(np.arange(len(self._codes) // 5))

    @property
    def marks(self) -> list[Mark]:
        hints = list(self.hints.found)
        rows = [hints[row] for row in self.rows]
        return [Mark(tuple(rows[a:b]), key) for key, a, b in zip(self.keys, self.ends, self.ends[1:])]

    def _parts(self, which: np.ndarray) -> list[Part]:
        looks, texts, points, found = list(self.looks.found), [*self.texts.found, ""], self.points, []
        begins = np.append(0, self.codes[:, 4])[which]
        for lengths, codes, begin in zip(self.lengths[which].tolist(), self.codes[which].tolist(), begins.tolist()):
            look, text, path, mark, end = codes
            method, said = looks[look]
            place, corners = lengths[: _PLACE.get(method, 4)], map(tuple, points[begin:end].tolist())
            found.append(Part(method, tuple(place), (*corners,), texts[text], said, When(*lengths[4:]), path, mark))
        return found

    @contextmanager
    def during(self, begin: float = -math.inf, end: float = math.inf) -> Iterator[None]:
        before, self._when = self._when, When(begin, end)
        yield
        self._when = before

    @contextmanager
    def about(self, rows: Rows, key: int = -1) -> Iterator[None]:
        before, self._mark = self._mark, len(self.keys)
        self.keys.append(key)
        self.rows.extend(map(self.hints, rows))
        self.ends.append(len(self.rows))
        yield
        self._mark = before

    @contextmanager
    def along(self, curve: Curve) -> Iterator[None]:
        """Move what is drawn around (0, 0) along a curve, from the beginning of `during` to its end."""
        before, self._path = self._path, self.paths(_cubic(curve))
        yield
        self._path = before

    def _add(self, method: str, place: Sequence[float], points: Any = (), text: str = "", **look: Any) -> None:
        said = tuple([(name, value) for name, value in look.items() if value])
        self._points.extend([length for point in points for length in point])
        self._lengths.extend((*place, 0, 0, 0, 0)[:4] + self._when)
        code = self.texts(text) if text else -1
        self._codes.extend((self.looks((method, said)), code, self._path, self._mark, len(self._points) // 2))

    def boxes(self, places: np.ndarray, fills: Sequence[Colour], spans: np.ndarray | None = None,
              keys: Sequence[int] = (), curves: Sequence[Curve] = (), **look: Any) -> None:  # fmt: skip
        """Draw many boxes [n, 4] at once, each with its fill, during its span [n, 2], along its curve, with its key."""
        said = tuple({"line": 1, **look}.items())
        looks = {fill: self.looks(("box", (("fill", fill), *said))) for fill in dict.fromkeys(fills)}
        paths = {curve: self.paths(_cubic(curve)) for curve in dict.fromkeys(curves)}
        marks = range(len(self.keys), len(self.keys) + len(keys)) if keys else self._mark
        self.keys.extend(keys)
        self.ends.extend([len(self.rows)] * len(keys))
        when = np.broadcast_to(self._when if spans is None else spans, (len(places), 2))
        self._lengths.frombytes(np.hstack([places, when]).astype(float).tobytes())
        path = [paths[curve] for curve in curves] or self._path
        codes = np.broadcast_arrays([looks[fill] for fill in fills], -1, path, marks, len(self._points) // 2)
        self._codes.frombytes(np.stack(codes, 1).astype(np.int64).tobytes())

    def box(self, x: float, y: float, width: float, height: float, *, fill: Colour | None = None,
            edge: Colour | None = None, radius: float = 0, line: float = 1) -> None:  # fmt: skip
        """Draw a box. Without a fill and an edge, it only catches the pointer."""
        self._add("box", (x, y, width, height), fill=fill, edge=edge, radius=radius, line=line)

    def line(self, points: Sequence[tuple[float, float]], colour: Colour, line: float = 1, grows: bool = False) -> None:
        """grows: the line begins as its first point, and is complete at the end of `during`."""
        self._add("line", (), points, colour=colour, line=line, grows=grows)

    def curve(self, curve: Curve, colour: Colour, line: float = 1) -> None:
        with self.along(curve):
            self._add("curve", (), colour=colour, line=line)

    def arc(self, x: float, y: float, radius: float, degrees: float, colour: Colour, line: float = 1) -> None:
        """A part of a circle, clockwise from its top."""
        self._add("arc", (x, y, radius, degrees), colour=colour, line=line)

    def dashed(self, x: float, y: float, width: float, height: float, colour: Colour, line: float = 1) -> None:
        """The outline of a box, in dashes."""
        self._add("dashed", (x, y, width, height), colour=colour, line=line)

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
        """Draw everything that is visible at this position on another sheet, with the upper left corner at (x, y)."""
        curves, lengths = list(self.paths.found), self.lengths
        for part in self._parts(np.flatnonzero((lengths[:, 4] < position) & (position <= lengths[:, 5]))):
            look, is_line = dict(part.look), part.method in ("line", "curve", "arc")
            left, top, points = x, y, part.points
            if part.method == "curve":
                points = [on_curve(curves[part.path], step / 16) for step in range(17)]
            elif part.path >= 0:
                across, down = on_curve(curves[part.path], part.when.share(position))
                left, top = x + across, y + down
            if part.method == "arc":
                points = _arc(*part.place)
            if look.pop("grows", False):
                points = _begun(points, part.when.share(position))
            if points:
                (sheet.line if is_line else sheet.area)([(left + a, top + b) for a, b in points], **look)
            elif not is_line:
                text = [part.text] if part.method == "text" else []
                draw: Any = partial(dashed, sheet) if part.method == "dashed" else getattr(sheet, part.method)
                draw(left + part.place[0], top + part.place[1], *part.place[2:], *text, **look)


def on_curve(curve: Curve, u: float) -> tuple[float, float]:
    """The point of a `Curve` at `u` between 0 and 1."""
    points = np.reshape(curve, (-1, 2))
    while len(points) > 1:
        points = (1 - u) * points[:-1] + u * points[1:]
    return float(points[0, 0]), float(points[0, 1])


def _cubic(curve: Curve) -> tuple[float, ...]:
    """The same curve with two control points."""
    if len(curve) == 8:
        return tuple(curve)
    x0, y0, cx, cy, x1, y1 = curve
    third = [(end + 2 * middle) / 3 for end, middle in zip((x0, y0, x1, y1), (cx, cy, cx, cy))]
    return (x0, y0, *third, x1, y1)


def _arc(x: float, y: float, radius: float, degrees: float) -> list[tuple[float, float]]:
    angles = np.radians(np.linspace(0, degrees, 2 + int(degrees / 9)))
    return list(zip((x + radius * np.sin(angles)).tolist(), (y - radius * np.cos(angles)).tolist()))


def _begun(points: Sequence[tuple[float, float]], share: float) -> list[tuple[float, float]]:
    """The first `share` of a line, measured along it."""
    corners = np.array(points)
    far = np.concatenate([[0.0], np.cumsum(np.hypot(*np.diff(corners, axis=0).T))])
    end = share * far[-1]
    last = [float(np.interp(end, far, corners[:, axis])) for axis in (0, 1)]
    return [*(point for point, at in zip(points, far) if at < end), (last[0], last[1])]


def before(time: float) -> float:
    """The last moment before a time: what begins then is visible at that time, and what ends then is not."""
    return math.nextafter(time, -math.inf)


def packed(scenes: Sequence[Scene], legend: Sequence[Key] = ()) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The scenes of a card for static/scene.js: a header, and columns whose names end in a scene's number."""
    tables: list[dict[str, Any]] = []
    hints = Once()
    columns: dict[str, np.ndarray] = {}
    narrow = [scene.narrow for scene in scenes if scene.narrow]
    swatches = [Scene(WIDE, TALL) for _ in legend]
    for key, swatch in zip(legend, swatches):
        key.draw(swatch, 0, 0)
    for number, scene in enumerate([*scenes, *narrow, *swatches]):
        about, found = _table(scene, hints)
        tables.append({**about, "narrow": len(scenes) + narrow.index(scene.narrow) if scene.narrow else number})
        columns |= {f"{name}{number}": column for name, column in found.items()}
    first = len(scenes) + len(narrow)
    keys = [[key.text, number] for number, key in enumerate(legend, first)]
    return {"tables": tables, "scenes": len(scenes), "hints": list(hints.found), "legend": keys}, columns


def _table(scene: Scene, hints: Once) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    lengths, codes = scene.lengths, scene.codes
    moments, when = np.unique(lengths[:, 4:].T.ravel(), return_inverse=True)
    columns = {name: _fine(lengths[:, number]) for number, name in enumerate("xywh")}
    columns |= {
        "look": codes[:, 0],
        "text": codes[:, 1],
        "moments": moments,
        "begin": when[: len(codes)],
        "end": when[len(codes) :],
        "curves": _fine(np.array(list(scene.paths.found)).ravel()),
        "path": codes[:, 2],
        "mark": codes[:, 3],
        "points": _fine(scene.points.ravel()),
        "pointing": np.append(0, codes[:, 4]),
        "key": np.array(scene.keys),
        "rows": np.array([hints(row) for row in scene.hints.found], int)[np.array(scene.rows, int)],
        "saying": np.array(scene.ends),
    }
    header = {
        "width": scene.width,
        "height": scene.height,
        "label": scene.label,
        "looks": [{"is": method, **_sent(dict(look))} for method, look in scene.looks.found],
        "texts": list(scene.texts.found),
    }
    return header, columns


def _fine(lengths: np.ndarray) -> np.ndarray:
    return np.round(lengths * _FINE).astype(int)


def _sent(look: Mapping[str, Any]) -> dict[str, Any]:
    """Colours by their names in the style sheet."""
    return {name: token(value) if name in ("fill", "edge", "colour") else value for name, value in look.items()}


def spans(positions: Collection[int]) -> Iterator[tuple[float, float]]:
    """Whole positions as stretches of consecutive ones: (begin, end) for `during`."""
    ordered = sorted(positions)
    first = 0
    for place, position in enumerate(ordered):
        if place + 1 == len(ordered) or ordered[place + 1] > position + 1:
            yield ordered[first] - 0.5, position + 0.5
            first = place + 1


class Once:
    """Numbers things in the order in which they first appear."""

    def __init__(self) -> None:
        self.found: dict[Any, int] = {}

    def __call__(self, thing: Any) -> int:
        return self.found.setdefault(thing, len(self.found))
