"""Labs as notebooks in JupyterLite: which, and with which links. tests/browser/test_site_browser.py runs one."""

from __future__ import annotations

import re

import nbformat

from labs.source import build
from website import lite
from website.pages import address, launch

LAB = "10_pipeline_schedules"


def test_only_labs_without_a_framework_run_there():
    assert lite.labs(build.names()) == [LAB]
    assert lite.page(LAB) in launch(LAB) and "Your browser" not in launch("00_first_look")


def test_the_notebook_is_the_labs_own_with_links_to_the_site():
    book = nbformat.reads(lite.notebook(LAB, address()), as_version=4)
    own = nbformat.read(build.LABS / f"{LAB}.ipynb", as_version=4)
    code, own_code = ([cell for cell in one.cells if cell.cell_type == "code"] for one in (book, own))
    assert code == own_code
    text = "\n".join(cell.source for cell in book.cells if cell.cell_type == "markdown")
    assert "NumPy and Pillow come from cdn.jsdelivr.net" in text
    assert "badge" not in text and build.closing_line() not in text
    assert f"]({address()}labs/00_first_look.html)" in text
    targets = [target for target in re.findall(r"\]\(([^)]+)\)", text) if "://" not in target]
    assert set(targets) <= {f"images/{LAB}.png"}


def test_every_file_is_pinned_by_its_hash():
    pinned = re.findall(
        r"^([a-z0-9-]+)==\S+ \\\n( +--hash=sha256:[0-9a-f]{64}( \\\n)?)+", lite.LOCK.read_text(), re.MULTILINE
    )
    assert {"jupyterlite-core", "jupyterlite-pyodide-kernel", "ipywidgets", "anywidget"} <= {
        name for name, *_ in pinned
    }
    assert len(pinned) == lite.LOCK.read_text().count("==")
