"""`scatter(...)`: forecast seconds beside measured seconds, one dot per run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import count
from typing import NamedTuple

from tplab.units import time_text
from tplab.widgets.curves import Curves, figure_of
from tplab.widgets.paper.palette import DIM, HUES, PAPER, SOFT

MARKS = "oD^s"  # so that colour is not the only distinction


class Dot(NamedTuple):
    """One run: its measured seconds, its forecast, and its name."""

    measured: float
    forecast: float
    name: str


def scatter(
    panels: Mapping[str, Mapping[str, Sequence[Dot]]],
    *,
    title: str,
    about: str = "",
    sentence: str,
    interval: tuple[float, float] | None = None,
) -> Curves:
    """Draw forecasts over measurements, in seconds on logarithmic axes, in panels side by side on one scale.

    panels     panel title -> {group: its runs}
    interval   a band: a run may take between interval[0] and interval[1] times its forecast
    sentence   a description of the picture, which replaces it where none can be shown
    """
    dots = [dot for groups in panels.values() for runs in groups.values() for dot in runs]
    if not dots:
        raise ValueError("there is no dot to draw; give at least one run, as {'a title': {'a group': [Dot(...)]}}")
    for dot in dots:
        if not all(0 < side < math.inf for side in dot[:2]):
            raise ValueError(f"{dot.name!r} has {dot[0]} s and {dot[1]} s; logarithmic axes need positive times")
    if interval and not 0 < interval[0] <= interval[1] < math.inf:
        raise ValueError(f"interval is {interval}; its first number is the smaller one, and both are above 0")
    figure, axes = figure_of(panels, "measured")
    drawn = count()
    least, most = (edge([side for dot in dots for side in dot[:2]]) for edge in (min, max))
    ends = least / 1.4, most * 1.4
    for ax, groups in zip(axes, panels.values()):
        ax.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_formatter(lambda value, place: time_text(value, "s"))
        if interval:
            low, high = ([end / times for end in ends] for times in interval)
            ax.fill_between(ends, high, low, color=SOFT, lw=0, zorder=1)
        ax.plot(ends, ends, color=DIM, lw=1, ls=(0, (3, 3)), zorder=2, label="_as forecast")
        for group, runs in groups.items():
            index = next(drawn)
            if not runs:
                continue
            looks = {
                "ms": 5,
                "mfc": HUES[index % 8],
                "mec": PAPER,
                "mew": 0.6,
                "zorder": 3 + 1 / len(runs),
            }  # few on top
            x, y = ([dot[side] for dot in runs] for side in (0, 1))
            ax.plot(x, y, MARKS[index % 4], label=f"forecast, {group}", **looks)
    axes[0].set_ylabel("forecast", color=DIM, fontsize=9)
    side = {"transform": axes[0].transAxes, "color": DIM, "size": 9, "style": "italic"}
    axes[0].text(0.03, 0.92, "faster than forecast", **side)
    axes[0].text(0.97, 0.05, "slower than forecast", ha="right", **side)
    names: dict[float, list[str]] = {}
    for dot in dots:
        names.setdefault(float(dot.measured), []).append(dot.name)

    def x_text(measured: float) -> str:
        return f"{' or '.join(names[measured])}: measured {time_text(measured, 's')}"

    return Curves(title, about, sentence, figure, x_text)
