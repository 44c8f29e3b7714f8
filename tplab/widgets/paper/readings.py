"""The values of a figure's lines at the places where they have points, for the tooltip."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

_MOST_STOPS = 240


def readings(figure: Any, x_text: Callable[[float], str]) -> list[dict[str, Any]]:
    """For each panel of a figure that was drawn, what a reader can hover over.

    box     its left, top, right and bottom, as fractions of the figure
    stops   from left to right: [where in the box, x in words, [[line, y in words], ...]], no more of them than a
            pointer can distinguish. A line whose label is that of several has its own name as its `gid`
    """
    return [_panel(ax, x_text) for ax in figure.axes]


def _panel(ax: Any, x_text: Callable[[float], str]) -> dict[str, Any]:
    place = ax.get_position()
    lines = [line for line in ax.lines if not line.get_label().startswith("_")]
    places = sorted({float(x) for line in lines for x in line.get_xdata()})
    if len(places) > _MOST_STOPS:
        places = [places[round(at)] for at in np.linspace(0, len(places) - 1, _MOST_STOPS)]
    y_text = ax.yaxis.get_major_formatter()
    return {
        "box": [round(float(side), 4) for side in (place.x0, 1 - place.y1, place.x1, 1 - place.y0)],
        "stops": [[_along(ax, x), x_text(x), _values(lines, x, y_text)] for x in places if 0 <= _along(ax, x) <= 1],
    }


def _along(ax: Any, x: float) -> float:
    """Where x is between the left side of the panel, 0, and the right side, 1."""
    (place, _) = ax.transAxes.inverted().transform(ax.transData.transform((x, ax.get_ylim()[1])))
    return round(float(place), 4)


def _values(lines: list[Any], x: float, y_text: Callable[..., str]) -> list[list[str]]:
    named: dict[str, str] = {}
    for line in lines:
        y = _value(line, x)
        if y is not None:
            named[line.get_gid() or line.get_label()] = y_text(y, None)
    return [[name, text] for name, text in named.items()]


def _value(line: Any, x: float) -> float | None:
    """A line's value at x: dots have one only at their own x, a staircase has its step's, other lines are straight
    between two points as they are drawn, also on logarithmic axes."""
    xs, ys = (np.asarray(values, float) for values in (line.get_xdata(), line.get_ydata()))
    here = np.flatnonzero(xs == x)
    if len(here):
        return float(ys[here[-1]])
    if line.get_linestyle() == "None" or len(xs) < 2 or not xs[0] < x < xs[-1]:
        return None
    if line.get_drawstyle() == "steps-post":
        return float(ys[np.searchsorted(xs, x) - 1])
    along, up = (axis.get_transform() for axis in (line.axes.xaxis, line.axes.yaxis))
    height = np.interp(along.transform(np.array([x])), along.transform(xs), up.transform(ys))
    return float(up.inverted().transform(height)[0])
