"""A notebook that was run, saved, and opened again when its kernel is gone."""

import json

from playwright.sync_api import expect

VIEW = "application/vnd.jupyter.widget-view+json"
_SAVE = "() => window.jupyterapp.commands.execute('docmanager:save')"

CELL = """
import torch, tplab.torch as tt
from tplab import Mesh
from tplab.widgets import animate
animate(tt.run(lambda: tt.all_reduce(torch.ones(2), "tp"), Mesh(tp=4)).trace)
"""


def test_a_saved_notebook_shows_its_widgets_without_its_kernel(open_notebook, jupyter_lab):
    book = open_notebook([CELL, "from tplab.widgets import pipeline_lab; pipeline_lab()"])
    expect(book.output(0).locator(".tpl-two canvas").first).to_be_visible()
    expect(book.output(1).locator("canvas").first).to_be_visible()
    book.page.evaluate(_SAVE)
    book.page.wait_for_function("() => !window.jupyterapp.shell.currentWidget.context.model.dirty")
    saved = json.loads(book.path.read_text())
    state = saved["metadata"]["widgets"]["application/vnd.jupyter.widget-state+json"]["state"]
    views = [output["data"][VIEW] for cell in saved["cells"] for output in cell["outputs"]]
    assert len(views) == 2 and all(view["model_id"] in state for view in views)
    book.page.evaluate("() => window.jupyterapp.shell.currentWidget.dispose()")
    jupyter_lab.shut_down_kernels()

    again = open_notebook(book.path, run=False)  # a new kernel, in which nothing has run
    expect(again.output(0).locator(".tpl-two canvas").first).to_be_visible()
    expect(again.output(1).locator("canvas").first).to_be_visible()
    expect(again.panel).not_to_contain_text("Error displaying widget")
    again.output(0).get_by_role("group").focus()
    again.page.keyboard.press("End")
    expect(again.output(0).locator(".tpl-say")).to_contain_text("step 1 of 1")
