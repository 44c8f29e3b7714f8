"""`tiles` in a browser: every score has the colour that its rank and step give it, and the hint says whose it is."""

from __future__ import annotations

import numpy as np
import pytest
from playwright.sync_api import Page, expect

from tests.browser.plain_page import Drawn, check_live_theme, draw
from tplab.sequence import LAYOUTS, AttentionMask, TokenLayout
from tplab.widgets import tiles
from tplab.widgets.attention.panels import Panel
from tplab.widgets.paper.palette import PAPER, hue, mix, rgb

LAYOUTS_OF_4 = [TokenLayout(name, 16, 4) for name in LAYOUTS]

_PIXELS = """([number, places, width]) => {
  const canvas = document.querySelectorAll(".tpl-tiles canvas")[number], scale = canvas.width / width;
  const pen = canvas.getContext("2d");
  const at = (place) => pen.getImageData(...place.map((x) => Math.round(x * scale)), 1, 1).data;
  return places.map((place) => [...at(place)].slice(0, 3));
}"""


def colours(panel: Panel, position: float) -> dict[tuple[int, int], tuple[int, ...]]:
    """The colour of each score that is not masked: (query, key) -> RGB."""
    done, counts, now, found = panel.computed(position), np.zeros_like(panel.load), int(np.ceil(position)) - 1, {}
    for query, key in np.argwhere(panel.steps >= 0).tolist():
        rank, step = panel.owner[query], panel.steps[query, key]
        counts[rank, step] += 1
        is_done = counts[rank, step] <= done[rank, step]
        found[query, key] = (
            rgb(PAPER) if not is_done else rgb(hue(rank)) if step == now else tuple(mix(hue(rank), 0.26))
        )
    return found


def check_scores(page: Page, position: float) -> None:
    card = tiles(LAYOUTS_OF_4)
    (x, y), cell, width = card.of.geometry.grid, card.of.geometry.cell, card.of.geometry.width
    for number, panel in enumerate(card.of.panels):
        want = colours(panel, position)
        places = [[x + (key + 0.5) * cell, y + (query + 0.5) * cell] for query, key in want]
        got = page.evaluate(_PIXELS, [number, places, width])
        assert np.abs(np.array(got) - np.array(list(want.values()))).max() <= 2  # the browser rounds what it mixes


def test_scores_have_the_colour_of_rank_and_step_at_every_step(page: Page):
    draw(page, tiles(LAYOUTS_OF_4))
    check_scores(page, 0)
    page.locator(".tplab").focus()
    for step in (1, 2, 3, 4):
        page.keyboard.press("ArrowRight")
        expect(page.locator(".tpl-say b")).to_have_text(f"step {step} of 4")
        check_scores(page, step)
    page.evaluate("window.model.set('step', 2.5); window.model.tell('change:step')")
    check_scores(page, 2.5)
    check_live_theme(page, ".tpl-tiles canvas")


def frame_of(drawn: Drawn, number: int) -> tuple[float, float, float]:
    """The left and upper side of a panel, and its scale."""
    box = drawn.page.locator(".tpl-tiles canvas").nth(number).bounding_box()
    assert box is not None
    return box["x"], box["y"], box["width"] / tiles(LAYOUTS_OF_4).of.geometry.width


@pytest.mark.parametrize(
    ("number", "query", "key", "ranks", "what"),
    [
        (0, 9, 2, (2, 0), "computedby rank 2 at step 3 of 4, one of 16 scores"),
        (1, 9, 2, (3, 1), "computedby rank 3 at step 3 of 4, one of 8 scores"),
        (2, 2, 9, (2, 1), "maskedthe query does not see the key"),
        (0, 2, 9, (0, 2), "maskedlike all of this tile, which rank 0 skips at step 3"),
    ],
)
def test_the_hint_says_whose_a_score_is(
    page: Page, number: int, query: int, key: int, ranks: tuple[int, int], what: str
):
    drawn = draw(page, tiles(LAYOUTS_OF_4))
    left, top, scale = frame_of(drawn, number)
    (x, y), cell = tiles(LAYOUTS_OF_4).of.geometry.grid, tiles(LAYOUTS_OF_4).of.geometry.cell
    said = drawn.hint_at(left + scale * (x + (key + 0.5) * cell), top + scale * (y + (query + 0.5) * cell))
    about = [f"query {query} and key {key}", f"queryof rank {ranks[0]}", f"keyof rank {ranks[1]}"]
    assert said.replace("\n", " ").replace("\t", "") == " ".join([*about, what])


def test_bars_say_what_a_rank_has_and_take_the_playhead_there(page: Page):
    drawn = draw(page, tiles(LAYOUTS_OF_4))
    place, panel = tiles(LAYOUTS_OF_4).of.geometry, Panel(LAYOUTS_OF_4[0], AttentionMask())
    left, top, scale = frame_of(drawn, 0)
    x = left + scale * (place.bars[0] + (panel.starts[2] + 1) * place.per_score)
    y = top + scale * (place.bars[1] + 0.4 * place.bar)
    said = drawn.hint_at(x, y).replace("\t", "").splitlines()
    assert said == [
        "rank 0, step 3 of 4", "haskeys and values of rank 2", "computesnothing: its tile is skipped",
        "idleas long as 16 scores take",
    ]  # fmt: skip
    page.mouse.click(x, y)
    expect(page.locator(".tpl-say b")).to_have_text("step 3 of 4")
