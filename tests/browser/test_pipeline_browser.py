"""`pipeline_lab` and `gantt` in JupyterLab."""

import json

from playwright.sync_api import expect

LAB = """
from tplab.widgets import gantt, pipeline_lab
lab = pipeline_lab("zb_h1")
lab
"""
GANTT = """
from tplab.schedules import one_f_one_b, zb_v
gantt(one_f_one_b(4, 8), zb_v(4, 8), memory_limit=3)
"""


def figure(root, name: str):
    return root.locator(".tpl-facts > div", has_text=name).first.locator("b")


def test_controls_ask_python(open_notebook):
    book = open_notebook([LAB], theme="dark")
    root = book.output(0).locator(".tplab")
    expect(root).to_have_attribute("data-theme", "dark")
    expect(figure(root, "makespan")).to_have_text("27")
    root.get_by_label("schedule").select_option("gpipe")
    expect(figure(root, "makespan")).to_have_text("33")
    expect(root.locator("header b")).to_have_text("GPipe")
    ranks = root.get_by_role("slider", name="ranks")
    ranks.focus()
    book.page.keyboard.press("ArrowRight")
    expect(root.locator(".tpl-about")).to_contain_text("5 ranks")
    assert book.run("print(lab.settings['ranks'], lab.run.makespan)") == "5 36.0\n"
    root.get_by_label("schedule").select_option("dualpipe")
    expect(root.locator(".tpl-notice")).to_contain_text("dualpipe needs an even number of ranks")
    book.run("lab.settings = {**lab.settings, 'rule': 'one_f_one_b', 'ranks': 4}")
    expect(figure(root, "makespan")).to_have_text("33")
    expect(root.get_by_label("schedule")).to_have_value("one_f_one_b")
    expect(root.locator(".tpl-notice")).to_have_text("")
    costs = root.get_by_label("cost of each stage")
    costs.press_sequentially("1, 1, 1")
    expect(root.locator(".tpl-notice")).to_contain_text("3 figures and the schedule has 4 stages")
    expect(root).to_have_attribute("data-stale", "true")
    costs.press_sequentially(", 2")
    expect(figure(root, "makespan")).to_have_text("57")
    expect(root).to_have_attribute("data-stale", "false")
    assert book.run("print(lab.run.makespan, lab.schedule.name)") == "57.0 one_f_one_b\n"


def test_without_a_kernel_it_says_so_once_something_is_asked(open_notebook):
    book = open_notebook([LAB])
    root = book.output(0).locator(".tplab")
    expect(figure(root, "makespan")).to_have_text("27")
    book.page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.shutdown()")
    notice = root.locator(".tpl-notice")
    expect(notice).to_have_text("")
    root.get_by_label("schedule").select_option("gpipe")
    expect(notice).to_contain_text("No kernel answers")
    expect(root.get_by_label("schedule")).to_have_value("zb_h1")  # as the picture, which stays
    expect(figure(root, "makespan")).to_have_text("27")
    root.get_by_role("button", name="save as csv").click()
    expect(notice).to_contain_text("No kernel answers")


def test_a_kernel_that_answers_late_is_no_dead_one(open_notebook, tmp_path):
    book = open_notebook([LAB])
    root = book.output(0).locator(".tplab")
    expect(figure(root, "makespan")).to_have_text("27")
    busy = f"import pathlib, time\nwhile not pathlib.Path({str(tmp_path / 'go')!r}).exists(): time.sleep(0.05)"
    kernel = "window.jupyterapp.shell.currentWidget.sessionContext.session.kernel"
    book.page.evaluate(f"code => {{ {kernel}.requestExecute({{ code }}); }}", busy)  # and do not wait for it
    root.get_by_label("schedule").select_option("gpipe")
    expect(root.locator(".tpl-notice")).to_contain_text("No kernel answers")
    (tmp_path / "go").touch()
    expect(figure(root, "makespan")).to_have_text("33")
    expect(root.locator(".tpl-notice")).to_have_text("")
    expect(root.get_by_label("schedule")).to_have_value("gpipe")


