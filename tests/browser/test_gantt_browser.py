"""What `gantt` draws: names that stay when boxes shrink, colours that can be switched, themes that repaint."""

from __future__ import annotations

import base64

import pytest
from playwright.sync_api import Page, expect

from tests.browser.plain_page import check_live_theme, draw
from tplab.schedules import dualpipe, interleaved_1f1b, one_f_one_b, simulate, zb_h1, zb_v
from tplab.widgets import gantt, pipeline_lab
from tplab.widgets.paper.palette import KINDS, rgb

LEFT, RIGHT, LANE, TOP = 58, 62, 24 + 14 + 5, 4  # of a chart of up to four ranks

_PIXEL = """([x, y]) => {
  const canvas = document.querySelector(".tpl-lanes canvas"), ratio = canvas.width / canvas.clientWidth;
  const [r, g, b] = canvas.getContext("2d").getImageData(Math.round(x * ratio), Math.round(y * ratio), 1, 1).data;
  return [r, g, b];
}"""


def names(drawn) -> list[str]:
    return [one.text for one in drawn.written if one.text[:1] in "FBIW" and not one.text[1:].strip("0123456789")]


SCHEDULES = [one_f_one_b(4, 8), zb_v(4, 8), dualpipe(8, 20), interleaved_1f1b(4, 8, 2)]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=[schedule.name for schedule in SCHEDULES])
def test_every_action_keeps_its_letter(page: Page, schedule):
    found = names(draw(page, gantt(schedule)))
    assert len(found) == len(schedule)
    wanted = [schedule.action(row).label for row in range(len(schedule))]
    assert sorted(name[0] for name in found) == sorted(label[0] for label in wanted)
    assert {name for name in found if len(name) > 1} <= set(wanted)  # a name is whole, or the letter of its kind


def test_the_colour_is_that_of_the_kind_and_can_be_switched(page: Page):
    schedule = zb_h1(4, 8)
    draw(page, gantt(schedule))
    run, chart = simulate(schedule), page.locator(".tpl-lanes").bounding_box()
    assert chart is not None
    unit = (chart["width"] - LEFT - RIGHT) / run.makespan

    def pixel(row: int) -> list[int]:
        x = LEFT + (run.start[row] + 0.15) * unit
        return page.evaluate(_PIXEL, [x, TOP + int(schedule.rank[row]) * LANE + 5])

    kinds = [schedule.action(row).kind for row in range(len(schedule))]
    for row, kind in enumerate(kinds):
        assert pixel(row) == pytest.approx(rgb(KINDS[kind]), abs=2)
    for by, number in (("stage", 4), ("microbatch", 8)):
        page.get_by_role("button", name=f"colour by {by}").click()
        expect(page.get_by_role("button", name=f"colour by {by}")).to_have_attribute("aria-pressed", "true")
        assert page.evaluate("model.get('colour')") == by
        assert len({tuple(pixel(row)) for row, kind in enumerate(kinds) if kind == "F"}) == number


def test_a_backward_is_an_input_gradient_and_a_weight_gradient(page: Page):
    draw(page, gantt(one_f_one_b(4, 8)))
    chart = page.locator(".tpl-lanes").bounding_box()
    assert chart is not None
    unit = (chart["width"] - LEFT - RIGHT) / 33
    y = TOP + 3 * LANE + 5  # rank 3 runs B0 from 4 to 6
    assert page.evaluate(_PIXEL, [LEFT + 4.3 * unit, y]) == pytest.approx(rgb(KINDS["I"]), abs=2)
    assert page.evaluate(_PIXEL, [LEFT + 5.7 * unit, y]) == pytest.approx(rgb(KINDS["W"]), abs=2)


def test_the_playhead_spares_names(page: Page):
    drawn = draw(page, gantt(one_f_one_b(4, 8), step=3))
    assert len(names(drawn)) == 64
    follows = "(names) => document.querySelector('.tpl-playhead').compareDocumentPosition(names) & 4"
    assert page.locator(".tpl-names").evaluate(follows)  # they are drawn over it
    assert page.locator(".tpl-names").evaluate("(names) => getComputedStyle(names).pointerEvents") == "none"


def test_the_strip_and_the_legend_have_numbers(page: Page):
    drawn = draw(page, gantt(one_f_one_b(4, 8)))
    assert [one.text for one in drawn.written if one.text.startswith("up to")] == [f"up to {n}" for n in (4, 3, 2, 1)]
    legend = page.locator(".tpl-legend")
    for text in ("F forward", "B backward: I, then W", "idle", "microbatches held, up to 4"):
        expect(legend).to_contain_text(text)
    expect(legend).not_to_contain_text("input gradient")  # 1F1B has none of its own
    expect(page.locator(".tpl-figures")).to_contain_text("(p−1)(F+I+W) / T = 9 / 33")
    expect(page.locator(".tpl-figures")).to_contain_text("(p−1)/m = 9 / 24")


