"""A scene in a browser: at every position of the playhead it is what the still picture is, and knows what is where."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import traitlets
from PIL import Image
from playwright.sync_api import Page, expect

from tests.browser.plain_page import check_live_theme, draw
from tests.hand_traces import ALL, ring_all_reduce
from tplab import Mesh
from tplab.schedules import one_f_one_b, simulate
from tplab.widgets import Bars, Row, animate, gantt, knob, timeline
from tplab.widgets.paper.card import Card, script, style
from tplab.widgets.paper.legend import dashes
from tplab.widgets.paper.palette import ACCENT, HUES, INK, PAPER, SOFT, hue, mix
from tplab.widgets.paper.pen import Pen
from tplab.widgets.paper.scene import Scene, on_curve, packed
from tplab.widgets.paper.wire import pack
from tplab.widgets.score import ranks, table

_RENDER = """
async function render({ model, el: host }) {
  const data = await unpack(model.get("scene")), root = card(host, { title: "A scene" }), box = el("div");
  const tip = hint(root);
  root.append(box);
  const scene = new Scene(root, box, data, 0, { over: (event, rows) => (rows ? tip.show(event, rows) : tip.hide()) });
  const draw = () => scene.draw(model.get("step"));
  model.on("change:step", draw);
  followTheme(root, draw);
}
export default { render };
"""


class Shown(Card):
    _esm = script("wire", "shell", "scene") + _RENDER
    _css = style()
    scene = traitlets.Bytes().tag(sync=True)
    step = traitlets.Float(0).tag(sync=True)

    def __init__(self, of: Scene):
        super().__init__(scene=pack(*packed([of])))


def a_scene() -> Scene:
    """One thing of each kind but letters, whose fonts differ; three are there for a while, and one moves."""
    sheet = Scene(300, 120)
    sheet.box(0, 0, 300, 120, fill=PAPER)
    sheet.box(10, 10, 80, 40, fill=SOFT, edge=INK)
    for rank in range(3):
        with sheet.during(rank, rank + 1), sheet.about([("", f"rank {rank}"), ("has", "its own")], key=rank):
            sheet.box(100 + 40 * rank, 10, 36, 36, fill=mix(hue(rank), 0.26), edge=hue(rank), radius=6, line=2)
    sheet.area([(10, 110), (10, 80), (60, 80), (60, 65), (140, 65), (140, 110)], mix(HUES[3], 0.55))
    sheet.line([(150, 110), (200, 60), (290, 60)], HUES[2], 3)
    dashes(sheet, 150, 290, 90)
    with sheet.during(-0.5, 2), sheet.along((20, 52, 120, 20, 220, 92)), sheet.about([("", "a chunk")], key=7):
        sheet.box(0, 0, 16, 8, fill=ACCENT)
    with sheet.during(0, 3):
        sheet.line([(100, 100), (150, 100), (150, 118), (200, 118)], HUES[4], 5, grows=True)
    sheet.curve((10, 60, 60, 20, 90, 60), HUES[5], 5)
    sheet.arc(250, 90, 12, 250, INK, 5)
    sheet.dashed(220, 72, 60, 40, HUES[1], 1.6)
    return sheet


@pytest.mark.parametrize("ahead", [False, True])
def test_the_page_paints_what_the_still_paints(page: Page, ahead: bool):
    """And would show it if the playhead of one of them were ahead."""
    scene = a_scene()
    draw(page, Shown(scene))
    for position in (0, 0.5, 1, 1.25, 2, 3):
        page.evaluate("step => { window.model.set('step', step); window.model.tell('change:step'); }", position)
        url = page.locator(".tplab canvas").evaluate("canvas => canvas.toDataURL()")
        shown = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).convert("RGB")
        pen = Pen(scene.width, scene.height)
        scene.paint(pen, position + 0.3 * ahead)
        assert shown.size == pen.image().size == (300, 120)
        there, want = np.asarray(shown).astype(int), np.asarray(pen.image()).astype(int)
        around = np.stack([np.roll(want, (x, y), (0, 1)) for x in (-1, 0, 1) for y in (-1, 0, 1)])
        is_inside = np.ptp(around, axis=0).max(2) < 8  # edges are smoothed in two ways
        assert is_inside.mean() > 0.8
        assert (np.abs(there - want).max(2)[is_inside] > 8).any() == ahead, position


def test_only_what_is_there_can_be_pointed_at(page: Page):
    scene = a_scene()
    drawn = draw(page, Shown(scene))
    box = page.locator(".tplab canvas").bounding_box()
    assert box is not None
    for position in (0.5, 1, 1.5, 3):
        page.evaluate("step => { window.model.set('step', step); window.model.tell('change:step'); }", position)
        for rank in range(3):
            said = drawn.hint_at(box["x"] + 118 + 40 * rank, box["y"] + 14).replace("\t", "")
            assert said == (f"rank {rank}\nhasits own" if rank < position <= rank + 1 else "")
        x, y = on_curve((20, 52, 120, 20, 220, 92), (position + 0.5) / 2.5)
        assert drawn.hint_at(box["x"] + x + 8, box["y"] + y + 4) == ("a chunk" if position <= 2 else "")


def test_a_screen_reader_is_told_what_the_picture_shows(page: Page):
    """Of an animation the ranks, the messages and the cells at this moment; of a knob its bars."""
    card = animate(ring_all_reduce(Mesh(tp=4), "tp"))
    draw(page, card)
    ranks_list, cells = page.locator(".tpl-read").nth(0), page.locator(".tpl-read").nth(1)
    expect(cells.locator("li")).to_have_count(16)
    expect(cells.locator("li").first).to_contain_text("rank 0")
    before = cells.inner_text()
    page.evaluate("() => { window.model.set('step', 0.5); window.model.tell('change:step'); }")
    expect(ranks_list.locator("li")).to_have_count(8)  # four ranks, four messages
    expect(ranks_list).to_contain_text("sends")
    page.evaluate("step => { window.model.set('step', step); window.model.tell('change:step'); }", card.num_steps)
    expect(ranks_list.locator("li")).to_have_count(4)
    expect(cells).to_contain_text("ranks 0, 1, 2, 3 (all of them)")
    assert cells.inner_text() != before
    draw(page, knob("A title", "ranks", {1: Bars([Row("one", {"sent": 3})], "")}, unit="B"))
    expect(page.locator(".tpl-read li")).to_have_text(["one; sent 3 B; in total 3 B"])


def test_a_screen_reader_is_told_how_many_things_there_are_where_a_list_would_be_too_long(page: Page):
    sheet = Scene(310, 20)
    for number in range(301):
        with sheet.about([("", f"box {number}")]):
            sheet.box(number, 5, 1, 10, fill=INK)
    draw(page, Shown(sheet))
    said = page.locator(".tpl-read li")
    expect(said).to_have_count(301)
    assert said.all_inner_texts() == ["the first 300 of 301", *(f"box {number}" for number in range(300))]


_COUNT = """
const drawOnce = Scene.prototype.draw;
window.drawn = 0;
Scene.prototype.draw = function (at) { window.drawn++; drawOnce.call(this, at); };
"""


@pytest.mark.parametrize("show", [animate, timeline, lambda trace: gantt(simulate(one_f_one_b(2, 3)))])
def test_a_legend_is_painted_with_its_card_and_not_with_each_frame(page: Page, show: Callable[[Any], Card]):
    """And what has no playhead of its own is as wide as the card again after its width has changed."""
    draw(page, show(ring_all_reduce(Mesh(tp=4), "tp")), more=_COUNT)
    check_live_theme(page, ".tpl-legend canvas, .tpl-lanes canvas")
    before = page.evaluate("() => window.drawn")
    page.evaluate("() => { window.model.set('step', 0.5); window.model.tell('change:step'); }")
    assert page.evaluate("() => window.drawn") - before == page.locator(".tpl-two canvas").count()
    page.set_viewport_size({"width": 600, "height": 900})
    page.wait_for_function(
        "() => { const lanes = document.querySelector('.tpl-lanes canvas'); return lanes.width === lanes.clientWidth; }"
    )
    assert page.evaluate("() => window.drawn") > before + page.locator(".tpl-two canvas").count()


class WithoutLetters(Pen):
    def text(self, x: float, y: float, text: str, **look: Any) -> float:
        return self.width_of(text)


_AS_LARGE_AS_A_STILL = """() => {
  for (const box of document.querySelectorAll(".tpl-scene")) {
    const [width] = box.querySelector("canvas").style.aspectRatio.split("/");
    box.style.cssText = `flex:none;width:${Number(width)}px`;
  }
}"""


@pytest.mark.parametrize("name", ["gather 4", "reduce-scatter 4", "all-reduce 8", "mlp 2x3", "pipeline 4", "64"])
@pytest.mark.parametrize("ahead", [False, True])
def test_an_animation_paints_what_its_still_paints(page: Page, name: str, ahead: bool):
    """But for its letters, whose fonts differ. And would show it if the playhead of one of them were ahead."""
    trace = ring_all_reduce(Mesh(tp=64), "tp") if name == "64" else ALL[name]()
    card = animate(trace)
    scenes = [scene for scene in (ranks.draw(card.of), table.draw(card.of)) if scene]
    draw(page, card, more="CanvasRenderingContext2D.prototype.fillText = () => {};")
    page.evaluate(_AS_LARGE_AS_A_STILL)
    differ = 0
    for step in (0.6, 0, card.num_steps / 2 + 0.1, card.num_steps - 0.3, card.num_steps):
        page.evaluate("step => { window.model.set('step', step); window.model.tell('change:step'); }", step)
        for number, scene in enumerate(scenes):
            url = page.locator(".tpl-two canvas").nth(number).evaluate("canvas => canvas.toDataURL()")
            shown = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).convert("RGBA")
            there = np.asarray(Image.alpha_composite(Image.new("RGBA", shown.size, PAPER), shown).convert("RGB"))
            pen = WithoutLetters(scene.width, scene.height)
            scene.paint(pen, card.of.time(min(step + 0.4 * ahead, card.num_steps)))
            want = np.asarray(pen.image()).astype(int)[: shown.height, : shown.width]
            there = there.astype(int)[: want.shape[0], : want.shape[1]]
            around = np.stack([np.roll(want, (x, y), (0, 1)) for x in (-1, 0, 1) for y in (-1, 0, 1)])
            is_inside = np.ptp(around, axis=0).max(2) < 8
            assert is_inside.mean() > 0.25
            differ += int((np.abs(there - want).max(2)[is_inside] > 12).sum())
    assert (differ > 100) == ahead, differ  # a few corners are smoothed in two ways
