"""A page of `to_html`, opened as a file: it plays, its widgets share one playhead, and it asks for nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.browser.plain_page import hint_over
from tests.hand_traces import ALL, ring_all_reduce
from tests.widgets.test_page import NASTY, WIDGETS, nasty_trace
from tplab import Mesh
from tplab.schedules import Costs, one_f_one_b, simulate
from tplab.widgets import to_html


@pytest.fixture
def open_page(page: Page, tmp_path: Path) -> Iterator[Callable[..., Locator]]:
    """`open_page(thing, **media)` -> its widgets. At the end: no error was said and nothing was loaded but the file."""
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    path = tmp_path / "page.html"

    def open_(thing, **media) -> Locator:
        page.emulate_media(**media)
        page.goto(to_html(thing, path).as_uri())
        expect(page.locator(".tplab").first).to_be_visible()
        return page.locator(".tplab")

    yield open_
    assert said == []
    assert asked == [path.as_uri()]


def say(card: Locator) -> Locator:
    return card.locator(".tpl-say")


def position(card: Locator) -> float:
    return float(card.locator(".tpl-slider").input_value())


def test_a_trace_plays_under_one_playhead(page: Page, open_page):
    cards = open_page(ALL["gather 4"]())
    expect(page).to_have_title("ring_all_gather")
    expect(page.get_by_role("heading", level=1)).to_have_text("ring_all_gather")
    expect(page.locator("main > p")).to_contain_text("Trace of ring_all_gather on Mesh(tp=4): 3 steps")
    animation, lanes = cards.nth(0), cards.nth(1)
    expect(say(animation)).to_contain_text("before the first step")
    animation.focus()
    page.keyboard.press("ArrowRight")
    for card in (animation, lanes):
        expect(say(card)).to_contain_text("step 1 of 3 — every rank sends its own piece to the next rank")
    page.keyboard.press(" ")
    expect(animation.get_by_label("pause (space)")).to_be_visible()
    expect(say(animation)).to_contain_text("step 3 of 3")
    expect(animation.get_by_label("play (space)")).to_be_visible()
    expect(hint_over(animation, ALL["gather 4"](), 3, rank=2, item=0)).to_contain_text("rank 2 has had piece a")
    expect(say(lanes)).to_contain_text("step 3 of 3")
    lanes.locator(".tpl-slider").fill("1.5")  # the reader scrubs
    expect(say(animation)).to_contain_text("step 2 of 3")
    expect(hint_over(animation, ALL["gather 4"](), 1.5, flight=5)).to_contain_text("rank 1 sends piece a to rank 2")


def test_the_widget_touched_last_is_the_one_that_plays(open_page):
    cards = open_page(ring_all_reduce(Mesh(tp=8), "tp"))  # 14 steps, a second for each
    animation, lanes = cards.nth(0), cards.nth(1)
    animation.get_by_label("play (space)").click()
    expect(say(lanes)).to_contain_text(re.compile("step [2-9] of 14"))
    lanes.get_by_label("to the start (Home)").click()
    expect(animation.get_by_label("play (space)")).to_be_visible()
    assert position(animation) == position(lanes) == 0
    animation.get_by_label("play (space)").click()
    lanes.get_by_label("play (space)").click()
    expect(animation.get_by_label("play (space)")).to_be_visible()
    assert lanes.get_by_label("pause (space)").is_visible()
    expect(say(animation)).to_contain_text(re.compile("step [4-9] of 14"))


def test_a_schedule_plays(page: Page, open_page):
    (card,) = open_page(one_f_one_b(3, 4)).all()
    expect(page).to_have_title("1F1B")
    card.focus()
    page.keyboard.press("ArrowRight")
    expect(say(card)).to_contain_text("t = 1")
    card.get_by_label("play (space)").click()
    expect(card.get_by_label("pause (space)")).to_be_visible()
    page.wait_for_function("() => document.querySelector('.tpl-slider').value > 2")


def test_schedules_with_costs_of_their_own_play_on_one_time_axis(page: Page, open_page):
    slow = simulate(one_f_one_b(3, 4), Costs(2, 1, 1))
    (card,) = open_page({"equal": one_f_one_b(3, 4), "slow forward": slow}).all()
    expect(page).to_have_title("equal, slow forward")
    expect(card.locator(".tpl-of")).to_have_text(["equal", "slow forward"])
    card.focus()
    page.keyboard.press("End")
    expect(say(card)).to_contain_text(f"t = {slow.makespan:g}")


def test_a_ring_over_64_ranks_plays_from_one_small_file(page: Page, open_page):
    animation = open_page(ring_all_reduce(Mesh(tp=64), "tp")).first
    animation.focus()
    page.keyboard.press("ArrowRight")
    expect(say(animation)).to_contain_text("step 1 of 126")
    animation.get_by_label("play (space)").click()
    expect(say(animation)).to_contain_text(re.compile("step [2-9] of 126"))


def test_it_is_dark_where_the_reader_prefers_that_and_turns_live(page: Page, open_page):
    cards = open_page(ALL["gather 4"](), color_scheme="dark")
    for card in cards.all():
        expect(card).to_have_attribute("data-theme", "dark")
    expect(page.locator("body")).to_have_css("background-color", "rgb(13, 16, 21)")
    page.emulate_media(color_scheme="light")
    for card in cards.all():
        expect(card).to_have_attribute("data-theme", "light")
    expect(page.locator("body")).to_have_css("background-color", "rgb(238, 241, 246)")


@pytest.mark.parametrize("name", WIDGETS)
def test_every_widget_is_drawn_on_a_page(page: Page, open_page, name: str):
    open_page(WIDGETS[name](NASTY))
    expect(page.locator("footer:visible")).to_contain_text("Click a picture")
    assert page.evaluate("window.stolen") is None


def test_what_a_trace_says_is_text_and_runs_nowhere(page: Page, open_page):
    cards = open_page(nasty_trace())
    expect(cards.first).to_contain_text(NASTY)
    box = cards.nth(1).locator(".tpl-lanes canvas").bounding_box()
    assert box
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 12)
    expect(cards.nth(1).get_by_role("tooltip")).to_contain_text(NASTY)
    assert page.evaluate("window.stolen") is None


def test_an_old_browser_is_told_why_there_is_no_picture(page: Page, tmp_path: Path):
    page.add_init_script("delete globalThis.DecompressionStream")
    page.goto(to_html(one_f_one_b(2, 2), tmp_path / "page.html").as_uri())
    expect(page.locator(".card")).to_contain_text("this browser is too old for tplab's widgets")


def test_without_scripts_there_are_stills(browser, tmp_path: Path):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(to_html(ALL["gather 4"](), tmp_path / "page.html").as_uri())
    expect(page.get_by_role("img")).to_have_count(2)
    assert page.get_by_role("img").first.evaluate("image => image.naturalWidth") > 400
    expect(page.locator("footer:visible")).to_contain_text("Open the file in a browser to play it")
    context.close()
