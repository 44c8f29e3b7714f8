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
