"""`curves(...)`: draws seconds over bytes on logarithmic axes: how costs grow, and where two of them cross."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import traitlets
from PIL import Image

from tplab.units import bytes_text, time_text
from tplab.widgets.paper.card import Card, script
from tplab.widgets.paper.frame import draw_edge, draw_head
from tplab.widgets.paper.letters import one_line
from tplab.widgets.paper.palette import DIM, HUES, INK, LINE, PAPER, SOFT
from tplab.widgets.paper.pen import Pen
from tplab.widgets.paper.shown import numbers

Numbers = Sequence[float] | np.ndarray
Measured = Mapping[str, Sequence[tuple[float, float]]] | None
"""Panel title -> published measurements (x, y)."""

DASHES = ("-", (0, (5, 1.6)), (0, (1.2, 1.4)), (0, (7, 1.6, 1.2, 1.6)))  # so that colour is not the only distinction
WIDTH, HEIGHT, MARGIN = 900, 330, 20
_MOST_STOPS = 240
# The names in static/tplab.css. On dark paper, a line in one of the hues is made lighter.
_TOKENS = {INK: "var(--ink)", DIM: "var(--dim)", LINE: "var(--line)", SOFT: "var(--soft)", PAPER: "var(--paper)"}
_HUES = {hue: f"color-mix(in srgb,var(--c{i}) var(--onpaper),var(--toward))" for i, hue in enumerate(HUES)}


class Curves(Card):
    """The card of `curves` and `levels`. Matplotlib draws it once; the browser fills in the colours of its theme, and
    shows the values of the lines under the pointer.
    """

    _esm = script("curves")
    content = traitlets.Dict().tag(sync=True)

    def __init__(self, title: str, about: str, sentence: str, figure: Any, x_text: Callable[[float], str]):
        self.title, self.about, self.sentence, self.figure = title, about, sentence, figure
        self._x_text = x_text
        super().__init__(content=self._drawn())

    def redraw(self) -> None:
        """Show `about` and `figure` again after they have changed."""
        self.content = self._drawn()

    def _drawn(self) -> dict[str, Any]:
        explain(self.figure)
        words = {"title": self.title, "about": self.about, "sentence": self.sentence}
        return {**words, "drawing": _as_svg(self.figure), "panels": readings(self.figure, self._x_text)}

    def picture(self) -> bytes:
        """The card as PNG, one dot per pixel."""
        pen = Pen(WIDTH + 2 * MARGIN, HEIGHT + 92)
        draw_edge(pen, pen.width, pen.height)
        draw_head(pen, pen.width, self.title, self.about, "", MARGIN)
        pen.text(MARGIN, HEIGHT + 72, self.sentence, size=11.5, anchor="lm")
        sheet, image = io.BytesIO(), pen.image().convert("RGB")
        self.figure.savefig(sheet, format="png", dpi=100, facecolor=PAPER)
        image.paste(Image.open(sheet).convert("RGB"), (MARGIN, 48))
        small = io.BytesIO()
        image.quantize(128).save(small, "PNG", optimize=True)
        return small.getvalue()


def curves(
    nbytes: Numbers,
    panels: Mapping[str, Mapping[str, Numbers]],
    *,
    title: str,
    about: str = "",
    sentence: str,
    floor: Mapping[str, Numbers] | None = None,
    dots: Mapping[str, Sequence[tuple[float, float]]] | None = None,
    crossings: Mapping[str, float] | None = None,
    measured: Measured = None,
    by: str = "",
) -> Curves:
    """Draw seconds over bytes, in panels side by side.

    nbytes      the values of x
    panels      panel title -> {curve: seconds, one for each of nbytes}
    sentence    a description of the picture, which replaces it where none can be shown
    floor       panel title -> lower bound in seconds: a dotted line, with the area below it tinted
    dots        panel title -> (bytes, seconds) of runs
    crossings   panel title -> a size in bytes to mark on the first curve
    measured    panel title -> published measurements (bytes, seconds)
    by          who measured them, for the legend
    """
    if not len(nbytes):
        raise ValueError("there are no sizes to draw over; give at least one in nbytes")
    check_measured(panels, measured, by)
    numbers("nbytes", nbytes, 1, least=0)
    for label, seconds in (line for lines in panels.values() for line in lines.items()):
        numbers(f"the seconds of {label!r}", np.nan_to_num(numbers(repr(label), seconds)), 1, len(nbytes), least=0)
    figure, axes = figure_of(panels, "bytes of the tensor")
    points = [point for points in (measured or {}).values() for point in points]
    drawn = [value for lines in (*panels.values(), floor or {}) for seconds in lines.values() for value in seconds]
    drawn += [seconds for _, seconds in points]
    width = [min(nbytes[0], *sizes), max(nbytes[-1], *sizes)] if (sizes := [size for size, _ in points]) else nbytes
    for ax, (name, lines) in zip(axes, panels.items()):
        _dress(ax, width, drawn)
        if floor and name in floor:
            ax.fill_between(nbytes, floor[name], 1e-9, color=SOFT, lw=0, zorder=1)
            ax.text(0.97, 0.06, "out of reach", transform=ax.transAxes, ha="right", color=DIM, size=9, style="italic")
        for index, (label, seconds) in enumerate(lines.items()):
            ax.plot(nbytes, seconds, color=HUES[index % 8], ls=DASHES[index % 4], lw=2, label=label, zorder=3)
        if floor and name in floor:
            ax.plot(nbytes, floor[name], color=DIM, ls=(0, (1, 1.6)), lw=1.4, label="lower bound", zorder=2)
        if dots and dots.get(name):
            ax.plot(*zip(*dots[name]), "o", ms=5.5, mfc=PAPER, mec=INK, mew=1.3, label="runs", zorder=4)
        draw_measured(ax, measured, name, by)
        if crossings and name in crossings:
            _mark(ax, crossings[name], nbytes, next(iter(lines.values())))
    return Curves(title, about, sentence, figure, bytes_text)


def check_measured(panels: Collection[str], measured: Collection[str] | None, by: str) -> None:
    """Raise ValueError if it is not given who measured the points, or if they belong to a missing panel."""
    if measured and not by:
        raise ValueError("measured points need `by`: who measured them, and where it is published")
    for name in measured or ():
        if name not in panels:
            raise ValueError(f"measured has points for {name!r}; the panels are {', '.join(map(repr, panels))}")


def draw_measured(ax: Any, measured: Measured, name: str, by: str) -> None:
    """Diamonds at the (x, y) of a panel, above everything else, even where they are on the edge of the panel."""
    looks = {"ms": 5.5, "mfc": INK, "mec": PAPER, "mew": 0.8, "zorder": 5, "clip_on": False}
    if measured and measured.get(name):
        ax.plot(*zip(*measured[name]), "D", label=f"measured by {by}", **looks)


def figure_of(panels: Iterable[str], along: str, is_log: bool = True) -> tuple[Any, Any]:
    """(figure, axes) with one panel for each of these titles, side by side on one scale."""
    from matplotlib.figure import Figure  # slow to import; without pyplot, no figure to close and no backend to choose

    titles = list(panels)
    if not titles:
        raise ValueError("there are no panels to draw; give at least one, as {'a title': {'a line': ...}}")
    figure = Figure(figsize=(WIDTH / 100, HEIGHT / 100), layout="constrained")
    axes = figure.subplots(1, len(titles), sharey=True, squeeze=False)[0]
    for ax, title in zip(axes, titles):
        ax.set_title(one_line(title), loc="left", fontsize=9.5, fontweight="bold", color=INK, parse_math=False)
        ax.set_xlabel(one_line(along), color=DIM, fontsize=9, parse_math=False)
        ax.set(facecolor="none")
        ax.tick_params(which="both", colors=DIM, labelsize=9, length=0, pad=6)
        ax.spines[["top", "right", "left", "bottom"]].set_visible(False)
        ax.spines["bottom"].set(visible=not is_log, color=LINE)
        ax.grid(which="major", axis="both" if is_log else "y", color=LINE, lw=0.6, zorder=0)
    return figure, axes


def explain(figure: Any) -> None:
    """Put a legend below the panels, with each name once."""
    figure.legends.clear()
    handles: dict[str, Any] = {}
    for ax in figure.axes:
        for handle, name in zip(*ax.get_legend_handles_labels()):
            handles.setdefault(one_line(name), handle)
    legend = figure.legend(
        handles.values(), handles, loc="outside lower center", ncols=9, frameon=False, labelcolor=INK, fontsize=9
    )
    for text in legend.get_texts():  # a name is not a formula, even if it has dollar signs
        text.set_parse_math(False)


def _dress(ax: Any, nbytes: Numbers, seconds: Sequence[float]) -> None:
    ax.set_xscale("log", base=2)
    xlim = (nbytes[0], nbytes[-1]) if 0 < nbytes[0] < nbytes[-1] else _around(nbytes)
    ax.set(yscale="log", xlim=xlim, ylim=_around(seconds))
    ax.set_xticks([2.0**power for power in range(5, 60, 5) if nbytes[0] <= 2.0**power <= nbytes[-1]])
    ax.xaxis.set_major_formatter(lambda value, place: bytes_text(value))
    ax.yaxis.set_major_formatter(lambda value, place: time_text(value, "s"))


def _around(amounts: Iterable[float]) -> tuple[float, float]:
    """Limits slightly below the least and above the most amount. A logarithmic axis cannot show 0, inf or NaN."""
    positive = [amount for amount in amounts if 0 < amount < math.inf]
    return min(positive, default=1e-6) / 1.6, max(positive, default=1e-6) * 1.6


def _mark(ax: Any, size: float, nbytes: Numbers, seconds: Numbers) -> None:
    """Draw a dashed line from the axis up to the curve, with the size written at its end."""
    height = float(np.exp(np.interp(np.log(size), np.log(nbytes), np.log(seconds))))
    ax.plot([size, size], [1e-9, height], color=DIM, lw=1, ls=(0, (3, 3)), zorder=2)
    beside = {"xytext": (-6, 9), "textcoords": "offset points", "ha": "right", "va": "bottom", "zorder": 5}
    ax.annotate(bytes_text(size), (size, height), color=INK, fontsize=9, fontweight="bold", **beside)


def _as_svg(figure: Any) -> str:
    """The figure as an SVG element with colours by their names in the style sheet."""
    from matplotlib import rc_context

    sheet = io.StringIO()
    with rc_context({"svg.fonttype": "path", "svg.hashsalt": "tplab"}):
        figure.savefig(sheet, format="svg", facecolor="none", metadata={"Date": None})
    text = sheet.getvalue()
    text = text[text.index("<svg") :]
    # Its <style> would apply to the whole page; the widget's JavaScript sets the same on the element.
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"(\d\d\.\d\d)\d+", r"\1", re.sub(r"\s+", " ", text))
    for colour, token in (_TOKENS | _HUES).items():
        text = text.replace(colour, token)
    return text


# --- under the pointer ------------------------------------------------------------------------------------------------


def readings(figure: Any, x_text: Callable[[float], str]) -> list[dict[str, Any]]:
    """For each panel of a drawn figure, the values to show on hover.

    box     its left, top, right and bottom, as fractions of the figure
    stops   from left to right: [position in the box, x as text, [[line, y as text], ...]], no more than a pointer can
            distinguish. A line that shares its label with others has its own name as its `gid`
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
    """The position of x between the left side of the panel, 0, and the right side, 1."""
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
    """A line's value at x. Dots have one only at their own x, a staircase has that of its step, and other lines are
    interpolated as they are drawn, also on logarithmic axes."""
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