def test_figures_and_their_letters_are_explained(page: Page):
    draw(page, gantt(dualpipe(4, 8), zb_v(4, 8)))
    explained = page.locator(".tpl-meanings")
    expect(explained.locator("dl")).to_be_hidden()
    explained.locator("summary").press("Enter")
    said = dict(zip(explained.locator("dt").all_inner_texts(), explained.locator("dd").all_inner_texts(), strict=True))
    names = set(page.locator(".tpl-figures .tpl-what").all_inner_texts())
    assert set(said) == {"letters", *names} and "with overlap 1" in names
    assert "Megatron-LM's (p−1)/m" in said["bubble, of the ideal time"] and "T is the makespan" in said["letters"]
    assert page.evaluate("model.get('step')") == 0


def test_schedules_have_the_names_of_their_papers(page: Page):
    draw(page, pipeline_lab("one_f_one_b", compare="zb_v"))
    expect(page.locator("header b")).to_have_text("1F1B")
    expect(page.get_by_label("schedule", exact=True).locator("option")).to_contain_text(["naive", "GPipe", "1F1B"])
    expect(page.locator(".tpl-of")).to_have_text(["1F1B", "ZB-V"])


def test_no_frame_is_left_when_another_schedule_is_shown(page: Page):
    lab = pipeline_lab("one_f_one_b")
    drawn, chart = draw(page, lab), page.locator(".tpl-lanes").bounding_box()
    assert chart is not None
    assert "F0" in drawn.hint_at(chart["x"] + LEFT + 10, chart["y"] + TOP + 5)
    expect(page.locator(".tpl-barmark")).to_have_count(1)
    lab.settings = {**lab.settings, "forward": 2.0}
    page.evaluate(
        """(board) => {
          window.model.set("board", new DataView(Uint8Array.from(atob(board), (c) => c.charCodeAt(0)).buffer));
          window.model.tell("change:board");
        }""",
        base64.b64encode(lab.board).decode(),
    )
    expect(page.locator(".tpl-about")).to_contain_text("2 : 1 : 1")
    expect(page.locator(".tpl-barmark")).to_have_count(0)


def test_a_live_switch_of_the_theme_repaints_the_chart(page: Page):
    draw(page, gantt(one_f_one_b(4, 8)))
    check_live_theme(page, ".tpl-lanes canvas")


def sent(page: Page) -> list:
    return page.evaluate("window.sent")


def test_actions_are_chosen_and_moved_with_the_keyboard(page: Page):
    draw(page, pipeline_lab("one_f_one_b"))
    root = page.locator(".tplab")
    root.get_by_role("button", name="move actions by hand").click()
    for key, chosen in (
        ("ArrowRight", "F0 of stage 0, rank 0"),
        ("ArrowRight", "F1 of stage 0, rank 0"),
        ("ArrowDown", "F0 of stage 1, rank 1"),
        ("ArrowLeft", "F0 of stage 1, rank 1"),
        ("ArrowRight", "F1 of stage 1, rank 1"),
        ("ArrowUp", "F2 of stage 0, rank 0"),
    ):
        page.keyboard.press(key)
        expect(root.locator(".tpl-notice")).to_have_text(f"chosen: {chosen}")
    page.keyboard.press("Shift+ArrowRight")
    page.keyboard.press("Control+z")
    assert sent(page) == [{"move": [0, 2, 3]}, {"undo": True}]
    assert page.evaluate("model.get('step')") == 0  # the arrows did not move the playhead
    page.keyboard.press("Escape")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("model.get('step')") == 1


def test_moves_can_be_taken_back_with_buttons(page: Page):
    lab = pipeline_lab("one_f_one_b")
    assert lab.move(0, 4, 3)
    draw(page, lab)
    page.get_by_role("button", name="take back the last move").click()
    page.get_by_role("button", name="take back all moves").click()
    assert sent(page) == [{"undo": True}, {"reset": True}]


def test_a_rule_that_does_not_fit_greys_the_picture(page: Page):
    lab = pipeline_lab("gpipe")
    lab.settings = {**lab.settings, "rule": "dualpipe", "ranks": 3}
    draw(page, lab)
    expect(page.locator(".tpl-notice")).to_contain_text("even number of ranks")
    assert page.locator(".tpl-lanes").evaluate("(lanes) => Number(getComputedStyle(lanes).opacity)") < 0.5
    page.evaluate("model.set('is_stale', false); model.set('notice', ''); model.tell('change:is_stale')")
    assert page.locator(".tpl-lanes").evaluate("(lanes) => Number(getComputedStyle(lanes).opacity)") == 1
