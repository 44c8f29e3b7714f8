"""Tasks under `pipeline_lab` and `layout_lab`: chosen, hinted at, solved by what Python computes, and remembered."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect

from tests.browser.plain_page import draw
from tplab.forecast import Plan
from tplab.widgets import layout_lab, pipeline_lab
from tplab.widgets.schedule.tasks import TASKS

PIPELINE = """
from tplab.widgets import pipeline_lab
lab = pipeline_lab()
lab
"""
LAYOUT = """
from tplab.widgets import layout_lab
lab = layout_lab("llama3-8b", gpus=64, task="half-of-fastest")
lab
"""


def test_in_jupyterlab_a_task_is_solved_by_the_controls_and_stays_solved(open_notebook):
    book = open_notebook([PIPELINE])
    root = book.output(0).locator(".tplab")
    task, says = root.get_by_label("task", exact=True), root.locator(".tpl-verdict")
    expect(says).to_be_hidden()
    root.get_by_label("schedule").select_option("gpipe")
    task.select_option("same-memory")
    expect(root.get_by_label("schedule")).to_have_value("one_f_one_b")  # as the task begins
    expect(says).to_have_text("Not yet: the bubble is 27.3% of the makespan, and it may be 10% at most.")
    expect(root.locator(".tpl-tasks")).to_contain_text("0 of 8 solved")
    root.get_by_label("schedule").select_option("zb_v")
    expect(says).to_have_text("Solved: the bubble is 5.88% of the makespan; a rank holds 4 microbatches at once.")
    expect(says).to_have_attribute("data-solved", "true")
    assert book.run("print(lab.settings['task'], lab.verdict['is_solved'])") == "same-memory True\n"
    root.get_by_role("slider", name="ranks").focus()
    book.page.keyboard.press("ArrowRight")
    expect(says).to_have_text("Not yet: ranks is set to 5, and this task needs 4.")
    expect(root.locator(".tpl-tasks")).to_contain_text("1 of 8 solved")  # once is enough
    kept = book.page.evaluate("JSON.parse(localStorage.getItem('tplab.solved'))")
    assert kept == ["same-memory"]
    root.get_by_role("button", name="set the controls as the task begins").click()
    expect(says).to_contain_text("Not yet: the bubble is 27.3%")
    expect(task.locator("option[value=same-memory]")).to_contain_text("✓")


def test_in_jupyterlab_the_chosen_plan_is_judged_when_it_is_chosen(open_notebook):
    book = open_notebook([LAYOUT])
    root = book.output(0).locator(".tplab")
    says = root.locator(".tpl-verdict")
    expect(says).to_contain_text("Not yet: the fullest rank holds ")
    find = "next(i for i, p in enumerate(lab.shown) if p.zero == 3 and p.recompute == 'full' and p.dp == 64)"
    book.run(f"lab.chosen = {find}")
    expect(says).to_contain_text("Solved: the fullest rank holds ")
    root.focus()
    book.page.keyboard.press("Home")
    expect(says).to_contain_text("Not yet: the fullest rank holds ")


def test_hints_come_one_at_a_time_and_only_for_their_task(page: Page):
    draw(page, pipeline_lab(task="even"))
    hints, button = page.locator(".tpl-hints li"), page.get_by_role("button", name="show one more hint")
    given = TASKS.by_name["even"].hints
    for count in range(len(given)):
        expect(hints).to_have_text(list(given[:count]))
        button.click()
    expect(hints).to_have_text(list(given))
    expect(button).to_be_disabled()
    page.get_by_label("task", exact=True).select_option("tenth")
    expect(hints).to_have_count(0)
    expect(page.locator(".tpl-asked")).to_have_text(TASKS.by_name["tenth"].text)
    expect(page.locator(".tpl-verdict")).to_have_text("")  # Python has not answered yet
    page.get_by_label("task", exact=True).select_option("")
    expect(page.locator(".tpl-asked")).to_be_hidden()


def test_choosing_a_task_asks_python_for_its_start(page: Page):
    draw(page, pipeline_lab("zb_v", ranks=6, microbatches=12))
    page.get_by_label("task", exact=True).select_option("exchange")
    settings = page.evaluate("window.model.get('settings')")
    assert {**settings, "own": None} == {**TASKS.by_name["exchange"].start, "task": "exchange", "own": None}
    assert page.evaluate("window.sent") == [{"settings": True}]
    expect(page.get_by_role("slider", name="transfer")).to_have_value("1")


def test_a_plan_is_sent_to_python_only_where_a_task_needs_its_verdict(page: Page):
    given = {"cluster": "h100-measured", "gpus": 16, "batch": 64, "sequence": 4096}
    for task in ("", "few"):
        draw(page, layout_lab("llama3-8b", **given, task=task))
        page.locator(".tplab").focus()
        page.keyboard.press("ArrowRight")
        chosen = page.evaluate("window.model.get('chosen')")
        assert page.evaluate("window.sent") == ([{"choose": chosen}] if task else [])


def test_keys_in_the_tasks_move_nothing_else(page: Page):
    draw(page, pipeline_lab(task="even"))
    page.get_by_role("button", name="show one more hint").focus()
    page.keyboard.press("Space")
    page.keyboard.press("ArrowRight")
    expect(page.locator(".tpl-hints li")).to_have_count(1)
    expect(page.locator(".tplab > .tpl-say").first).to_contain_text("t = 0")


def test_all_plans_are_drawn_where_the_chosen_one_has_a_pipeline(page: Page):
    given = {"cluster": "h100-measured", "gpus": 16, "batch": 64, "sequence": 4096}
    drawn = draw(page, layout_lab("llama3-8b", **given, plan=Plan(dp=2, tp=2, pp=4, zero=1)))
    texts = [one.text for one in drawn.written]
    assert {"GiB", "seconds per step", "chosen", "best"} <= {*texts}


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_task_fits_on_a_phone(page: Page, theme: str):
    draw(page, pipeline_lab("zb_v", task="same-memory"), theme, 390, 900)
    page.get_by_role("button", name="show one more hint").click()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    for node in page.locator(".tpl-tasks button, .tpl-tasks select, .tpl-tasks p").all():
        box = node.bounding_box()
        assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= 390
