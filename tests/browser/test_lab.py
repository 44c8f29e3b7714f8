"""The browser tests' own ground: JupyterLab starts, runs cells, changes theme, draws a widget, reports an error."""

import pytest
from playwright.sync_api import expect

COUNTER = """
import anywidget, traitlets
class Counter(anywidget.AnyWidget):
    _esm = '''export default { render({ model, el }) {
      const button = document.createElement("button");
      const show = () => { button.textContent = `count ${model.get("count")}`; };
      button.onclick = () => { model.set("count", model.get("count") + 1); model.save_changes(); };
      model.on("change:count", show); show(); el.append(button);
    } };'''
    count = traitlets.Int(3).tag(sync=True)
counter = Counter()
counter
"""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_cells_run_and_a_widget_answers_both_ways(open_notebook, theme: str):
    book = open_notebook(["print(6 * 7)", COUNTER], theme=theme)
    expect(book.output(0)).to_have_text("42\n")
    button = book.output(1).locator("button")
    expect(button).to_have_text("count 3")
    button.click()
    expect(button).to_have_text("count 4")
    assert book.run("print(counter.count)") == "4\n"
    book.run("counter.count = 9")
    expect(button).to_have_text("count 9")
    assert book.page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches") == (theme == "dark")


def test_a_cell_that_raises_fails_the_test_that_opened_it(open_notebook):
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        open_notebook(["1 / 0"])


def test_reduced_motion_reaches_the_page(open_notebook):
    book = open_notebook(["print()"], reduced_motion=True)
    assert book.page.evaluate("matchMedia('(prefers-reduced-motion: reduce)').matches")


RING = """from tplab import Mesh
from tplab.torch import ring_shift, run
from tplab.widgets import animate
animate(run(lambda: ring_shift(__import__("torch").ones(2), "tp"), Mesh(tp=2)).trace)"""


@pytest.mark.parametrize("where", [".tplab", ".tpl-slider", ".tpl-play"])
def test_a_card_keeps_its_own_keys_and_leaves_jupyterlab_the_others(open_notebook, where: str):
    book = open_notebook([RING, "1"])
    book.output(0).locator(where).first.focus()
    book.page.keyboard.press("d")  # twice, it deletes a cell
    book.page.keyboard.press("d")
    expect(book.panel.locator(".jp-Notebook .jp-Cell")).to_have_count(2)
    saved = book.path.stat().st_mtime_ns
    book.page.evaluate("() => { window.jupyterapp.shell.currentWidget.model.dirty = true; }")
    book.page.keyboard.press("Control+s")
    book.page.wait_for_function("() => !window.jupyterapp.shell.currentWidget.model.dirty")
    assert book.path.stat().st_mtime_ns > saved
    book.page.keyboard.press("Escape")
    expect(book.cell(0)).to_be_focused()
    book.page.keyboard.press("b")  # a new cell below
    expect(book.panel.locator(".jp-Notebook .jp-Cell")).to_have_count(3)
