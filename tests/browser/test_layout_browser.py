"""`layout_lab` in a browser: plans are chosen without a kernel, and what is written is what the forecast says."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect

from tests.browser.plain_page import Drawn, draw
from tplab.forecast import Plan
from tplab.units import plain
from tplab.widgets import layout_lab
from tplab.widgets.layout_lab import LayoutLab
from tplab.widgets.layouts.drawing import plan_map
from tplab.widgets.layouts.words import seconds_text

GIVEN = {"cluster": "h100-measured", "gpus": 16, "batch": 64, "sequence": 4096}


def lab_of(**more: object) -> LayoutLab:
    return layout_lab("llama3-8b", **GIVEN, **more)  # type: ignore[arg-type]


def check_shown(drawn: Drawn, lab: LayoutLab, index: int) -> None:
    one, page = lab._bench.forecast(index), drawn.page
    expect(page.locator(".tpl-say b")).to_have_text(str(one.plan))
    expect(page.locator(".tpl-say")).to_contain_text(one.why[1:])
    texts = [text.text for text in drawn.written]
    assert any(text.startswith(seconds_text(one)) for text in texts)
    for name in ("computing", "tp"):
        if one.parts[name] > 0.01 * one.seconds:
            assert any(text.startswith(f"{plain(one.parts[name])} s, ") for text in texts)


def test_arrows_choose_plans_without_a_kernel(page: Page):
    lab = lab_of()
    best = lab.shown.index(lab.best.plan)
    of = lab._bench.points()
    slower, smaller = list(of["seconds"].argsort(kind="stable")), list(of["gib"].argsort(kind="stable"))
    drawn = draw(page, lab)
    check_shown(drawn, lab, best)
    page.locator(".tplab").focus()
    page.keyboard.press("ArrowRight")
    check_shown(drawn, lab, slower[slower.index(best) + 1])
    page.keyboard.press("End")
    check_shown(drawn, lab, slower[-1])
    at = smaller.index(slower[-1])
    page.keyboard.press("ArrowUp")
    check_shown(drawn, lab, smaller[min(at + 1, len(smaller) - 1)])
    page.keyboard.press("Home")
    check_shown(drawn, lab, best)
    assert page.evaluate("window.sent") == []


def test_the_hint_says_which_plan_is_under_the_pointer_and_a_click_chooses_it(page: Page):
    lab = lab_of(measured=[(Plan(dp=8, tp=2, zero=1), 9.25, 50.0)], by="somebody")
    drawn = draw(page, lab)
    box, scene = page.locator(".tpl-layouts canvas").first.bounding_box(), plan_map(lab._bench)
    part = next(part for part in scene.parts if part.mark >= 0 and scene.marks[part.mark].key == 10)
    assert box is not None
    left, top, wide, high = (length * box["width"] / scene.width for length in part.place)
    x, y = box["x"] + left + wide / 2, box["y"] + top + high / 2
    said = drawn.hint_at(x, y).splitlines()
    index = [str(plan) for plan in lab.shown].index(said[0])
    assert said[1].replace("\t", "").startswith(f"a step{plain(lab._bench.forecast(index).seconds)} s")
    page.mouse.click(x, y)
    check_shown(drawn, lab, index)
    assert index == 10
    assert "measured by somebody" in page.locator(".tpl-legend").first.inner_text()


def test_a_control_asks_the_kernel_and_says_where_none_answers(page: Page):
    lab = lab_of()
    drawn = draw(page, lab)
    page.get_by_label("GPUs", exact=True).select_option("32")
    expect(page.locator(".tpl-notice")).to_have_text("Searching …")
    assert page.evaluate("[window.model.get('settings').gpus, window.sent.length]") == [32, 1]
    answer(drawn, lab)
    expect(page.locator(".tpl-head b")).to_have_text("Which layout for llama3-8b on 32 GPUs?")
    expect(page.locator(".tpl-notice")).to_contain_text("Click a plan")
    page.get_by_label("GPUs", exact=True).select_option("64")
    expect(page.locator(".tpl-notice")).to_contain_text("No kernel answers", timeout=12_000)


def test_while_python_is_loaded_it_says_how_far_it_is_or_why_it_does_not_come(page: Page):
    draw(page, lab_of())
    note, bar = page.locator(".tpl-notice"), page.get_by_role("progressbar")
    page.get_by_label("GPUs", exact=True).select_option("32")
    tell = "content => window.model.tell('msg:custom', content)"
    page.evaluate(tell, {"progress": {"text": "Python is loading.", "share": 0.25}})
    expect(note).to_have_text("Python is loading.")
    expect(bar).to_have_attribute("value", "0.25")
    page.evaluate(tell, {"failed": "NumPy could not be loaded."})
    expect(page.locator(".tpl-notice.tpl-wrong")).to_have_text("NumPy could not be loaded.")
    expect(bar).to_be_hidden()
    page.evaluate(tell, {"answered": True})
    expect(note).to_contain_text("Click a plan")


NOTEBOOK = """
from tplab.widgets import layout_lab
lab = layout_lab("llama3-8b", cluster="h100-measured", gpus=16, batch=64, sequence=4096)
lab
"""


def test_in_jupyterlab_the_controls_ask_python(open_notebook):
    book = open_notebook([NOTEBOOK])
    root = book.output(0).locator(".tplab")
    best = book.run("print(lab.best.plan)").strip()
    expect(root.locator(".tpl-say b")).to_have_text(best)
    root.locator(".tpl-layouts canvas").first.click(position={"x": 4, "y": 4})  # no plan is there
    expect(root.locator(".tpl-say b")).to_have_text(best)
    root.focus()
    book.page.keyboard.press("ArrowRight")
    expect(root.locator(".tpl-say b")).not_to_have_text(best)
    expect(root.locator(".tpl-say b")).to_have_text(book.run("print(lab.forecast.plan)").strip())
    root.get_by_label("GPUs", exact=True).select_option("32")
    expect(root.locator("header b")).to_have_text("Which layout for llama3-8b on 32 GPUs?", timeout=20_000)
    expect(root.locator(".tpl-notice")).to_contain_text("Click a plan", timeout=20_000)
    expect(root.locator(".tpl-say b")).to_have_text(book.run("print(lab.best.plan)").strip())
    count = book.run("print(len(lab.shown), lab.settings['gpus'])").split()
    assert count[1] == "32"
    expect(root.locator(".tpl-legend").first).to_contain_text(f"{count[0]} of ")
    book.run("lab.settings = {**lab.settings, 'gpus': 67}")
    expect(root.locator(".tpl-notice")).to_contain_text("no plan trains this model on 67 GPUs")
    expect(root).to_have_attribute("data-stale", "true")


def test_the_pipeline_of_the_chosen_plan_is_drawn_and_another_is_asked_for(page: Page):
    lab = lab_of(plan=Plan(dp=2, tp=2, pp=4, zero=1))
    drawn = draw(page, lab)
    page.get_by_role("button", name="pipeline").click()
    expect(page.locator(".tpl-tools .tpl-key")).to_contain_text("16 of 32 microbatches are drawn")
    texts = [one.text for one in drawn.written]
    assert [f"pp {place}" for place in range(4)] == [text for text in texts if text.startswith("pp")]
    assert "F0" in texts and "B0" in texts
    place = next(one for one in drawn.written if one.text == "F0")  # only the last stage is long enough for it
    assert drawn.hint_at(place.x, place.y).startswith("pp 3: F0 of stage 3")
    page.locator(".tplab").focus()
    page.keyboard.press("Home")
    best = lab.best.plan
    assert page.evaluate("window.sent") == ([] if best.pp == 1 else [{"choose": lab._bench.best}])
    expect(page.locator(".tpl-lanes")).to_be_hidden()


def test_the_nodes_show_which_ranks_share_an_axis(page: Page):
    plan = Plan(dp=2, tp=2, pp=4, zero=1)
    drawn = draw(page, lab_of(plan=plan))
    page.get_by_role("button", name="nodes").click()
    expect(page.locator("[data-rank]")).to_have_count(16)
    box = page.locator("[data-rank='5']").bounding_box()
    assert box is not None
    said = drawn.hint_at(box["x"] + 9, box["y"] + 6).replace("\t", "")
    assert said.startswith("rank 5, on node 0\nplacepp 1, dp 0, tp 1")
    assert "its pp groupranks 1, 5, 9, 13: on 2 nodes" in said
    assert "its tp groupranks 4, 5: in this node" in said
    fill = "node => node.style.fill"
    for rank, hue in [(4, "c0"), (7, "c1"), (1, "c3"), (13, "c3")]:
        assert f"--{hue}" in page.locator(f"[data-rank='{rank}']").evaluate(fill)
    assert page.locator("[data-rank='6']").evaluate(fill) == "var(--paper)"
    page.locator(".tplab").focus()
    page.keyboard.press("ArrowDown")
    assert page.locator("[data-rank='13']").evaluate(fill) == "var(--accent)"
    expect(page.locator(".tpl-say b")).to_have_text(str(plan))  # the arrow keys are about GPUs here
    expect(page.locator(".tpl-legend").first).to_contain_text("its pp group: 4 ranks, on 2 nodes")


def test_a_model_of_ones_own_begins_as_the_one_that_is_shown(page: Page):
    lab = lab_of()
    draw(page, lab)
    heads, setting = page.get_by_label("query heads", exact=True), "window.model.get('settings').model"
    expect(heads).to_be_hidden()
    page.get_by_label("model", exact=True).select_option("your own …")
    sizes = "layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab=128256, experts=0, "
    assert page.evaluate(setting) == sizes + "experts_per_token=0"
    expect(page.get_by_label("hidden", exact=True)).to_have_value("4,096")
    heads.fill("24")
    heads.press("Enter")
    assert page.evaluate(setting) == sizes.replace("heads=32", "heads=24") + "experts_per_token=0"
    heads.fill("2.5")
    heads.press("Enter")
    expect(page.locator(".tpl-notice")).to_contain_text(
        "query heads is “2.5”; it must be a whole number, 1,024 at most"
    )
    assert "heads=24" in page.evaluate(setting)
    page.get_by_label("model", exact=True).select_option("llama3-70b")
    expect(heads).to_be_hidden()
    assert page.evaluate(setting) == "llama3-70b"


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_ranks_that_share_experts_have_a_border_and_keep_the_colours_of_their_axes(page: Page, theme: str):
    plan = Plan(dp=8, pp=2, ep=4, zero=1)
    drawn = draw(page, layout_lab("qwen3-30b-a3b", **GIVEN, plan=plan), theme)  # type: ignore[arg-type]
    page.get_by_role("button", name="nodes").click()
    expect(page.locator(".tpl-legend").first).to_contain_text("its ep group: 4 ranks, in one node")
    box = page.locator("[data-rank='5']").bounding_box()
    assert box is not None
    assert "its ep groupranks 4, 5, 6, 7: in this node" in drawn.hint_at(box["x"] + 9, box["y"] + 6).replace("\t", "")
    styles = page.locator("[data-rank]").evaluate_all("nodes => nodes.map(({ style }) => [style.stroke, style.fill])")
    assert [rank for rank, (stroke, _) in enumerate(styles) if stroke == "var(--c6)"] == [4, 5, 6, 7]
    assert all("--c1" in styles[rank][1] for rank in (0, 4, 6, 7)) and "--c3" in styles[13][1]


def answer(drawn: Drawn, lab: LayoutLab) -> None:
    """What a kernel would do."""
    import base64

    lab.settings = {**lab.settings, "gpus": 32}
    board = base64.b64encode(lab.board).decode()
    drawn.page.evaluate(
        """([board, chosen]) => {
          window.model.set("board", new DataView(Uint8Array.from(atob(board), (c) => c.charCodeAt(0)).buffer));
          window.model.set("chosen", chosen);
          window.model.tell("change:board");
          window.model.tell("msg:custom", { answered: true });
        }""",
        [board, lab.chosen],
    )


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_it_fits_on_a_screen_and_on_a_phone(page: Page, theme: str):
    draw(page, lab_of(), theme, 1024, 768)
    height = page.evaluate("document.querySelector('.tplab').offsetHeight")
    assert height <= 740
    expect(page.locator(".tplab")).to_have_attribute("data-theme", theme)
    assert page.locator("[id]").evaluate_all("nodes => nodes.map((node) => node.id)") == ["host"]
    page.set_viewport_size({"width": 390, "height": 800})
    page.wait_for_timeout(200)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    for canvas in page.locator(".tpl-layouts canvas").all():
        box = canvas.bounding_box()
        assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= 390
