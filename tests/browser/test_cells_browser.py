"""Cells on a page of the site: Pyodide and IPython run them in Chromium, from files of the site.

What is compiled, NumPy and Pillow, cannot be had here, so stand-ins come from the CDN. tplab has a stand-in too, with
one widget: what the labs' own cells show is in tests/website/test_cells.py.
"""

from __future__ import annotations

import hashlib
import html
import json
import zipfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, Route, expect

from tests.browser.site_page import served
from website import lite, pyodide

CELLS = [
    ("runs", "import torch\nprint('once')\nx = 40"),
    ("runs", "print('so', x)\nx + 2"),
    ("torch", "torch.ones(x)"),
    ("runs", "while x:\n    pass"),
    ("runs", "raise ValueError(f'x is {x}; give 41')"),
    ("runs", "from tplab.widgets.paper.card import Toy\ntoy = Toy()\ntoy"),
]
CARD = """
import anywidget, traitlets
class Card(anywidget.AnyWidget): pass
class Toy(Card):
    _esm = "export default {}"
    count = traitlets.Int(1).tag(sync=True)
    squared = traitlets.Int(1).tag(sync=True)
    packed = traitlets.Bytes(b"abc").tag(sync=True)
    @traitlets.observe("count")
    def _square(self, change): self.squared = change["new"] ** 2
"""
TOY = """
export default { render({ model, el }) {
  const button = document.createElement("button");
  const bytes = model.get("packed").byteLength;
  const show = () => { button.textContent = `squared: ${model.get("squared")}, bytes: ${bytes}`; };
  button.addEventListener("click", () => { model.set("count", model.get("count") + 1); model.save_changes(); });
  model.on("change:squared", show);
  show();
  el.append(button);
} };
"""
LINKS = (
    '<nav class="launch"><a href="https://colab.example/">Colab</a><a href="https://binder.example/">Binder</a></nav>'
)
CODE = '<div class="cell tag_{tag}"><div class="cell_input"><div class="highlight"><pre>{code}</pre></div></div></div>'


def wheel(name: str, files: dict[str, str]) -> bytes:
    data = BytesIO()
    about = {"METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n", "RECORD": ""}
    about["WHEEL"] = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(data, "w") as archive:
        for path, text in {**files, **{f"{name}-0.dist-info/{file}": text for file, text in about.items()}}.items():
            archive.writestr(path, text)
    return data.getvalue()


@pytest.fixture
def site(page: Page, tmp_path: Path) -> Iterator[str]:
    pyodide.write(tmp_path, numpy_from_cdn=True)
    python = tmp_path / "python"
    lite.write_packages(python, lite.downloaded_wheels())
    (python / "cards" / "Toy.js").write_text(TOY)
    files = {name: {f"{name}/__init__.py": ""} for name in ("numpy", "pillow")}
    names = ["tplab/__init__.py", "tplab/widgets/__init__.py", "tplab/widgets/paper/__init__.py"]
    files["tplab"] = {**dict.fromkeys(names, ""), "tplab/widgets/paper/card.py": CARD}
    lock = json.loads((python / lite.LIST).read_text())
    served_there = {}
    for name, content in files.items():
        data, entry = wheel(name, content), lock["packages"][name]
        address = f"{pyodide.numpy_from()}{name}-0-py3-none-any.whl"
        entry |= {"file_name": address, "sha256": hashlib.sha256(data).hexdigest()}
        served_there[address] = data
    (python / lite.LIST).write_text(json.dumps(lock))

    def serve(route: Route) -> None:
        route.fulfill(body=served_there[route.request.url], headers={"Access-Control-Allow-Origin": "*"})

    page.context.route("https://cdn.jsdelivr.net/**", serve)
    article = "".join(CODE.format(tag=tag, code=html.escape(code)) for tag, code in CELLS)
    with served(tmp_path, [], body=f"{LINKS}<article>{article}</article>") as address:
        yield address


def outputs(cell: Locator) -> Locator:
    return cell.locator(".cell_output .output")


@pytest.mark.timeout(300)
def test_cells_run_are_edited_and_stopped(page: Page, site: str):
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
    page.goto(site)
    first, second, torch, loop, wrong, toy = page.locator("div.cell").all()
    expect(torch.locator(".run")).to_contain_text("needs torch or JAX. Run the page on Colab or Binder.")
    assert torch.get_by_role("link").first.get_attribute("href") == "https://colab.example/"
    second.get_by_role("button", name="Run cell 2").click()
    expect(outputs(second)).to_have_text(["so 40\n", "42"], timeout=120_000)
    expect(outputs(first)).to_have_text("A browser has no torch, so this import is left out here.\nonce\n")

    code = first.get_by_role("textbox", name="code of cell 1")
    code.fill("print('again')\nx = 1")
    second.get_by_role("textbox").press("Shift+Enter")  # runs what has changed above it too
    expect(outputs(second)).to_have_text(["so 1\n", "3"])
    expect(outputs(first)).to_have_text("again\n")

    wrong.get_by_role("button", name="Run cell 5").click()  # after the loop above it
    expect(loop.get_by_role("status")).to_have_text("Running.")
    expect(wrong.get_by_role("status")).to_have_text("Waiting for the cells above it.")
    loop.get_by_role("button", name="Stop cell 4").click()
    expect(loop.get_by_role("status")).to_contain_text("Stopped. Python begins anew")
    loop.get_by_role("textbox").fill("'no loop'")
    wrong.get_by_role("button", name="Run cell 5").click()
    expect(outputs(wrong).locator("pre").first).to_have_text("ValueError: x is 1; give 41", timeout=120_000)
    expect(outputs(wrong).locator("details pre")).to_be_hidden()
    expect(outputs(loop)).to_have_text("'no loop'")

    wrong.get_by_role("textbox").fill("")
    toy.get_by_role("button", name="Run cell 6").click()
    shown = toy.get_by_role("button", name="squared: 1, bytes: 3")
    shown.click()
    expect(toy.get_by_role("button", name="squared: 4, bytes: 3")).to_be_visible()
    assert said == []
