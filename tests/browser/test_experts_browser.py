"""`experts` in a browser: the picture follows the playhead, and the hints say what the trace says."""

from __future__ import annotations

from playwright.sync_api import Page, expect

from tests.browser.plain_page import check_live_theme, draw
from tests.widgets.test_experts import torch_run
from tplab.widgets import experts
from tplab.widgets.mixture.drawing import NARROW, WIDE, Place


def test_steps_hints_and_a_narrow_page(page: Page):
    trace, (choices,) = torch_run("all_to_all")
    card, place = experts(trace, choices), Place(WIDE, 4, 2)
    drawn = draw(page, card)
    page.locator(".tplab").focus()
    for head, words in card.says[1:]:
        page.keyboard.press("ArrowRight")
        expect(page.locator(".tpl-say")).to_have_text(f"{head} — {words}")
    box = page.locator(".tpl-tiles canvas").bounding_box()
    assert box is not None
    scale = box["width"] / WIDE
    layer = card.layers[0]
    said = drawn.hint_at(
        box["x"] + scale * (place.experts + 30), box["y"] + scale * (place.top(1) + 0.5 * place.expert)
    ).replace("\t", "")
    assert said.startswith("expert 2, on rank 1") and f"{layer.loads[:, 2].sum()} row" in said
    said = drawn.hint_at(box["x"] + scale * (place.times + 20), box["y"] + scale * (place.top(3) + place.rank / 2))
    assert "rank 3" in said and f"{layer.of_ranks[3]} rows" in said.replace("\t", "")
    check_live_theme(page, ".tpl-tiles canvas")
    page.set_viewport_size({"width": 400, "height": 800})
    page.wait_for_function(f"document.querySelector('.tpl-tiles canvas').style.maxWidth === '{NARROW:g}px'")
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
