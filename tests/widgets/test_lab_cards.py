"""The cards that labs draw besides traces: `knob` and `matrices`."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import traitlets
from PIL import Image

from tplab.widgets.knob import Bars, Knob, Row, knob
from tplab.widgets.matrices import Matrices, Panel, matrices, number_text

OPTIONS = {
    size: Bars(
        [
            Row("1 rank", {"computing": 4e-6 * size}),
            Row("2 ranks", {"computing": 2e-6 * size, "the sum": 1e-6}, "faster"),
        ],
        f"seen at {size}",
    )
    for size in (1, 1024)
}


def turned(**given) -> Knob:
    return knob("A title", "the size", OPTIONS, **given)


def test_a_knob_has_options_and_can_be_turned():
    card = turned(start=1024)
    assert (card.index, card.option) == (1, 1024)
    card.index = 0
    assert card.option == 1
    for wrong in (-1, 2):
        with pytest.raises(traitlets.TraitError, match=f"index is {wrong}; give one from 0 to 1"):
            card.index = wrong
    assert turned().option == 1
    with pytest.raises(ValueError, match="start is 7; it must be one of the options, 1, 1024"):
        turned(start=7)
    with pytest.raises(ValueError, match="an option at least"):
        knob("A title", "the size", {})
    with pytest.raises(ValueError, match="a bar at least"):
        knob("A title", "the size", {1: Bars([], "")})


def drawn(card: Knob, index: int = 0) -> tuple[list[float], list[str], list[tuple[tuple[str, str], ...]]]:
    """The widths of the bars' parts at an option, what is written there, and what the hints say."""
    there = [part for part in card.bars.parts if part.when.begin < index <= part.when.end]
    widths = [part.place[2] for part in there if part.method == "box" and dict(part.look).get("fill")]
    marks = card.bars.marks
    hints = [marks[part.mark].rows for part in there if part.mark >= 0]
    return widths, [part.text for part in there if part.text], hints


def test_a_part_that_is_too_narrow_for_its_name_has_its_number():
    bars = Bars([Row("one", {"gathered parameters": 100.0, "all the rest": 1000.0, "x": 5.0})], "")
    _, texts, _ = drawn(knob("A title", "the size", {1: bars}, unit="B"))
    assert "100 B" in texts and "all the rest 1000 B" in texts
    assert not any("gathered" in text or text.startswith("x") for text in texts)


def test_a_knob_knows_everything_before_it_is_turned():
    """Parts are shares of the longest bar of their option; the browser has the pictures of all options."""
    card = turned()
    assert card.colours == {"computing": -1, "the sum": 0}
    assert [option["name"] for option in card.content["options"]] == ["1", "1,024"]
    widths, texts, hints = drawn(card)
    longest = widths[0] + 1  # a pixel is between parts
    assert [(width + 1) / longest for width in widths] == pytest.approx([1, 0.5, 0.25])
    assert {"computing", "4 µs", "3 µs", "faster"} <= {*texts}  # the total says what one part is
    assert hints[1] == (("", "2 ranks"), ("computing", "2 µs"), ("the sum", "1 µs"), ("in total", "3 µs"))
    assert drawn(card, 1)[1] != texts


def longest(card: Knob) -> list[float]:
    return [max(drawn(card, index)[0], default=0) for index in range(len(card.options))]


def test_a_knobs_settings_have_one_scale_unless_they_are_far_apart():
    def card(*sizes: float, **given: Any) -> Knob:
        return knob("A title", "s", {n: Bars([Row("a", {"computing": n})], "") for n in sizes}, about="A", **given)

    first, second = longest(card(1.0, 2.0))
    assert (first + 1) / (second + 1) == pytest.approx(0.5)
    assert len({*longest(card(1.0, 10.0))}) == 1 and "a scale of its own" in card(1.0, 10.0).content["about"]
    assert len({*longest(card(1.0, 2.0, one_scale=False))}) == 1
    first, second = longest(card(1.0, 10.0, one_scale=True))
    assert (first + 1) / (second + 1) == pytest.approx(0.1) and card(1.0, 2.0).content["about"] == "A"
    assert len(longest(card(0.0, 1.0))) == 2  # a setting without bars has no scale


def test_a_knobs_waiting_is_hatched():
    card = knob("A title", "s", {1: Bars([Row("a", {"computing": 1.0, "waiting": 1.0})], "")})
    assert card.colours["waiting"] == -1 and card._legend()[1].sign == "hatch"
    assert [part.place[2] for part in card.bars.parts if part.method == "hatch"] == [max(drawn(card)[0])]


@pytest.mark.parametrize(
    ("unit", "text"), [("s", "4 µs"), ("steps", "0.000004"), ("B", "0.000004 B"), ("x", "0.000004 x")]
)
def test_a_knobs_unit(unit: str, text: str):
    assert drawn(turned(unit=unit))[2][0][-1] == ("in total", text)


