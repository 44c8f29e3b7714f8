"""`knob` and `matrices` in JupyterLab."""

from playwright.sync_api import expect

KNOB = """
from tplab.widgets.knob import Bars, Row, knob
def bars(n):
    rows = [Row("1 rank", {"computing": 8e-6}), Row("8 ranks", {"computing": 1e-6, "the sum": n * 1e-6}, "so fast")]
    return Bars(rows, f"The sum takes {n} microseconds.")
options = {n: bars(n) for n in (1, 2, 4)}
card = knob("A knob", "size", options, start=2)
card
"""
MATRICES = """
import numpy as np
from tplab.widgets.matrices import Matrices, Panel
Matrices([Panel("yours", np.array([[1, -2]]), np.array([[False, True]])), Panel("right", np.array([[1, 2]]))],
         "A title", "One line.\\nAnother line.")
"""


def test_the_knob_turns_by_keys_and_from_python(open_notebook):
    book = open_notebook([KNOB])
    root = book.output(0).locator(".tplab")
    expect(root).to_have_attribute("data-theme", "light")
    expect(root.locator(".tpl-say")).to_have_text("The sum takes 2 microseconds.")
    slider = root.get_by_role("slider", name="size")
    slider.focus()
    book.page.keyboard.press("ArrowRight")
    expect(root.locator(".tpl-say")).to_have_text("The sum takes 4 microseconds.")
    expect(slider).to_have_attribute("aria-valuetext", "4")
    expect(root.locator("canvas[role=img]")).to_have_attribute("aria-label", "1 rank: 8 µs ; 8 ranks: 5 µs so fast")
    assert book.run("print(card.index)") == "2\n"
    book.page.keyboard.press("Home")
    expect(root.locator(".tpl-say")).to_have_text("The sum takes 1 microseconds.")
    assert any(book.run("print(card.index)") == "0\n" for _ in range(20))  # until the kernel has heard of the key
    book.run("card.index = 1")
    expect(root.locator(".tpl-say")).to_have_text("The sum takes 2 microseconds.")
    assert slider.input_value() == "1"


def test_matrices_follow_the_theme(open_notebook):
    book = open_notebook([MATRICES], theme="dark")
    root = book.output(0).locator(".tplab")
    expect(root).to_have_attribute("data-theme", "dark")
    expect(root.locator("header b")).to_have_text("A title")
    expect(root.locator("p")).to_have_text(["One line.", "Another line."])
    expect(root.locator("caption")).to_have_text(["yours", "right"])
    expect(root.locator("td")).to_have_text(["1", "-2", "1", "2"])
    expect(root.get_by_label("-2, wrong")).to_be_visible()
    ink = root.evaluate("node => getComputedStyle(node).color")
    assert sum(map(int, ink.removeprefix("rgb(").removesuffix(")").split(","))) // 3 > 128
