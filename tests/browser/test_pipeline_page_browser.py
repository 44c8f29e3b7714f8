"""`pipeline_lab` on a plain page: what it asks for, and what it shows while nobody has answered yet."""

from __future__ import annotations

from playwright.sync_api import Page, expect

from tests.browser.plain_page import draw
from tplab.schedules import zb_h1
from tplab.widgets import pipeline_lab

CSV = "0F0,,0B0\n,1F0,1B0"


def tell(page: Page, content: dict) -> None:
    page.evaluate("content => window.model.tell('msg:custom', content)", content)


def test_a_schedule_is_pasted(page: Page):
    draw(page, pipeline_lab())
    text = page.get_by_label("CSV to show")
    expect(text).to_be_hidden()
    page.get_by_role("button", name="paste CSV of your own").click()
    expect(text).to_be_focused()
    text.press("Space")  # no key of the player
    expect(page.get_by_label("play (space)")).to_be_visible()
    text.fill(CSV)
    page.get_by_role("button", name="show what is pasted").click()
    assert page.evaluate("window.sent") == [{"paste": CSV}]


def test_the_cost_of_each_stage_is_typed_and_overlap_is_for_pairs(page: Page):
    draw(page, pipeline_lab("dualpipe", overlap=1, stage_costs=[1, 1, 1, 2]))
    costs, overlap = page.get_by_label("cost of each stage"), page.get_by_role("slider", name="overlap of F & B")
    expect(costs).to_have_value("1, 1, 1, 2")
    expect(page.locator(".tpl-about")).to_contain_text("stages cost 1 : 1 : 1 : 2")
    expect(page.locator(".tpl-facts > div", has_text="without overlap").locator("b")).to_have_text("36")
    expect(overlap).to_be_enabled()
    costs.fill("")
    costs.press_sequentially("1, 2, 1, 1")
    page.wait_for_function("window.sent.length === 1")  # once, after the last key
    assert page.evaluate("window.model.get('settings').stage_costs") == "1, 2, 1, 1"
    tell(page, {"answered": True})
    page.get_by_role("combobox", name="schedule").select_option("zb_v")
    expect(overlap).to_be_disabled()


def test_a_schedule_of_your_own_is_offered_for_comparison(page: Page):
    draw(page, pipeline_lab(zb_h1(3, 5).named("mine")))
    beside = page.get_by_role("combobox", name="beside it")
    expect(page.get_by_role("combobox", name="schedule")).to_have_value("mine")
    expect(page.get_by_role("slider", name="ranks")).to_be_disabled()
    beside.select_option("mine")
    assert page.evaluate("window.model.get('settings').compare") == "mine"
    page.evaluate("window.model.set('settings', {...window.model.get('settings'), own: {mine: '', pasted: ''}})")
    tell(page, {"answered": True})
    expect(beside.locator("option", has_text="pasted")).to_have_count(1)


def test_while_python_is_loaded_it_says_how_far_it_is_and_keeps_the_last_question(page: Page):
    page.clock.install()
    draw(page, pipeline_lab())
    note, bar = page.locator(".tpl-notice"), page.get_by_role("progressbar")
    page.get_by_role("combobox", name="schedule").select_option("gpipe")
    tell(page, {"progress": {"text": "Python is loading.", "share": 0.25}})
    expect(note).to_have_text("Python is loading.")
    expect(note).not_to_have_class("tpl-wrong")
    expect(bar).to_have_attribute("value", "0.25")
    page.get_by_role("combobox", name="schedule").select_option("zb_v")
    assert page.evaluate("window.sent.length") == 1  # one question at a time
    page.clock.fast_forward(3200)  # longer than a kernel may be silent
    expect(note).to_have_text("Python is loading.")
    tell(page, {"answered": True})
    assert page.evaluate("[window.sent.length, window.model.get('settings').rule]") == [2, "zb_v"]
    expect(bar).to_be_hidden()


def test_why_python_does_not_come_is_said_and_the_controls_go_back(page: Page):
    draw(page, pipeline_lab())
    page.get_by_role("combobox", name="schedule").select_option("gpipe")
    tell(page, {"failed": "NumPy could not be loaded."})
    expect(page.locator(".tpl-notice.tpl-wrong")).to_have_text("NumPy could not be loaded.")
    expect(page.get_by_role("combobox", name="schedule")).to_have_value("one_f_one_b")
    page.get_by_role("combobox", name="schedule").select_option("gpipe")  # it may be asked again
    tell(page, {"answered": True})
    expect(page.locator(".tpl-notice")).to_have_text("")
