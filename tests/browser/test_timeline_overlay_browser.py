"""`timeline(trace, predicted=...)` in JupyterLab, and its pure functions beside Python's."""

from __future__ import annotations

import base64

import pytest
from playwright.sync_api import Page, expect

from tests.widgets.test_timeline_overlay import COSTS, executed, one_by_one
from tplab.schedules import dualpipe, one_f_one_b, simulate, zb_v
from tplab.widgets.paper.card import script
from tplab.widgets.schedule.overlay import Overlay, now, overlay, say, sent

CELL = """
from tests.widgets.test_timeline_overlay import PREDICTED, executed
from tplab.widgets import timeline
w = timeline(executed(PREDICTED, slower=1.5), PREDICTED)
w
"""
ROOT = "import sys; sys.path.insert(0, {!r})\n"

_AT = """async ([data, positions]) => {
  const board = await tpl.unpack(new DataView(Uint8Array.from(atob(data), (c) => c.charCodeAt(0)).buffer));
  return positions.map((position) => tpl.overlaySay(board, tpl.timeAt(board, position)));
}"""


def overlays() -> list[Overlay]:
    found = []
    for schedule, slower in ((one_f_one_b(3, 5), 1.3), (zb_v(2, 3), 0.7), (dualpipe(2, 4), 1.0)):
        trace = executed(simulate(one_by_one(schedule), COSTS), slower=slower)
        found.append(overlay(trace, simulate(schedule, COSTS)))
    return found


def test_what_is_said_at_a_position_is_the_same_in_python_and_in_javascript(page: Page):
    page.goto("about:blank")
    names = "{ unpack, timeAt, overlaySay }"
    code = script("timeline").replace("export default { render };", "") + f"\nwindow.tpl = {names};"
    page.add_script_tag(content=f"(() => {{ {code} }})();")
    for over in overlays():
        positions = [step / 3 for step in range(3 * over.num_steps + 1)]
        data = base64.b64encode(sent(over)).decode()
        for position, theirs in zip(positions, page.evaluate(_AT, [data, positions]), strict=True):
            assert tuple(theirs) == say(over, now(over, position))


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_an_executed_schedule_over_its_prediction(open_notebook, pytestconfig, theme: str):
    book = open_notebook([ROOT.format(str(pytestconfig.rootpath)) + CELL], theme=theme)
    root = book.output(0).locator(".tplab")
    expect(root).to_have_attribute("data-theme", theme)
    expect(root.locator(".tpl-about")).to_have_text("executed 12 · predicted 8 · residual +4")
    expect(root.locator(".tpl-badge")).to_have_text("modelled · unit times")
    expect(root.locator(".tpl-legend")).to_contain_text("executed, above")
    expect(root.locator(".tpl-legend")).to_contain_text("predicted, beneath")
    expect(root.locator(".tpl-lanes canvas")).to_have_attribute(
        "aria-label", "timeline of 1F1B on 2 ranks: executed 12 · predicted 8 · residual +4"
    )
    box = root.locator(".tpl-lanes canvas").bounding_box()
    assert box is not None
    unit, top = (box["width"] - 66) / 12, box["y"] + 6
    x = box["x"] + 58 + 6.5 * unit  # B0 of rank 0 ran from 6 to 8.25 and was due from 4 to 5.5
    hint = root.locator(".tpl-hint")
    for where in ((x, top + 10), (x - 2 * unit, top + 28)):
        book.page.mouse.move(*where)
        for text in ("B0 of stage 0, rank 0", "6 to 8.25, 2.25", "4 to 5.5, 1.5", "starts 2 later, ends 2.75 later"):
            expect(hint).to_contain_text(text)
        expect(root.locator(".tpl-barmark:visible")).to_have_count(2)
    book.page.mouse.move(x - 2.8 * unit, top + 10)
    expect(hint).to_be_hidden()
    book.page.mouse.move(box["x"] + 58 + 9.6 * unit, top + 44 + 10)  # rank 1 after its last action
    expect(hint).to_contain_text("rank 1: mean, no action of the schedule")
    # One playhead for both; Python hears of it, and can set it.
    root.focus()
    book.page.keyboard.press("ArrowRight")
    expect(root.locator(".tpl-say")).to_contain_text("t = 1.5 — rank 1 runs no action (F0 was due); the others")
    book.run("w.step = 2")
    expect(root.locator(".tpl-say")).to_contain_text("t = 3 — rank 1 runs F0 (B0 was due); the others run as predicted")
    book.page.keyboard.press("End")
    expect(root.locator(".tpl-say")).to_contain_text("8 of 8 actions done, 8 due")
    whole = root.locator(".tpl-lanes canvas").evaluate("(canvas) => canvas.toDataURL()")
    book.page.keyboard.press("+")
    assert root.locator(".tpl-lanes canvas").evaluate("(canvas) => canvas.toDataURL()") != whole
    book.page.keyboard.press("0")
    assert root.locator(".tpl-lanes canvas").evaluate("(canvas) => canvas.toDataURL()") == whole
