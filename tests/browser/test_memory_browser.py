"""`memory_timeline` in a browser: what is drawn and said is what was held, of the rank that is chosen."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect

from tests.browser.plain_page import draw
from tests.widgets.memories import two_ranks
from tplab.trace.memory import KINDS
from tplab.units import bytes_text
from tplab.widgets import memory_timeline
from tplab.widgets.stacks.drawing import BOTTOM, HEIGHT, NARROW, WIDTH, name_of, reading

PREDICTED = {"parameters": 400, "optimizer": 800}


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_hint_says_what_is_held_at_the_moment(page: Page, theme: str):
    memories = {"all": two_ranks(800), "half": two_ranks(400)}
    card = memory_timeline(memories, {"all": PREDICTED})
    drawn = draw(page, card, theme)
    expect(page.locator(".tplab")).to_have_attribute("data-theme", theme)
    frame = page.locator(".tpl-stacks canvas").bounding_box()
    assert frame is not None
    for panel, memory in zip(card.of.panels, memories.values()):
        area, held = panel.areas[0], memory[0]
        for stop, row in enumerate(area.rows[:-1]):
            middle = (area.xs[stop] + area.xs[stop + 1]) / 2
            said = drawn.hint_at(frame["x"] + middle * frame["width"] / WIDTH, frame["y"] + 60).splitlines()
            assert said[0] == f"{panel.title}, {reading(held, int(row), 'time')}"
            expected = []
            for kind in reversed(range(len(KINDS))):
                amount, due = held.num_bytes[row, kind], PREDICTED.get(KINDS[kind], 0) * (panel.title == "all")
                if amount or due:
                    predicted = f", predicted {bytes_text(due)}" if due else ""
                    expected.append(f"{name_of(kind)}{bytes_text(amount)}{predicted}")
            total = f"in total{bytes_text(held.totals[row])}{', predicted 1.17 KiB' * (panel.title == 'all')}"
            assert [line.replace("\t", "").strip() for line in said[1:]] == [*expected, total]


def test_ranks_are_chosen_by_hand_and_by_keys(page: Page):
    card = memory_timeline(two_ranks(800), PREDICTED)
    draw(page, card)
    says, choice = page.locator(".tpl-say"), page.get_by_label("rank", exact=True)
    expect(says).to_have_text("Rank 0 holds at most 1.56 KiB, at cell 1, line 2.")
    picture = "() => document.querySelector('.tpl-stacks canvas').toDataURL()"
    first = page.evaluate(picture)
    choice.select_option("1")
    expect(says).to_have_text("Rank 1 holds at most 1.17 KiB, at cell 1, line 2.")
    assert page.evaluate(picture) != first
    figure = page.get_by_role("group", name="memory over time")
    figure.focus()
    page.keyboard.press("ArrowDown")
    expect(choice).to_have_value("0")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(says).to_have_text(
        "1 s: op 1 at cell 1, line 2, forward; activations 100 B; optimizer states 0 B, predicted 800 B; "
        "parameters 400 B, predicted 400 B; in total 500 B, predicted 1.17 KiB"
    )
    page.keyboard.press("End")
    expect(page.locator(".tpl-hint")).to_contain_text("6 s: op 6")
    page.keyboard.press("Escape")
    expect(page.locator(".tpl-hint")).to_be_hidden()
    page.keyboard.press("ArrowUp")
    expect(choice).to_have_value("1")


_PIXELS = """places => {
  const canvas = document.querySelector(".tpl-stacks canvas"), scale = canvas.width / 900;
  const at = (place) => canvas.getContext("2d").getImageData(...place.map((x) => Math.round(x * scale)), 1, 1).data;
  return places.map((place) => [...at(place)]);
}"""


def test_areas_can_be_told_apart_in_both_themes(page: Page):
    """And each is where its bytes are: between its upper edge and that of the kind below it."""
    card = memory_timeline(two_ranks(800))
    area = card.of.panels[0].areas[0]
    places: dict[int, list[tuple[float, float]]] = {}
    for stop, tops in enumerate(area.tops):
        for kind, (upper, lower) in enumerate(zip(tops, [HEIGHT - BOTTOM, *tops[:-1]])):
            if lower - upper > 6 and area.xs[stop + 1] - area.xs[stop] > 8:
                places.setdefault(kind, []).append((area.xs[stop] + 4, upper + 3))  # above letters
    for theme in ("light", "dark"):
        draw(page, card, theme)
        found = {kind: page.evaluate(_PIXELS, at) for kind, at in places.items()}
        colours = {kind: {tuple(colour[:3]) for colour in pixels} for kind, pixels in found.items()}
        assert all(len(each) == 1 for each in colours.values())
        assert len(set.union(*colours.values())) == len(card.of.kinds)


def test_a_narrow_card_has_a_picture_of_its_own(page: Page):
    drawn = draw(page, memory_timeline({"all": two_ranks(800), "half": two_ranks(400)}, {"all": PREDICTED}), width=420)
    box = page.locator(".tpl-stacks canvas").bounding_box()
    assert box is not None and box["width"] / box["height"] == pytest.approx(NARROW / HEIGHT, rel=0.01)
    assert {"all", "half"} <= {one.text for one in drawn.written}
    assert drawn.hint_at(box["x"] + 0.4 * box["width"], box["y"] + 0.4 * box["height"]).startswith("all, ")
