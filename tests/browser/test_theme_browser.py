"""Every widget after a live switch of the theme looks as if it had been drawn in that theme."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Page, expect

from tests.browser.plain_page import draw
from tests.hand_traces import ring_all_reduce
from tests.widgets.test_page import WIDGETS
from tplab import Mesh
from tplab.schedules import dualpipe
from tplab.widgets import animate, gantt
from tplab.widgets.paper.card import Card

SHOWN = {
    **{name: (lambda make=make: make("x")) for name, make in WIDGETS.items() if name != "gantt"},
    "a table of 64 ranks": lambda: animate(ring_all_reduce(Mesh(tp=64), "tp"), step=3),
    "colours by stage": lambda: gantt(dualpipe(4, 8), colour="stage"),
}


def pixels(page: Page) -> np.ndarray:
    return np.asarray(Image.open(BytesIO(page.locator(".tplab").screenshot())).convert("RGB"), int)


@pytest.mark.parametrize("name", SHOWN)
def test_a_live_switch_is_as_good_as_drawing_anew(page: Page, name: str):
    make: Callable[[], Card] = SHOWN[name]
    draw(page, make(), theme="dark")
    anew = pixels(page)
    draw(page, make(), theme="light")
    light = pixels(page)
    assert light.shape == anew.shape and np.abs(light - anew).mean() > 50
    page.evaluate("document.body.dataset.jpThemeLight = 'false'")
    expect(page.locator(".tplab")).to_have_attribute("data-theme", "dark")
    assert np.abs(pixels(page) - anew).max() <= 3  # a smoothed corner may be one step off


TIMELINE = """
import torch
import tplab.torch as tt
from tplab import Mesh
from tplab.widgets import timeline
timeline(tt.run(lambda x: tt.all_reduce(x @ x, "tp"), Mesh(tp=4), torch.ones(64, 64), cluster="h100").trace)
"""


def test_a_canvas_in_jupyterlab_follows_a_live_switch(open_notebook):
    """JupyterLab hides the notebook while it loads a theme, so the canvas has no size at that moment."""
    book = open_notebook([TIMELINE], theme="light")
    canvas = book.output(0).locator(".tpl-lanes canvas")

    def brightness() -> float:
        book.page.wait_for_timeout(300)
        return float(np.asarray(Image.open(BytesIO(canvas.screenshot())).convert("RGB"), int).mean())

    assert brightness() > 200
    book.change_theme("dark")
    assert brightness() < 80
    book.change_theme("light")
    assert brightness() > 200
