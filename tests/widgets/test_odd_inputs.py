"""Every widget has a picture, whatever its title and names hold, and also where there is no time, no size, nothing."""

# Many calls here are wrong on purpose.
# pyright: reportArgumentType=false

from __future__ import annotations

import re
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
import traitlets

from tests.widgets.memories import held
from tplab import Mesh, P
from tplab.errors import ScheduleError, SpecError
from tplab.schedules import Costs, Schedule, gpipe, simulate
from tplab.torch import run
from tplab.trace import Memory, Recorder
from tplab.widgets import (
    Bars,
    Row,
    animate,
    curves,
    experts,
    gantt,
    knob,
    layout_lab,
    levels,
    matrices,
    memory_timeline,
    pipeline_lab,
    scatter,
    shards,
    tiles,
    timeline,
)
from tplab.widgets.scatter import Dot

ONCE = simulate(gpipe(2, 2))
NO_TIME = simulate(gpipe(2, 2), Costs(0, 0, 0))
NOTHING = simulate(Schedule([[], []]))

WITHOUT_TIME_OR_SIZE = {
    "gantt of no time": lambda: gantt(NO_TIME),
    "gantt of nothing": lambda: gantt(NOTHING, memory_limit=1),
    "gantt of nothing beside something": lambda: gantt(NOTHING, ONCE),
    "animate no time": lambda: animate(NO_TIME.trace),
    "animate nothing": lambda: animate(NOTHING.trace),
    "timeline of no time": lambda: timeline(NO_TIME.trace),
    "timeline of nothing": lambda: timeline(NOTHING.trace),
    "timeline of no time over a prediction of none": lambda: timeline(NO_TIME.trace, NO_TIME),
    "timeline of some time over a prediction of none": lambda: timeline(ONCE.trace, NO_TIME),
    "shards of no rows": lambda: shards(Mesh(tp=2), (0, 4), P("tp")),
    "shards of no columns": lambda: shards(Mesh(tp=2), (4, 0), P("tp")),
    "shards of an empty vector": lambda: shards(Mesh(tp=2), (0,), P("tp")),
    "shards of an empty dim that is not drawn": lambda: shards(Mesh(tp=2), (0, 4, 4), P(None, "tp")),
    "shards of a product of nothing": lambda: shards(Mesh(tp=2), x=((2, 0), P(None, "tp")), w=((0, 4), P("tp"))),
    "matrices, none": lambda: matrices({}),
    "matrices without rows": lambda: matrices({"a": np.zeros((0, 3))}),
    "matrices without columns": lambda: matrices({"a": np.zeros((3, 0))}),
    "an empty vector": lambda: matrices({"a": np.zeros(0)}),
    "knob at zero": lambda: knob("t", "c", {1: Bars([Row("a", {"x": 0.0})], "s")}),
    "knob without parts": lambda: knob("t", "c", {1: Bars([Row("a", {})], "s")}),
    "levels of nothing held": lambda: levels({"p": {"l": ([0, 1], [0, 0])}}, title="t", sentence="s", along="x"),
    "levels without points": lambda: levels({"p": {"l": ([], [])}}, title="t", sentence="s", along="x", stairs=True),
    "memory of nothing": lambda: memory_timeline(Memory(Mesh(dp=1), [held([(0.0, {})])])),
    "memory in no time": lambda: memory_timeline(Memory(Mesh(dp=1), [held([(0.0, {}), (0.0, {"other": 8})])])),
    "curves at zero": lambda: curves([1, 2], {"p": {"l": [0, 0]}}, title="t", sentence="s"),
    "levels that diverge": lambda: levels({"p": {"l": ([0, 1], [1, np.inf])}}, title="t", sentence="s", along="x"),
    "levels of no number": lambda: levels({"p": {"l": ([0, 1], [np.nan] * 2)}}, title="t", sentence="s", along="x"),
    "curves that diverge": lambda: curves([1, 2], {"p": {"l": [1, np.inf]}}, title="t", sentence="s"),
    "curves of which one panel has more": lambda: curves(
        *([1, 2], {"p": {"l": [1, 2]}, "q": {"l": [1, 2]}}),
        floor={"p": [1, 1]},
        dots={"p": [(1, 1)]},
        crossings={"p": 1.5},
        title="t",
        sentence="s",
    ),
    "a weight of 16 bits": lambda: matrices({"w": torch.ones(2, 2, dtype=torch.bfloat16, requires_grad=True)}),
    "curves of one size, zero": lambda: curves([0], {"p": {"l": [1e-6]}}, title="t", sentence="s"),
}