def test_actions_are_moved_by_hand(open_notebook):
    book = open_notebook([LAB.replace("zb_h1", "one_f_one_b")])
    root = book.output(0).locator(".tplab")
    root.get_by_role("button", name="move actions by hand").click()
    box = root.locator(".tpl-lanes canvas").first.bounding_box()
    assert box is not None
    unit = (box["width"] - 120) / 33  # the makespan is 33
    middle = box["y"] + 16
    book.page.mouse.click(box["x"] + 58 + 12.5 * unit, middle)  # F4 of rank 0
    expect(root.locator(".tpl-notice")).to_have_text("chosen: F4 of stage 0, rank 0")
    root.get_by_role("button", name="move the chosen action one place earlier").click()
    expect(root.get_by_label("schedule")).to_have_value("edited")
    expect(root.locator(".tpl-notice")).to_contain_text("Rank 0 now runs F4 of stage 0 after F3 of stage 0")
    root.evaluate("node => node.focus({ preventScroll: true })")
    book.page.keyboard.press("Shift+ArrowRight")
    expect(root.locator(".tpl-notice")).to_contain_text("Rank 0 now runs F4 of stage 0 after B0 of stage 0")
    book.page.keyboard.press("Shift+ArrowLeft")
    expect(root.locator(".tpl-notice")).to_contain_text("Rank 0 now runs F4 of stage 0 after F3 of stage 0")
    assert book.run("print([str(a) for a in lab.schedule.by_rank()[0][3:6]])") == "['0F3', '0F4', '0B0']\n"
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "ArrowRight"):  # faster than they are answered
        book.page.keyboard.press(f"Shift+{key}")
    expect(root.locator(".tpl-notice")).to_contain_text("Rank 0 now runs F4 of stage 0 after B1 of stage 0")
    assert book.run("print([str(a) for a in lab.schedule.by_rank()[0][3:7]])") == "['0F3', '0B0', '0B1', '0F4']\n"
    for _ in "ab":
        book.page.keyboard.press("Shift+ArrowLeft")
    expect(root.locator(".tpl-notice")).to_contain_text("Rank 0 now runs F4 of stage 0 after F3 of stage 0")
    book.page.mouse.move(box["x"] + 58 + 0.5 * unit, middle)  # F0 is dragged behind everything
    book.page.mouse.down()
    book.page.mouse.move(box["x"] + 58 + 30 * unit, middle, steps=4)
    book.page.mouse.up()
    expect(root.locator(".tpl-notice")).to_contain_text("not legal")


def test_the_playhead_and_files(open_notebook):
    book = open_notebook([LAB])
    root = book.output(0).locator(".tplab")
    expect(root.locator(".tpl-say")).to_contain_text("t = 0")
    root.focus()
    book.page.keyboard.press("End")
    expect(root.locator(".tpl-say")).to_contain_text("t = 27")
    book.page.keyboard.press("Home")
    book.page.keyboard.press("ArrowRight")
    expect(root.locator(".tpl-say")).to_contain_text("rank 0 runs F1, rank 1 runs F0")
    for _ in range(200):  # the page's last value comes when the kernel has taken the one before, and would count
        if book.run("print(lab.step == 1)") == "True\n":
            break
        book.page.wait_for_timeout(50)
    book.run("lab.step = 3")
    expect(root.locator(".tpl-say")).to_contain_text("t = 3")
    with book.page.expect_download() as caught:
        root.get_by_role("button", name="save as perfetto").click()
    with open(caught.value.path(), encoding="utf8") as file:
        assert caught.value.suggested_filename == "zb_h1.json" and json.load(file)["traceEvents"]
    box = root.locator(".tpl-lanes canvas").first.bounding_box()
    assert box is not None
    book.page.mouse.move(box["x"] + 58 + 5 * (box["width"] - 120) / 27, box["y"] + 16)
    expect(root.locator(".tpl-hint")).to_contain_text("rank 0 idles")
    expect(root.locator(".tpl-hint")).to_contain_text("I0 of stage 1 on rank 1")


def test_two_schedules_under_one_playhead(open_notebook):
    book = open_notebook([LAB.replace("\nlab\n", "\n"), GANTT])
    root = book.output(1).locator(".tplab")
    expect(root.locator(".tpl-of")).to_have_text(["1F1B", "ZB-V"])
    expect(root.locator(".tpl-playhead")).to_have_count(1)
    expect(root.locator(".tpl-lanes canvas").first).to_have_attribute(
        "aria-label", "1F1B on 4 ranks, 33 long; ZB-V on 4 ranks, 25.5 long"
    )
