"""What the hint says is about the bar under the pointer: every bar of many traces and schedules is probed."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from playwright.sync_api import Page, expect

import tplab.torch as tt
from tests.browser.plain_page import Drawn, check_live_theme, draw, hint_over
from tests.hand_traces import ALL, send_over_wait
from tests.widgets.test_curves import two_lines
from tplab import Mesh, P, Trace
from tplab.schedules import one_f_one_b, simulate, zb_v
from tplab.trace import Recorder
from tplab.widgets import Bars, LossCurve, Row, animate, gantt, knob, timeline
from tplab.widgets.paper.card import Card
from tplab.widgets.score.score import COLLECTIVE, SEND, WAIT, score

TRACES = {**ALL, "send over wait": send_over_wait}

_CENTRES = """() => {
  const lanes = window.lanes, box = lanes.box.getBoundingClientRect(), { key, mark } = lanes.table;
  return [...mark.keys()].filter((part) => key[mark[part]] >= 0 && lanes.isThere(part)).map((part) => {
    const [left, top, width, height] = lanes.place(part);
    return [key[mark[part]], box.left + left + width / 2, box.top + top + height / 2, width];
  });
}"""


_REACH_LANES = """
const listen = Lanes.prototype.listen;
Lanes.prototype.listen = function () { window.lanes = this; listen.call(this); };
"""


def drawn_lanes(page: Page, widget: Card) -> Drawn:
    """The widget, with its lanes within reach of the test."""
    return draw(page, widget, more=_REACH_LANES)


EVERY = [(name, animate) for name in TRACES]
SOME = [(name, timeline) for name in ("gather 2x4", "mlp 4", "pipeline 4", "send over wait")]  # its bars are the same


@pytest.mark.parametrize("name, show", EVERY + SOME)
def test_the_hint_over_every_bar_of_a_trace_is_about_that_bar(page: Page, name: str, show: Callable):
    trace: Trace = TRACES[name]()
    drawn, piece = drawn_lanes(page, show(trace)), score(trace)
    events = trace.events
    probed = 0
    for row, x, y, width in page.evaluate(_CENTRES):
        kind, event = int(piece.bars["kind"][row]), events[int(piece.bars["row"][row])]
        if kind == WAIT or width < 6:
            continue
        said = drawn.hint_at(x, y)
        title, *rest = said.split("\n")
        assert f"rank {event.rank}" in title and event.op in title, said
        assert "waits" not in title
        if kind == SEND:
            assert f"rank {event.rank} sends" in title and title.endswith(f"to rank {event.peer}"), said
        if kind == COLLECTIVE:
            assert any(line.endswith(f"ranks {', '.join(map(str, event.group))}") for line in rest), said
        if event.where:
            assert any(line.endswith(event.where) for line in rest), said
        if kind == SEND and event.bytes:
            assert any(line.startswith("sends") for line in rest), said
        probed += 1
    assert probed


def test_a_wait_is_named_where_no_bar_is_and_beside_the_send_over_it(page: Page):
    drawn = drawn_lanes(page, animate(send_over_wait()))
    box = page.locator(".tpl-lanes").bounding_box()
    assert box is not None
    unit = (box["width"] - 66) / 3  # rank 0 sends from 0 to 1; until 3 it waits for rank 1
    said = drawn.hint_at(box["x"] + 58 + 0.5 * unit, box["y"] + 13)
    assert said.startswith("ring_shift: rank 0 sends piece a to rank 1")
    assert "rank 0 waits for piece b from rank 1" in said
    said = drawn.hint_at(box["x"] + 58 + 2 * unit, box["y"] + 13)
    assert said.startswith("rank 0 waits") and "piece b from rank 1" in said


@pytest.mark.parametrize("rule", [one_f_one_b(4, 8), zb_v(4, 8)], ids=["1F1B", "ZB-V"])
def test_the_hint_over_every_action_of_a_schedule_is_about_it(page: Page, rule):
    drawn, run = draw(page, gantt(rule)), simulate(rule)
    box = page.locator(".tpl-lanes").bounding_box()
    assert box is not None
    per_unit, lane = (box["width"] - 120) / run.makespan, 24 + 14 + 5
    for row in range(len(rule)):
        action, rank = rule.action(row), int(rule.rank[row])
        middle = (run.start[row] + run.end[row]) / 2
        x, y = box["x"] + 58 + middle * per_unit, box["y"] + 4 + rank * lane
        said = drawn.hint_at(x, y + 12)
        assert said.startswith(f"rank {rank}: {action.label} of stage {action.stage}"), said
        assert ("forward" in said.split("\n")[1]) == (action.kind == "F"), said
        times, held = run.activations(rank)
        now = held[max(place for place, time in enumerate(times) if time <= middle + 1e-9)]
        number = f"{now:g} microbatch" + ("" if now == 1 else "es")
        assert number in said, said
        below = drawn.hint_at(x, y + 24 + 6)  # the strip
        assert below.startswith(f"rank {rank} holds the activations of {number}"), below
        assert f"the rank runs {action.label} of stage {action.stage}" in below and "idles" not in below


def test_what_is_shown_of_a_timeline_is_kept_and_can_be_set(page: Page):
    """Where the reader looks closer is a state of the widget, so that a link has it."""
    card = timeline(TRACES["mlp 4"]())
    assert card.kept == ("step", "begin", "end") and (card.begin, card.end) == (0, 1)
    drawn_lanes(page, card)
    page.locator(".tplab").focus()
    page.keyboard.press("+")
    page.wait_for_function("() => window.model.get('end') < 1")
    share = (
        "() => { const { view: at, begin, end } = window.lanes; return at.map((t) => (t - begin) / (end - begin)); }"
    )
    assert page.evaluate("() => ['begin', 'end'].map((name) => window.model.get(name))") == pytest.approx(
        page.evaluate(share), abs=1e-5
    )
    page.evaluate("() => { model.set('begin', 0.25); model.set('end', 0.5); model.tell('change:begin'); }")
    assert page.evaluate(share) == pytest.approx([0.25, 0.5])
    card.begin, card.end = 0.5, 0.75
    drawn_lanes(page, card)
    assert page.evaluate(share) == pytest.approx([0.5, 0.75])


@pytest.mark.parametrize("show", [animate, timeline])
@pytest.mark.parametrize("name", ["mlp 4", "pipeline 4"])
def test_a_live_switch_of_the_theme_repaints_the_lanes(page: Page, name: str, show: Callable):
    draw(page, show(TRACES[name]()))
    check_live_theme(page, ".tpl-lanes canvas")


@pytest.mark.parametrize("name", ["gather 4", "all-reduce 8", "pipeline 4"])
def test_picture_and_controls_are_on_a_small_screen_together(page: Page, name: str):
    draw(page, animate(TRACES[name]()), width=1024, height=768)
    card = page.locator(".tplab").bounding_box()
    assert card is not None and card["height"] < 700


def test_work_on_a_timeline_has_a_legend_of_its_kinds(page: Page):
    draw(page, timeline(TRACES["mlp 4"]()))
    tools = page.locator(".tpl-legend")
    for text in ("matmul", "elementwise", "all_reduce", "idle"):
        expect(tools).to_contain_text(text)
    expect(tools).not_to_contain_text("norm")  # there is none in it


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_curves_say_what_they_are_under_the_pointer_and_by_keys(page: Page, theme: str):
    card = two_lines()
    drawn = draw(page, card, theme=theme)
    figure = page.locator(".tpl-curves")
    box = figure.bounding_box()
    assert box is not None
    for panel in card.content["panels"]:
        left, top, right, bottom = panel["box"]
        y = box["y"] + box["height"] * (top + bottom) / 2
        for at, size, values in panel["stops"][1:-1]:
            said = drawn.hint_at(box["x"] + box["width"] * (left + at * (right - left)), y)
            rows = "".join([size, *(name + text for name, text in values)])
            assert "".join(said.split()) == "".join(rows.split())
    assert drawn.hint_at(box["x"] + 3, box["y"] + 3) == ""
    figure.focus()
    page.keyboard.press("ArrowLeft")
    expect(page.locator(".tpl-say")).to_contain_text("ring")
    page.keyboard.press("Escape")
    expect(page.locator(".tpl-hint")).to_be_hidden()


def test_a_curve_that_is_drawn_again_says_what_it_has_become(page: Page):
    curve = LossCurve(4)
    drawn = draw(page, curve)
    for step in (1, 2, 3, 4):
        curve.losses[step] = 5.0 - step
    curve.draw()
    page.evaluate("([c]) => { window.model.set('content', c); window.model.tell('change:content'); }", [curve.content])
    expect(page.locator(".tpl-about")).to_have_text("step 4 of 4")
    left, top, right, bottom = curve.content["panels"][0]["box"]
    box = page.locator(".tpl-curves").bounding_box()
    assert box is not None
    said = drawn.hint_at(box["x"] + box["width"] * (left + right) / 2, box["y"] + box["height"] * (top + bottom) / 2)
    assert "step 2" in said and "3" in said.split("loss")[1]


def test_the_hint_of_what_was_measured_says_by_whom(page: Page):
    recorder = Recorder(Mesh(tp=2), "step", "torch")
    recorder.add(0, "compute", "mm", 0.0, 2.0)
    drawn = drawn_lanes(page, timeline(recorder.trace(), measured={"forward": 1.0, "step": 2.5}, by="a blog"))
    x, y = page.evaluate("""() => {
      const lanes = window.lanes, box = lanes.box.getBoundingClientRect();
      return [box.left + lanes.x(1), box.top + lanes.bottom - 10];
    }""")
    assert drawn.hint_at(x, y).split("\n") == ["step", "measured2.5 s", "bya blog", "whole trace2 s"]
    assert drawn.hint_at(x, y - 17).startswith("forward")
    assert page.locator(".tpl-barmark").count() == 0  # only bars are framed
    bars = {1: Bars([Row("1 rank", {"computing": 1.0}), Row("2 ranks", {"computing": 0.5}, measured=0.75)], "s")}
    card = knob("t", "c", bars, by="a blog")
    drawn, box = draw(page, card), page.locator(".tplab canvas[role=img]").bounding_box()
    mark = next(part for part in reversed(card.bars.parts) if part.mark >= 0)
    assert box is not None
    x, y, width, height = (length * box["width"] / card.bars.width for length in mark.place)
    said = drawn.hint_at(box["x"] + x + width / 2, box["y"] + y + height / 2).split("\n")
    assert said == ["2 ranks", "measured750 ms", "bya blog", "bar500 ms"]


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (["GPipe", "1F1B", "1F1B, recomputed", "ZB-H1"], ["GPipe", "1F1B", "1F1B, recomputed", "ZB-H1"]),
        (["a long name for a position", *"bc", "and another one"], ["a long name for a position", "and another one"]),
        ([*map(str, range(10, 50))], [*map(str, range(10, 46, 4)), "49"]),
        (["alone"], ["alone"]),
    ],
)
def test_a_knob_names_all_positions_that_have_room(page: Page, names: list[str], shown: list[str]):
    draw(page, knob("t", "c", {name: Bars([Row("1 rank", {"computing": 1.0})], "s") for name in names}))
    expect(page.locator(".tpl-ends span")).to_have_text(shown)
    boxes = [box for name in page.locator(".tpl-ends span").all() if (box := name.bounding_box())]
    assert all(one["x"] + one["width"] < other["x"] for one, other in pairwise(boxes)), boxes


def test_a_cell_before_and_after_a_collective(page: Page):
    def sum_up(x: torch.Tensor) -> torch.Tensor:
        return tt.reduce_scatter(x, "tp")

    card = animate(tt.run(sum_up, Mesh(tp=2), torch.arange(4.0), in_specs=P("tp")).trace)
    for step, said in [
        (0, "rank 1 holds its own input of reduce_scatter (a)\ndata ofrank 1 (1 of 2)"),
        (
            1,
            "rank 1 holds the result of reduce_scatter (a), part 1 of 2 of the whole (counted from 0)",
        ),
    ]:
        card.step = step
        draw(page, card)
        hint = hint_over(page.locator(".tplab"), card.of.trace, step, rank=1, item=0)
        assert hint.inner_text().startswith(said)