@pytest.mark.parametrize("name", WITHOUT_TIME_OR_SIZE)
def test_there_is_a_picture_without_time_or_size(name: str):
    card = WITHOUT_TIME_OR_SIZE[name]()
    assert card.picture().startswith(b"\x89PNG")
    assert card.sentence


def test_numbers_that_cannot_be_drawn_are_named():
    line = {"p": {"l": ([2, 1], [1, 2])}}
    for x in (0, np.nan, np.inf):
        for panels, predicted in (({"p": {"l": ([x, 1], [1, 2])}}, None), (line, {"p": {"l": ([x, 1], [1, 2])}})):
            with pytest.raises(ValueError, match=f"a point at {x}; an axis of powers of two needs positive numbers"):
                levels(panels, predicted=predicted, doubling=True, title="t", sentence="s", along="x")
    for amount in (np.nan, np.inf):
        with pytest.raises(ValueError, match=f"'a' has {amount} for 'x'"):
            knob("t", "c", {1: Bars([Row("a", {"x": amount})], "s")})
    for limit in (np.nan, -1, 0, "2"):
        with pytest.raises(ValueError, match=f"memory_limit is {limit!r}; it must be None or a number above 0"):
            gantt(ONCE, memory_limit=limit)
    with pytest.raises(TypeError, match="'w' has complex numbers"):
        matrices({"w": np.array([1j])})


