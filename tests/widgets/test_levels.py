"""`levels`: how much is held, as staircases or as lines between runs, on one scale from 0."""

from __future__ import annotations

import io
import re

import numpy as np
import pytest
from PIL import Image

from tplab.widgets import levels
from tplab.widgets.curves import Curves
from tplab.widgets.levels import round_step

STAIRS = {"rank 0": ([0, 1, 4], [0, 3e6, 0]), "rank 1": ([0, 2, 3], [0, 1e6, 0])}


def two_panels() -> Curves:
    return levels(
        {"one": STAIRS, "two": {"rank 0": ([0, 1, 4], [0, 2e6, 0])}},
        title="A title",
        sentence="Two staircases.",
        along="steps",
        stairs=True,
        predicted={"one": STAIRS},
    )


@pytest.fixture(scope="module")
def card() -> Curves:
    return two_panels()


def test_it_is_a_sentence_and_a_picture(card: Curves):
    assert repr(card) == "Two staircases."
    assert Image.open(io.BytesIO(card.picture())).format == "PNG"
    assert len(card.picture()) < 60_000


def test_the_drawing_takes_its_colours_from_the_page(card: Curves):
    assert re.findall(r"#[0-9a-f]{6}\b", card.content["drawing"]) == []
    assert two_panels().content == card.content


def test_a_level_lasts_until_the_next_point(card: Curves):
    first, second = card.figure.axes
    assert [line.get_drawstyle() for line in first.lines] == ["steps-post"] * 4
    marked = [line for line in first.lines if line.get_marker() != "None"]
    tops = [(line.get_marker(), [line.get_xdata()[place] for place in line.get_markevery()]) for line in marked]
    assert tops == [("o", [1]), ("s", [2])]  # where each is at its highest
    assert first.get_ylim() == second.get_ylim() == (0, 1.06 * 3e6)
    assert [text.get_text() for text in card.figure.legends[0].get_texts()] == ["rank 0", "rank 1", "predicted"]


def test_each_line_has_a_prediction_of_its_own_under_the_pointer(card: Curves):
    at_one = {stop[1]: dict(stop[2]) for stop in card.content["panels"][0]["stops"]}["steps: 1"]
    assert at_one == {
        "rank 0": "2.86 MiB", "rank 1": "0 B", "rank 0, predicted": "2.86 MiB", "rank 1, predicted": "0 B"
    }  # fmt: skip


def test_runs_are_points_with_lines_between():
    card = levels({"": {"GPipe": ([1, 2, 8], np.array([1, 2, 8]))}}, title="T", sentence="S.", along="microbatches")
    (line,) = card.figure.axes[0].lines
    assert (line.get_marker(), line.get_drawstyle()) == ("o", "default")
    assert card.figure.axes[0].get_xlabel() == "microbatches"


def test_a_scale_that_frames_the_data_spreads_lines_that_are_close():
    lines = {"loss": {"a": (range(4), [3.4, 3.1, 2.9, 2.8]), "b": (range(4), [3.41, 3.12, 2.93, 2.84])}}
    framed, whole = (
        levels(lines, title="T", sentence="S.", along="steps", unit="", from_zero=from_zero).figure.axes[0]
        for from_zero in (False, True)
    )
    assert whole.get_ylim()[0] == 0
    low, high = framed.get_ylim()
    assert 2.7 < low < 2.8 < 3.41 < high < 3.5
    assert sum(low <= tick <= high for tick in framed.get_yticks()) >= 3
    alone = levels({"": {"a": ([0, 1], [2, 2])}}, title="T", sentence="S.", along="steps", from_zero=False)
    assert alone.figure.axes[0].get_ylim() == (2, 3)


def test_nothing_held_can_be_drawn():
    card = levels({"": {"rank 0": ([0, 1], [0, 0])}}, title="T", sentence="S.", along="steps", stairs=True)
    assert Image.open(io.BytesIO(card.picture())).format == "PNG"


@pytest.mark.parametrize("most", [1, 700, 1024, 5000, 400_000, 1 << 20, 2_600_000, 3 << 30, 9e15])
def test_the_grid_has_a_few_round_lines(most: float):
    step = round_step(most)
    assert 3 <= most / step <= 10


def test_other_amounts_have_their_own_grid():
    """A loss is no number of bytes: its lines are round in tens, and its points are a line where they are many."""
    assert round_step(3.9, "") == 0.5
    assert round_step(0.2, "") == pytest.approx(0.05)
    many = levels({"loss": {"a": (range(40), [4.0] * 40)}}, title="", sentence="", along="steps", unit="")
    few = levels({"loss": {"a": (range(4), [4.0] * 4)}}, title="", sentence="", along="steps", unit="")
    (many_axes,), (few_axes,) = many.figure.axes, few.figure.axes
    assert many_axes.yaxis.get_major_formatter()(3.5, 0) == "3.5"
    assert (many_axes.lines[0].get_marker(), few_axes.lines[0].get_marker()) == ("", "o")


def test_an_axis_of_powers_of_two_is_evenly_spaced():
    nodes = [1, 2, 4, 8, 16, 32, 64]
    card = levels({"": {"a": (nodes, nodes)}}, title="T", sentence="S.", along="nodes", unit="GB/s", doubling=True)
    (ax,) = card.figure.axes
    assert ax.get_xscale() == "log"
    assert [text.get_text() for text in ax.get_xticklabels()] == ["1", "2", "4", "8", "16", "32", "64"]
    places = [at for at, _, _ in card.content["panels"][0]["stops"]]
    assert np.diff(places) == pytest.approx([np.diff(places)[0]] * 6, abs=1e-3)
    assert card.content["panels"][0]["stops"][3][1:] == ["nodes: 8", [["a", "8 GB/s"]]]
    with pytest.raises(ValueError, match="a line has a point at 0; an axis of powers of two needs positive numbers"):
        levels({"": {"a": ([0, 1], [1, 2])}}, title="T", sentence="S.", along="nodes", doubling=True)


def test_an_axis_of_powers_of_two_leaves_some_out_where_there_are_many():
    sizes = [2**power for power in range(3, 33)]
    card = levels({"": {"a": (sizes, sizes)}}, title="T", sentence="S.", along="bytes", doubling=True)
    ticks = card.figure.axes[0].get_xticks()
    assert len(ticks) <= 9
    assert np.diff(np.log2(ticks)).tolist() == [4] * (len(ticks) - 1)


def test_measured_points_are_on_the_scale_and_say_by_whom():
    modelled = {"one": {"forecast": ([1, 2, 4], [5, 4, 3])}}
    card = levels(modelled, title="T", sentence="S.", along="nodes", unit="GB/s", measured={"one": [(2, 9)]}, by="us")
    (ax,) = card.figure.axes
    assert ax.get_ylim()[1] > 9
    assert [text.get_text() for text in card.figure.legends[0].get_texts()] == ["forecast", "measured by us"]
    (stop,) = [stop for stop in card.content["panels"][0]["stops"] if stop[1] == "nodes: 2"]
    assert stop[2] == [["forecast", "4 GB/s"], ["measured by us", "9 GB/s"]]
    with pytest.raises(ValueError, match="measured points need `by`"):
        levels(modelled, title="T", sentence="S.", along="nodes", measured={"one": [(2, 9)]})