def test_a_knobs_measured_value_is_a_mark_that_says_by_whom():
    """A mark is on the scale of the bars, also where it is beyond the longest of them."""
    rows = [Row("1 rank", {"computing": 4e-6}), Row("2 ranks", {"computing": 2e-6}, "faster", measured=8e-6)]
    card = knob("A title", "the size", {1: Bars(rows, "A sentence.")}, by="the NCCL team, 2 H100")
    widths, _, hints = drawn(card)
    marks = [part.points for part in card.bars.parts if part.method == "line" and len({x for x, _ in part.points}) == 1]
    left = next(part.place[0] for part in card.bars.parts if part.method == "box")
    assert [(mark[0][0] - left) / (widths[0] + 1) for mark in marks] == pytest.approx([2])
    assert hints[-1] == (("", "2 ranks"), ("measured", "8 µs"), ("by", "the NCCL team, 2 H100"), ("bar", "2 µs"))
    assert card._legend()[-1].text == "measured by the NCCL team, 2 H100"
    said = "A sentence. Measured by the NCCL team, 2 H100: 8 µs for 2 ranks."
    assert card.content["options"][0]["sentence"] == said
    assert repr(card) == f"A title. the size: 1. At 1: {said}"
    less = [rows[0], Row("2 ranks", {"computing": 2e-6}, "faster", measured=7e-6)]
    other = knob("A title", "the size", {1: Bars(less, "A sentence.")}, by="the NCCL team, 2 H100")
    assert other.picture() != card.picture()


def test_a_knobs_measured_value_needs_who_measured_it():
    bars = {1: Bars([Row("1 rank", {"computing": 1.0}, measured=2.0)], "")}
    with pytest.raises(ValueError, match="'1 rank' has a measured value; say in `by` who measured it"):
        knob("A title", "the size", bars)
    for wrong in (-1.0, float("nan"), float("inf")):
        bars = {1: Bars([Row("1 rank", {"computing": 1.0}, measured=wrong)], "")}
        with pytest.raises(ValueError, match="give a number from 0"):
            knob("A title", "the size", bars, by="us")
    assert len(turned(by="us")._legend()) == 2  # nothing was measured, so no legend says it


def test_a_knob_without_a_kernel_is_a_sentence_and_a_picture():
    card = turned(start=1024)
    assert repr(card) == "A title. the size: 1, 1,024. At 1,024: seen at 1024"
    pictures = []
    for card.index in (0, 1):
        pictures.append(Image.open(io.BytesIO(card.picture())).convert("RGB"))
    assert pictures[0].size == pictures[1].size
    assert pictures[0].tobytes() != pictures[1].tobytes()


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (-3.0, "-3"),
        (1e-12, "0"),
        (0.5, "0.50"),
        (-12.345, "-12.35"),
        (123.4, "123"),
        (99999, "99999"),
        (1e5, "1e5"),
        (-2.5e7, "-2e7"),
        (0.004, "4e-3"),
        (float("nan"), "nan"),
        (-float("inf"), "-inf"),
    ],
)
def test_numbers_take_six_characters(number: float, text: str):
    assert number_text(number) == text
    assert len(text) <= 6


def test_matrices_say_their_shapes_and_show_their_numbers():
    card = matrices({"X": [[1, 2], [3, -4]], "v": np.arange(3)}, "Two")
    assert repr(card) == "Two: X [2, 2], v [3]"
    first, second = card.content["panels"]
    assert first["rows"] == [[["1", 0.25, False], ["2", 0.5, False]], [["3", 0.75, False], ["-4", -1.0, False]]]
    assert [entry[0] for entry in second["rows"][0]] == ["0", "1", "2"]


def test_large_matrices_are_cut():
    (panel,) = matrices({"W": np.ones((3, 5, 20))}).content["panels"]
    assert panel["title"] == "W, its first 8 × 8"
    assert [len(row) for row in panel["rows"]] == [8] * 8


def test_wrong_entries_are_marked():
    array, wrong = np.zeros((2, 2)), np.array([[False, True], [False, False]])
    card = Matrices([Panel("yours", array, wrong)], "A title", "One line.\nAnother.")
    assert repr(card) == "A title\nOne line.\nAnother."
    assert [[entry[2] for entry in row] for row in card.content["panels"][0]["rows"]] == wrong.tolist()
    marked, plain = (Image.open(io.BytesIO(Matrices([Panel("yours", array, w)]).picture())) for w in (wrong, None))
    assert marked.size == plain.size and marked.tobytes() != plain.tobytes()


def test_a_matrix_without_numbers_can_be_drawn():
    for array in (np.zeros((0, 3)), np.full((1, 1), np.nan), np.float64(7)):
        assert Image.open(io.BytesIO(matrices({"odd": array}).picture())).format == "PNG"


def test_wide_pictures_wrap():
    narrow = Image.open(io.BytesIO(matrices({"a": np.ones((2, 8))}).picture()))
    wide = Image.open(io.BytesIO(matrices({name: np.ones((2, 8)) for name in "abcd"}).picture()))
    assert wide.width <= 880 and wide.height > 2 * narrow.height - 40


def test_panels_that_have_room_side_by_side_are_in_one_row():
    """With smaller gaps, if it is these that are too wide."""
    rows = {"": np.ones((2, 3))}
    for count, gap, num_rows in ((3, 34, 1), (6, 12, 1), (9, 34, 2)):
        card = matrices({f"{letter}": rows[""] for letter in "abcdefghi"[:count]})
        assert card.content["gap"] == card.gap == gap
        picture = Image.open(io.BytesIO(card.picture()))
        assert picture.width <= 960 and (picture.height > 160) == (num_rows == 2)


def test_large_counts_have_separators():
    card = knob(
        "A title", "ranks", {1: Bars([Row("a", {"x": 24960.0, "y": 0.5}), Row("b", {"x": 33280})], "s")}, unit=""
    )
    assert [card.text(amount) for amount in (24960.0, 33280, 12, 0.5)] == ["24,960", "33,280", "12", "0.5"]
