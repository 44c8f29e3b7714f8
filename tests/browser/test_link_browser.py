"""The link of a page of the site keeps what its reader chose, and a cell of Python makes the widget in that state."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.browser.site_page import made, served

KNOB = """\
from tplab.widgets import Bars, Row, knob
options = {2**power: Bars([Row("all", {"part": 2.0**power})], f"Two to the {power}.") for power in range(5)}
card = knob("Powers", "number", options)"""
GANTT = """\
from tplab.schedules import gpipe
from tplab.widgets import gantt
card = gantt(gpipe(2, 3))"""
LAYOUTS = """\
from tplab.widgets import layout_lab
card = layout_lab(gpus=8, batch=64, sequence=4096)"""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(tmp_path_factory.mktemp("site"), [KNOB, GANTT, GANTT, LAYOUTS]) as address:
        yield address


def figures(page: Page) -> list[Locator]:
    """The figures of the page, drawn."""
    found = page.locator("figure.card")
    for figure in found.all():
        figure.scroll_into_view_if_needed()
        expect(figure.locator(".tplab")).to_be_visible()
    return found.all()


def state(page: Page) -> dict[str, Any]:
    """What the link of the page says."""
    return {key: json.loads(value) for key, value in parse_qsl(urlsplit(page.url).query)}


def copied(page: Page, figure: Locator, what: str) -> str:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    figure.get_by_role("button", name=what).click()
    expect(figure.get_by_role("status").last).to_have_text("Copied.")
    return page.evaluate("navigator.clipboard.readText()")


def test_each_widget_keeps_its_own_state_in_the_link(page: Page, address: str):
    page.goto(address)
    knob, first, second, layouts = figures(page)
    names = [figure.get_attribute("id") for figure in (knob, first, second, layouts)]
    assert len({*names}) == 4
    assert state(page) == {}
    knob.get_by_role("slider").press("ArrowRight")
    second.locator(".tplab").press("End")
    second.get_by_role("button", name="colour by stage").click()
    layouts.get_by_role("button", name="nodes").click()
    layouts.locator(".tplab").press("Escape")
    expect(page).to_have_url(re.compile("view"))
    last = float(second.locator(".tpl-slider").input_value())
    assert state(page) == {
        f"{names[0]}.index": 1, f"{names[2]}.step": last, f"{names[2]}.colour": "stage", f"{names[3]}.view": "nodes"
    }  # fmt: skip
    alone = copied(page, second, "Copy link")
    page.goto(page.url)
    knob, first, second, layouts = figures(page)
    expect(knob.locator(".tpl-controls b")).to_have_text("2")
    assert [float(figure.locator(".tpl-slider").input_value()) for figure in (first, second)] == [0, last]
    expect(second.get_by_role("button", name="colour by stage")).to_have_attribute("aria-pressed", "true")
    expect(layouts.get_by_role("button", name="nodes")).to_have_attribute("aria-pressed", "true")
    page.goto(alone)
    expect(page.locator(f"figure[id='{names[2]}']")).to_be_in_viewport()
    knob, first, second, layouts = figures(page)
    assert {key.split(".")[0] for key in state(page)} == {names[2]}
    expect(knob.locator(".tpl-controls b")).to_have_text("1")


def test_a_state_that_a_widget_cannot_be_in_is_ignored(page: Page, address: str):
    said: list[str] = []
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(address)
    names = [figure.get_attribute("id") for figure in figures(page)]
    wrong = {
        f"{names[0]}.index": "99", f"{names[1]}.step": '"far"', f"{names[1]}.colour": "{", f"{names[2]}.step": "1e9",
        f"{names[2]}.absent": "1", f"{names[3]}.settings.gpus": '"many"', f"{names[3]}.view": '"sky"',
        "w00000.step": "3", "of": "another page",
    }  # fmt: skip
    page.goto(f"{address}?{urlencode(wrong)}")
    knob, first, second, layouts = figures(page)
    expect(knob.locator(".tpl-controls b")).to_have_text("1")
    expect(first.locator(".tpl-slider")).to_have_value("0")
    expect(second.locator(".tpl-say")).to_contain_text("t = 12")  # its end
    expect(layouts.get_by_role("button", name="time and memory")).to_have_attribute("aria-pressed", "true")
    knob.get_by_role("slider").press("End")
    expect(knob.locator(".tpl-controls b")).to_have_text("16")
    expect(page).to_have_url(re.compile("index=4"))
    assert said == []


def test_python_makes_the_widget_in_the_same_state(page: Page, address: str):
    page.goto(address)
    knob, first, _, layouts = figures(page)
    knob.get_by_role("slider").press("End")
    first.locator(".tplab").press("ArrowRight")
    first.get_by_role("button", name="colour by microbatch").click()
    layouts.locator(".tplab").press("ArrowDown")
    plan = layouts.locator(".tpl-say b").inner_text()
    assert vars_of(copied(page, knob, "Copy as Python"), "option") == {"option": 16}
    assert vars_of(copied(page, first, "Copy as Python"), "step", "colour") == {"step": 1.0, "colour": "microbatch"}
    text = copied(page, layouts, "Copy as Python")
    assert "card.chosen = " in text and str(vars_of(text, "forecast")["forecast"].plan) == plan


def vars_of(cell: str, *names: str) -> dict[str, Any]:
    card = made(cell)
    return {name: getattr(card, name) for name in names}
