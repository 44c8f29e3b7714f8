"""`curves`: drawn once, in the page's colours in the browser and as a picture where no kernel runs."""

from __future__ import annotations

import io
import re
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from tplab.widgets.curves import HEIGHT, MARGIN, WIDTH, Curves, curves
from tplab.widgets.levels import levels

NBYTES = 2.0 ** np.arange(8, 21)


def two_lines() -> Curves:
    return curves(
        NBYTES,
        {"one": {"ring": 1e-5 + NBYTES / 1e9, "tree": 1e-6 + NBYTES / 1e8}, "two": {"ring": NBYTES / 1e9}},
        title="A title",
        about="modelled",
        sentence="Two lines that cross.",
        floor={"one": np.full(13, 1e-6), "two": np.full(13, 1e-6)},
        dots={"one": [(1024, 1.1e-5)], "two": [(2048, 2e-6)]},
        crossings={"one": 1000.0, "two": 2048.0},
    )


@pytest.fixture(scope="module")
def card() -> Curves:
    return two_lines()


def test_it_is_a_sentence_and_a_picture(card: Curves):
    assert repr(card) == "Two lines that cross."
    data, _ = card._repr_mimebundle_()
    assert data["text/plain"] == "Two lines that cross."
    image = Image.open(io.BytesIO(card.picture()))
    assert image.width == WIDTH + 2 * MARGIN and image.height > HEIGHT
    assert len(card.picture()) < 60_000


def test_the_drawing_takes_its_colours_from_the_page(card: Curves):
    drawing = card.content["drawing"]
    assert re.findall(r"#[0-9a-f]{6}\b", drawing) == []
    for token in ("ink", "dim", "line", "soft", "paper", "c0", "c1"):
        assert f"var(--{token})" in drawing


def test_the_drawing_is_one_element_and_styles_nothing_else(card: Curves):
    drawing = ElementTree.fromstring(card.content["drawing"])
    tags = {element.tag.rpartition("}")[2] for element in drawing.iter()}
    assert drawing.tag.endswith("svg")
    assert not tags & {"style", "script", "metadata", "image"}
    assert len(card.content["drawing"]) < 100_000


def test_two_of_the_same_are_the_same(card: Curves):
    assert two_lines().content == card.content
    assert two_lines().picture() == card.picture()


def test_a_crossing_is_written_in_bytes(card: Curves):
    texts = [text.get_text() for ax in card.figure.axes for text in ax.texts]
    assert texts == ["out of reach", "1000 B", "out of reach", "2 KiB"]


def test_nothing_but_lines_is_needed():
    card = curves(NBYTES, {"one": {"ring": NBYTES / 1e9}}, title="A title", sentence="A line.")
    assert "svg" in card.content["drawing"]
    assert [text.get_text() for text in card.figure.axes[0].texts] == []


def test_what_is_under_the_pointer(card: Curves):
    """Every size has the seconds of each line there, between its points where it has none; dots only at their own."""
    one, two = card.content["panels"]
    left, top, right, bottom = one["box"]
    assert 0 < left < right < two["box"][0] < 1 and 0 < top < bottom < 1
    assert [at for at, _, _ in one["stops"]] == pytest.approx(np.linspace(0, 1, 13), abs=1e-3)
    _, size, values = one["stops"][2]
    assert (size, dict(values)) == (
        "1 KiB",
        {"ring": "11 µs", "tree": "11.2 µs", "lower bound": "1 µs", "runs": "11 µs"},
    )
    assert dict(one["stops"][3][2]).keys() == {"ring", "tree", "lower bound"}


def test_what_a_staircase_is_at_the_steps_of_another():
    lines = {"a": ([0, 2, 4], [1024, 3072, 0]), "b": ([1, 3], [2048, 1024])}
    card = levels({"one": lines}, title="t", sentence="s.", along="seconds", stairs=True)
    (panel,) = card.content["panels"]
    assert [(x, dict(values)) for _, x, values in panel["stops"]] == [
        ("seconds: 0", {"a": "1 KiB"}),
        ("seconds: 1", {"a": "1 KiB", "b": "2 KiB"}),
        ("seconds: 2", {"a": "3 KiB", "b": "2 KiB"}),
        ("seconds: 3", {"a": "3 KiB", "b": "1 KiB"}),
        ("seconds: 4", {"a": "0 B"}),
    ]


def test_measured_points_say_by_whom():
    sizes, line = [1024, 2048], {"all_reduce": {"ring": [1e-5, 2e-5]}}
    points = {"all_reduce": [(1500.0, 1.2e-5)]}
    drawn = curves(sizes, line, title="t", sentence="s", measured=points, by="aiconfigurator, 8 H100").figure
    assert [line.get_label() for line in drawn.axes[0].lines] == ["ring", "measured by aiconfigurator, 8 H100"]
    assert drawn.axes[0].lines[1].get_xydata().tolist() == [[1500.0, 1.2e-5]]
    with pytest.raises(ValueError, match="measured points need `by`"):
        curves(sizes, line, title="t", sentence="s", measured=points)


def test_a_card_that_is_drawn_again_has_one_legend():
    card = two_lines()
    card.about = "twice"
    card.redraw()
    assert card.content["about"] == "twice" and len(card.figure.legends) == 1


def test_measured_points_are_never_cut_off():
    """They may be far above the lines, beside the sizes of the lines, or in the second panel only."""
    sizes, line = [1024, 2048], {"ring": [1e-5, 2e-5]}
    points = {"two": [(512.0, 1e-6), (8192.0, 5e-2)]}
    figure = curves(sizes, {"one": line, "two": line}, title="t", sentence="s", measured=points, by="us").figure
    ax = figure.axes[1]
    for (low, high), least, most in ((ax.get_xlim(), 512, 8192), (ax.get_ylim(), 1e-6, 5e-2)):
        assert low <= least < most <= high
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["ring", "measured by us"]
    with pytest.raises(ValueError, match="measured has points for 'three'; the panels are 'one', 'two'"):
        curves(sizes, {"one": line, "two": line}, title="t", sentence="s", measured={"three": points["two"]}, by="us")


def test_between_two_points_the_tooltip_reads_the_line_that_is_drawn():
    """On logarithmic axes, the line from (1 KiB, 10 us) to (4 KiB, 40 us) goes through (2 KiB, 20 us)."""
    line, points = {"all_reduce": {"ring": [1e-5, 4e-5]}}, {"all_reduce": [(2048.0, 3e-5)]}
    card = curves([1024, 4096], line, title="t", sentence="s", measured=points, by="us")
    _, (_, x, values), _ = card.content["panels"][0]["stops"]
    assert (x, values) == ("2 KiB", [["ring", "20 µs"], ["measured by us", "30 µs"]])
