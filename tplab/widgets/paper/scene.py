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
from tplab.widgets.paper.frame import draw_axis
from tplab.widgets.paper.legend import TALL, WIDE, Key, dashed
from tplab.widgets.paper.letters import about_width, one_line
from tplab.widgets.paper.palette import INK, PAPER, Colour, token

Rows = Sequence[tuple[Any, str]]
"""The rows of a tooltip: (what, text). A row without `what` is a heading; None goes on with the text before, which is
shorter to send where many tooltips share parts."""
_FINE = 20  # lengths are sent in twentieths of a pixel
_PLACE = {"text": 2, "line": 0, "area": 0, "curve": 0}  # how many numbers give the place of a part, if not four
COLOURS = ("fill", "edge", "colour", "other", "small", "ink")
_LARGER = 1.05  # letters in the browser, where most fonts are narrower than in a still picture


Curve = Sequence[float]
"""The x and y of each point of a Bezier curve: its beginning, one or two control points, and its end."""


class Mark(NamedTuple):
    """Something that can be hovered over: the rows of its tooltip, and the widget's number for it; -1: none."""

    rows: tuple[tuple[Any, str], ...] = ()
    key: int = -1


class When(NamedTuple):
    """The positions of the playhead at which something is visible: after `begin`, and up to `end`."""

    begin: float = -math.inf
    end: float = math.inf

    def share(self, position: float) -> float:
        """The share of it that has passed, from 0 to 1."""
        return 1.0 if math.isinf(self.begin) else (position - self.begin) / (self.end - self.begin)