LINES = {"title": "t", "sentence": "s"}
REFUSED = {
    "layout_lab(3)": (lambda: layout_lab(3), "model is 3; it must be a str or a Model"),
    "a plan as text": (lambda: layout_lab(plan="dp8"), "plan is 'dp8'; it must be a Plan or None"),
    "measured without plans": (
        lambda: layout_lab(measured=[1]),
        "a row of measured is 1; it must be a tuple or a list",
    ),
    "an option without bars": (lambda: knob("t", "c", {1: None}), "the option 1 is None; it must be a Bars"),
    "a negative bar": (lambda: knob("t", "c", {1: Bars([Row("a", {"x": -1})], "s")}), "'a' has -1 for 'x'"),
    "one cost": (lambda: pipeline_lab(stage_costs=5), "stage_costs is 5; give a list of numbers"),
    "a paper's name": (lambda: pipeline_lab("1F1B"), "rule is '1F1B'; did you mean one_f_one_b?"),
    "a size of NaN": (lambda: shards(Mesh(tp=4), (np.nan, 8), P("tp")), "the shape of x has nan; give numbers from 0"),
    "a negative size": (lambda: shards(Mesh(tp=4), (-8, 8), P("tp")), "the shape of x has -8; give numbers from 0"),
    "half a row": (lambda: shards(Mesh(tp=4), (8.5, 8), P()), r"the shape of x is (8.5, 8); give whole numbers"),
    "a tensor": (lambda: shards(Mesh(tp=4), x=torch.ones(8, 8)), "x is a Tensor; give its shape and its P"),
    "points": (lambda: levels({"p": {"a": [(1, 2)]}}, along="x", **LINES), "'a' is [(1, 2)]; give a pair of lists"),
    "fewer y": (
        lambda: levels({"p": {"a": ([1, 2], [1])}}, along="x", **LINES),
        "y of 'a' has 1 of 2 numbers, one for each x",
    ),
    "fewer seconds": (
        lambda: curves([1, 2], {"p": {"a": [1]}}, **LINES),
        "seconds of 'a' has 1 of 2 numbers, one for each x",
    ),
    "negative bytes": (lambda: curves([1, -4], {"p": {"a": [1, 2]}}, **LINES), "nbytes has -4; give numbers from 0"),
    "bytes of NaN": (lambda: curves([1, np.nan], {"p": {"a": [1, 2]}}, **LINES), "nbytes has nan; give numbers from 0"),
    "negative seconds": (lambda: curves([1, 2], {"p": {"a": [1, -2]}}, **LINES), "seconds of 'a' has -2; give numbers"),
    "rows of two lengths": (lambda: matrices({"X": [[1, 2], [3]]}), "'X' is [[1, 2], [3]]; give numbers, in rows of"),
    "text": (lambda: matrices({"X": "a"}), "'X' is 'a'; give numbers"),
    "no matrix": (lambda: matrices({"X": None}), "'X' is None; give numbers"),
    "a matrix alone": (lambda: matrices(3), "not an int"),
    "a step as text": (lambda: gantt(ONCE, step="a"), "step is 'a', and there are steps 0 to"),
    "turned": (lambda: scatter({"p": {"g": [Dot(1, 1, "d")]}}, interval=(2, 1), **LINES), "interval is (2, 1)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_shown_is_named_with_the_way_out(name: str):
    show, says = REFUSED[name]
    with pytest.raises((TypeError, ValueError, SpecError, traitlets.TraitError), match=re.escape(says)):
        show()


@pytest.mark.parametrize("show", [animate, timeline, experts, gantt, memory_timeline, tiles, matrices, shards])
def test_a_widget_says_what_it_shows(show):
    out = run(lambda: None, Mesh(tp=1))
    way_out = {memory_timeline: "; give its memory", gantt: "", tiles: "", matrices: "", shards: ""}
    with pytest.raises(TypeError, match=f", not a Result{way_out.get(show, '; give its trace')}$"):
        show(out)


def titled(text: str) -> dict:
    """Every widget, with this text wherever it takes one."""
    run = simulate(gpipe(2, 2).named(text))
    recorder = Recorder(Mesh(tp=2), text, "torch")
    recorder.add(0, "compute", text, 0, 1, where=text)
    trace = recorder.trace(unit="steps")
    return {
        "matrices": matrices({text: np.eye(2)}, title=text),
        "knob": knob(text, text, {text: Bars([Row(text, {text: 1.0}, text)], text)}, about=text, unit=text),
        "levels": levels({text: {text: ([0, 1], [1, 2])}}, title=text, about=text, sentence=text, along=text),
        "curves": curves([1, 2], {text: {text: [1e-6, 2e-6]}}, title=text, about=text, sentence=text),
        "gantt": gantt(run, run),
        "shards": shards(Mesh(tp=2), (4, 4), P("tp"), name=text),
        "animate": animate(trace),
        "timeline": timeline(trace),
        "memory": memory_timeline({text: Memory(Mesh(dp=1), [held([(0, {"other": 8})], text)])}, title=text),
        "overlay": timeline(run.trace, run, step=2),
    }


@pytest.mark.parametrize("text", ["two\nlines", "a\ttab", "a\0zero, a\x85line", "$x^$"])
def test_titles_and_names_may_hold_anything(text: str):
    for name, card in titled(text).items():
        assert card.picture().startswith(b"\x89PNG"), name
    ElementTree.fromstring(gantt(gpipe(2, 2).named(text)).to_svg())


def test_what_is_missing_is_named():
    with pytest.raises(ScheduleError, match="the schedule has no actions"):
        timeline(NOTHING.trace, NOTHING)
    for draw in (
        lambda panels: levels(panels, title="t", sentence="s", along="x"),
        lambda panels: curves([1, 2], panels, title="t", sentence="s"),
    ):
        with pytest.raises(ValueError, match="there are no panels to draw"):
            draw({})
    with pytest.raises(ValueError, match="there are no sizes to draw over"):
        curves([], {"p": {}}, title="t", sentence="s")
