"""`scatter`: forecasts over measurements, one dot per run, each with its name under the pointer."""

from __future__ import annotations

import math
import re

import pytest

from tplab.widgets import Dot, scatter
from tplab.widgets.curves import Curves

RUNS = {
    "one node": {"fitted": [Dot(2.0, 1.9, "dp 8"), Dot(0.5, 0.6, "tp 8")], "left out": [Dot(4.0, 4.0, "tp 2")]},
    "two nodes": {"fitted": [Dot(80.0, 2.0, "pp 2")]},
}


def card() -> Curves:
    return scatter(RUNS, title="t", about="a", sentence="s", interval=(0.9, 1.2))


def test_every_dot_is_drawn_where_it_is():
    drawn = [ax.lines for ax in card().figure.axes]
    dots = [[(*line.get_xdata(), *line.get_ydata()) for line in lines[1:]] for lines in drawn]
    assert dots == [[(2.0, 0.5, 1.9, 0.6), (4.0, 4.0)], [(80.0, 2.0)]]
    for ax in card().figure.axes:
        assert ax.get_xlim() == ax.get_ylim() == pytest.approx((0.5 / 1.4, 80 * 1.4))


def test_the_band_is_the_interval():
    (band,) = card().figure.axes[0].collections
    sides = band.get_paths()[0].vertices
    assert {round(float(x / y), 6) for x, y in sides} == {0.9, 1.2}


def test_every_dot_has_its_name_and_both_times():
    one, two = card().content["panels"]
    said = [(x, dict(values)) for _, x, values in one["stops"] + two["stops"]]
    assert ("dp 8: measured 2 s", {"forecast, fitted": "1.9 s"}) in said
    assert ("tp 2: measured 4 s", {"forecast, left out": "4 s"}) in said
    assert ("pp 2: measured 80 s", {"forecast, fitted": "2 s"}) in said and len(said) == 4


def test_groups_differ_also_without_colour():
    marks = {line.get_marker() for ax in card().figure.axes for line in ax.lines[1:]}
    assert len(marks) == 3 and card().picture().startswith(b"\x89PNG")
    assert not re.search("#[0-9a-f]{6}", card().content["drawing"]), "a colour that no theme changes"


@pytest.mark.parametrize("runs", [{}, {"a panel": {}}, {"a panel": {"fitted": []}}])
def test_nothing_to_draw(runs: dict[str, dict[str, list[Dot]]]):
    with pytest.raises(ValueError, match="there is no dot to draw"):
        scatter(runs, title="t", sentence="s")


@pytest.mark.parametrize("dot", [Dot(0.0, 1.0, "dp 8"), Dot(math.nan, 1.0, "dp 8"), Dot(1.0, math.inf, "dp 8")])
def test_times_that_no_axis_has(dot: Dot):
    with pytest.raises(ValueError, match=r"'dp 8' has .* s; logarithmic axes need positive times"):
        scatter({"a panel": {"fitted": [dot], "a group without runs": []}}, title="t", sentence="s")