class Time(NamedTuple):
    """The time that a scene shows, and the room beside it in pixels. Painters scale what is drawn `in_time`."""

    begin: float
    end: float
    left: float
    right: float
    unit: str


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
    inside `about` it has a tooltip. Inside `in_time`, x and widths are in units of `time`, and the page may show a part
    of it. `paint` draws the picture at one position on another sheet.
    """

    def __init__(self, width: float, height: float, label: str = "", time: Time | None = None):
        self.width, self.height, self.label, self.time = width, height, label, time
        self.axes: list[float] = []  # the lower ends of lanes, with times under them
        self.narrow: Scene | None = None  # painted instead if there is little room
        self.paths, self.looks, self.texts, self.hints = Once(), Once(), Once(), Once()
        self._lengths = array("d")  # of each part: x, y, width, height, and when it is visible
        self._codes = array("q")  # its look, text, path and mark, and where its points end
        self._points = array("d")
        self.keys, self.rows, self.ends = array("q"), array("q"), array("q", [0])  # of marks
        self.recoloured: dict[str, list[tuple[int, list[int]]]] = {}  # (first part, looks from there on), by colours
        self._when, self._path, self._mark, self._timed = When(), -1, -1, False

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
    def in_time(self) -> Iterator[None]:
        self._timed = True
        yield
        self._timed = False

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

    def _look(self, method: str, look: Mapping[str, Any]) -> int:
        said = tuple([(name, value) for name, value in look.items() if value])
        return self.looks((method, said + (("timed", True),) * self._timed))

    def _add(self, method: str, place: Sequence[float], points: Any = (), text: str = "", **look: Any) -> None:
        self._points.extend([length for point in points for length in point])
        self._lengths.extend((*place, 0, 0, 0, 0)[:4] + self._when)
        code = self.texts(text) if text else -1
        self._codes.extend((self._look(method, look), code, self._path, self._mark, len(self._points) // 2))

    def _add_many(self, places: np.ndarray, *codes: Any, spans: np.ndarray | None = None) -> None:
        """Parts at these places [n, 4], each with its codes: look, text, path and mark."""
        when = np.broadcast_to(self._when if spans is None else spans, (len(places), 2))
        self._lengths.frombytes(np.hstack([places, when]).astype(float).tobytes())
        every = np.broadcast_arrays(*codes, np.full(len(places), len(self._points) // 2))
        self._codes.frombytes(np.stack(every, 1).astype(np.int64).tobytes())

    def marks_of(self, keys: Sequence[int]) -> range:
        """New marks with these keys, whose tooltips the page writes."""
        self.keys.extend(keys)
        self.ends.extend([len(self.rows)] * len(keys))
        return range(len(self.keys) - len(keys), len(self.keys))

    def boxes(self, places: np.ndarray, fills: Sequence[Colour], spans: np.ndarray | None = None,
              keys: Sequence[int] = (), curves: Sequence[Curve] = (), **look: Any) -> None:  # fmt: skip
        """Draw many boxes [n, 4] at once, each with its fill, during its span [n, 2], along its curve, with its key."""
        looks = {fill: self._look("box", {"fill": fill, "line": 1, **look}) for fill in dict.fromkeys(fills)}
        paths = {curve: self.paths(_cubic(curve)) for curve in dict.fromkeys(curves)}
        path = [paths[curve] for curve in curves] or self._path
        marks = self.marks_of(keys) if keys else self._mark
        self._add_many(places, [looks[fill] for fill in fills], -1, path, marks, spans=spans)

    def bars(self, places: np.ndarray, looks: Sequence[Mapping[str, Any]], texts: Sequence[tuple[str, ...]],
             marks: np.ndarray | int, **others: Sequence[Mapping[str, Any]]) -> None:  # fmt: skip
        """Draw many bars [n, 4] at once, each with its look, its texts and its mark. others: their looks in other
        colours, by name, which the page can show instead."""

        def codes(looks: Sequence[Mapping[str, Any]]) -> list[int]:
            every = {id(look): look for look in looks}
            numbers = {of: self._look("bar", look) for of, look in every.items()}
            return [numbers[id(look)] for look in looks]

        for name, instead in others.items():
            self.recoloured.setdefault(name, []).append((len(self._codes) // 5, codes(instead)))
        said = {some: self.texts("\n".join(some)) if some else -1 for some in dict.fromkeys(texts)}
        self._add_many(places, codes(looks), [said[some] for some in texts], -1, marks)

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

    def bar(self, x: float, y: float, width: float, height: float, texts: Sequence[str] = (), **look: Any) -> None:
        """Draw what `draw_bar` does; letters are fitted into it as it is shown."""
        self._add("bar", (x, y, width, height), text="\n".join(map(one_line, texts)), **look)

    def veil(self, x: float, y: float, width: float, height: float) -> None:
        """Make everything below it paler."""
        self._add("box", (x, y, width, height), fill=PAPER, alpha=0.78)

    def width_of(self, text: str, size: float = 11, bold: bool = False, mono: bool = False) -> float:
        return _LARGER * about_width(text, size, bold, mono)

    def text(self, x: float, y: float, text: str, *, size: float = 11, bold: bool = False, fill: Colour = INK,
             anchor: str = "mm", mono: bool = False, shift: float = 0) -> float:  # fmt: skip
        """shift: pixels to the right of x, over paper, for a text in time."""
        if text:
            self._add("text", (x, y), text=one_line(text), size=size, bold=bold, fill=fill, anchor=anchor, mono=mono,
                      shift=shift)  # fmt: skip
        return self.width_of(text, size, bold, mono)

    def paint(self, sheet: Sheet, position: float = 0, x: float = 0, y: float = 0) -> None:
        """Draw everything that is visible at this position on another sheet, with the upper left corner at (x, y)."""
        curves, lengths, time = list(self.paths.found), self.lengths, self.time
        for part in self._parts(np.flatnonzero((lengths[:, 4] < position) & (position <= lengths[:, 5]))):
            look, is_line = dict(part.look), part.method in ("line", "curve", "arc")
            left, top, points, place = x, y, part.points, part.place
            if look.pop("timed", False):
                if len(place) == 4:
                    begin, low, long, tall = place
                    place = self.across(begin), low, self.across(begin + long) - self.across(begin), tall
                elif place:
                    place = self.across(place[0]), place[1]
                points = [(self.across(moment), down) for moment, down in points]
            if part.method == "curve":
                points = [on_curve(curves[part.path], step / 16) for step in range(17)]
            elif part.path >= 0:
                across, down = on_curve(curves[part.path], part.when.share(position))
                left, top = x + across, y + down
            if shift := look.pop("shift", 0):
                left, wide = left + shift, sheet.width_of(part.text, look["size"])
                sheet.box(left + place[0] - wide * (shift < 0), top + place[1] - 7, wide, 14, fill=PAPER)
            if part.method == "arc":
                points = _arc(*place)
            if look.pop("grows", False):
                points = _begun(points, part.when.share(position))
            if points:
                (sheet.line if is_line else sheet.area)([(left + a, top + b) for a, b in points], **look)
            elif not is_line:
                text = {"text": [part.text], "bar": [part.text.split("\n")]}.get(part.method, [])
                draw: Any = partial(dashed, sheet) if part.method == "dashed" else getattr(sheet, part.method)
                draw(left + place[0], top + place[1], *place[2:], *text, **look)
        if time:
            at, long = lambda moment: x + self.across(time.begin + moment), time.end - time.begin
            for low in self.axes:
                draw_axis(sheet, at, long, time.unit, 8, x + self.width - time.right - 10, y + low + 9)

    def across(self, moment: float) -> float:
        """The x of a moment."""
        time = self.time or Time(0, 1, 0, self.width - 1, "")
        return time.left + (self.width - time.left - time.right) * (moment - time.begin) / (
            (time.end - time.begin) or 1
        )


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
    lengths, codes, points = scene.lengths, scene.codes, scene.points
    timed = np.array([("timed", True) in look for _, look in scene.looks.found], bool)[codes[:, 0]]
    moments, when = np.unique(lengths[:, 4:].T.ravel(), return_inverse=True)
    columns = {name: _fine(lengths[:, number], timed & (name in "xw")) for number, name in enumerate("xywh")}
    of_points = np.repeat(timed, np.diff(codes[:, 4], prepend=0))
    columns |= {
        "look": codes[:, 0],
        "text": codes[:, 1],
        "moments": moments,
        "begin": when[: len(codes)],
        "end": when[len(codes) :],
        "curves": _fine(np.array(list(scene.paths.found)).ravel()),
        "path": codes[:, 2],
        "mark": codes[:, 3],
        "points": np.stack([_fine(points[:, 0], of_points), _fine(points[:, 1])], 1).ravel(),
        "pointing": np.append(0, codes[:, 4]),
        "key": np.array(scene.keys),
        "rows": _by_place([hints(row) for row in scene.hints.found], scene),
    }
    for name, changes in scene.recoloured.items():
        columns[f"look.{name}"] = instead = codes[:, 0].copy()
        for first, looks in changes:
            instead[first : first + len(looks)] = looks
    header = {
        "width": scene.width,
        "height": scene.height,
        "label": scene.label,
        "looks": [{"is": method, **_sent(dict(look))} for method, look in scene.looks.found],
        "texts": list(scene.texts.found),
    }
    if scene.time:
        header["time"] = {**scene.time._asdict(), "axes": scene.axes}
    return header, columns


def _by_place(codes: Sequence[int], scene: Scene) -> np.ndarray:
    """The first row of every tooltip, then the second rows, and so on, which are more alike; -1 for none."""
    rows = np.array(codes, int)[np.array(scene.rows, int)]
    counts, begins = np.diff(scene.ends), np.array(scene.ends[:-1], int)
    found = np.full((counts.max(initial=0), len(counts)), -1)
    found[np.arange(len(rows)) - np.repeat(begins, counts), np.repeat(np.arange(len(counts)), counts)] = rows
    return found.ravel()


def _fine(lengths: np.ndarray, timed: np.ndarray | bool = False) -> np.ndarray:
    """Lengths as they are sent; those in time as they are."""
    fine = np.round(lengths * _FINE).astype(int)
    return np.where(timed, lengths, fine) if np.any(timed) else fine


def _sent(look: Mapping[str, Any]) -> dict[str, Any]:
    """Colours by their names in the style sheet."""
    return {name: token(value) if name in COLOURS else value for name, value in look.items()}


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
