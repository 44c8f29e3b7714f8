"""`levels(...)`: an amount, over time or another quantity, as staircases or as lines between runs."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from tplab.units import bytes_text, plain
from tplab.widgets.curves import DASHES, Curves, Measured, Numbers, check_measured, draw_measured, figure_of
from tplab.widgets.paper.palette import HUES, INK, PAPER
from tplab.widgets.paper.shown import numbers

MARKS = "osD^"  # so that colour is not the only distinction
MOST_RUNS = 8  # that are marked one by one on the axis
MOST_POWERS = 9  # powers of two written below an axis
MOST_MARKED = 24  # a line with more points gets no marks: it would look like a string of beads
Line = tuple[Numbers, Numbers]
"""x and y of every point."""


def levels(
    panels: Mapping[str, Mapping[str, Line]],
    *,
    title: str,
    about: str = "",
    sentence: str,
    along: str,
    stairs: bool = False,
    predicted: Mapping[str, Mapping[str, Line]] | None = None,
    unit: str = "B",
    from_zero: bool = True,
    doubling: bool = False,
    measured: Measured = None,
    by: str = "",
) -> Curves:
    """Draw bytes, or other amounts, over a quantity, in panels side by side on one scale.

    panels      panel title -> {line: (x, bytes)}
    along       what x is: "microbatches"
    stairs      whether a level lasts until the next point, as with memory over time; otherwise each point is a run, and
                lines connect them
    predicted   panel title -> {line: (x, bytes)}, drawn dotted on top, in the colour of text
    unit        "B", or another suffix of numbers: "" for a loss
    from_zero   whether the scale begins at 0, for comparing heights; otherwise it fits the data, as suits a loss
    doubling    whether x is drawn on a logarithmic axis with powers of two: 1, 2, 4, ... 64
    measured    panel title -> published measurements (x, bytes), or x and an amount in the unit of the lines
    by          who measured them, for the legend
    sentence    a description of the picture, which replaces it where none can be shown
    """
    check_measured(panels, measured, by)
    every = (*panels.values(), *(predicted or {}).values())
    for label, line in (pair for lines in every for pair in lines.items()):
        if len(line) != 2:
            raise ValueError(f"{label!r} is {line!r:.60}; give a pair of lists, the x and the y of every point")
        x, y = (numbers(f"the {side} of {label!r}", given, 1) for side, given in zip("xy", line))
        numbers(f"the y of {label!r}", y, 1, len(x))
    if doubling:
        _check_positive([x for lines in every for xs, _ in lines.values() for x in xs])
        _check_positive([x for points in (measured or {}).values() for x, _ in points])
    figure, axes = figure_of(panels, along, is_log=False)
    drawn = [y for lines in panels.values() for _, ys in lines.values() for y in ys]
    drawn += [y for points in (measured or {}).values() for _, y in points]
    drawn = [y for y in drawn if math.isfinite(y)]  # a line has a gap elsewhere
    least, most = 0.0 if from_zero else min(drawn, default=0.0), max(drawn, default=0.0)
    step, room = round_step(most - least, unit), 0.06 * (most - least)
    for ax, (name, lines) in zip(axes, panels.items()):
        _dress(ax, step, unit, () if stairs else {float(at) for x, _ in lines.values() for at in x})
        for index, (label, (x, y)) in enumerate(lines.items()):
            looks = {"color": HUES[index % 8], "lw": 2, "ms": 6, "mfc": PAPER, "mew": 1.6, "label": label}
            if stairs and len(y):  # a mark where the peak is first reached
                top = int(np.argmax(y))
                ax.plot(x, y, ds="steps-post", marker=MARKS[index % 4], markevery=[top], zorder=3, **looks)
            else:
                ax.plot(x, y, ls=DASHES[index % 4], marker="o" if len(y) <= MOST_MARKED else "", zorder=3, **looks)
        for label, (x, y) in (predicted or {}).get(name, {}).items():
            style = {"color": INK, "lw": 1, "ls": (0, (1, 2)), "ds": "steps-post" if stairs else "default"}
            ax.plot(x, y, zorder=4, **style)
            ax.lines[-1].set(label="predicted", gid=f"{label}, predicted")
        draw_measured(ax, measured, name, by)
        if doubling:
            _double(ax)
    axes[0].set_ylim(least if from_zero else least - room, most + room if most > least else least + 1.0)
    return Curves(title, about, sentence, figure, lambda x: f"{along}: {plain(x)}")


def _dress(ax: Any, step: float, unit: str, runs: Collection[float]) -> None:
    """runs   the x of the points, if each is a run: if they are few, only these are marked on the axis"""
    from matplotlib.ticker import FixedLocator, MaxNLocator, MultipleLocator

    is_few = 0 < len(runs) <= MOST_RUNS
    ax.xaxis.set_major_locator(FixedLocator(sorted(runs)) if is_few else MaxNLocator(8, integer=True))
    if is_few:
        ax.xaxis.set_major_formatter(lambda value, place: plain(value))
    ax.yaxis.set_major_locator(MultipleLocator(step))
    text = bytes_text if unit == "B" else lambda value: f"{plain(value)} {unit}".strip()
    ax.yaxis.set_major_formatter(lambda value, place: text(value))


def _check_positive(places: Sequence[float]) -> None:
    if wrong := [x for x in places if not 0 < x < math.inf]:
        raise ValueError(f"a line has a point at {plain(wrong[0])}; an axis of powers of two needs positive numbers")


def _double(ax: Any) -> None:
    """Make the axis logarithmic, labelled with powers of two, no more of them than can be read."""
    from matplotlib.ticker import FixedLocator, NullLocator

    places = [float(x) for line in ax.lines for x in line.get_xdata()] or [1.0]
    first, last = math.floor(math.log2(min(places))), math.ceil(math.log2(max(places)))
    every = -(-(last - first + 1) // MOST_POWERS)
    ax.set_xscale("log", base=2)
    ax.xaxis.set(major_locator=FixedLocator([2.0**power for power in range(first, last + 1, every)]))
    ax.xaxis.set(minor_locator=NullLocator(), major_formatter=lambda value, place: plain(value))


def round_step(most: float, unit: str = "B") -> float:
    """The distance between grid lines: four to seven of them, with bytes rounded to KiB or MiB."""
    power = 1024.0
    while power * 1024 <= most:
        power *= 1024
    if most < 1024 or unit != "B":
        power = 1.0
    rough = (max(most, 1.0) if unit == "B" else most) / 4 / power
    nice = [scale * digit for scale in (0.01, 0.1, 1, 10, 100) for digit in (1, 2, 2.5, 5)]
    return power * max((one for one in nice if one <= rough), default=nice[0])
