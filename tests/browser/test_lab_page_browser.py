"""`pipeline_lab` on a page of the site, without a kernel: Pyodide runs in Chromium, from this site.

NumPy for Pyodide cannot be had here. So the CDN that has it cannot be reached in the first test. In the others it
serves a stand-in without arithmetic: tplab's own modules are imported by the Python of the browser, and the workbench,
which would compute, is replaced by one that gives back a board that was computed here. The page has the policy that
it has on the site, and nobody breaks it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zipfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from urllib.parse import urljoin

import pytest
from playwright.sync_api import Page, Route, expect

from tests.browser.site_page import served
from tplab.widgets import pipeline_lab
from website import pyodide

WHEEL = "numpy-2.4.6-py3-none-any.whl"
NUMPY = """\
class Nothing:
    def __getattr__(self, name): return Nothing()
    def __call__(self, *args, **kwargs): return Nothing()
    def __getitem__(self, key): return Nothing()
    def __iter__(self): return iter(())
    def __or__(self, other): return self
    def __ror__(self, other): return self
ndarray = int64 = float64 = integer = floating = number = generic = bool_ = type("ndarray", (), {})
nothing = Nothing()
def __getattr__(name): return nothing
"""
WORKBENCH = """

class Workbench(Workbench):
    def __init__(self, settings):
        check_settings(settings)
        self.settings, self.runs, self._past, self.notice, self.is_stale = settings, [1], [], "", False

    def ask(self, settings):
        check_settings(settings)
        self.settings, self.runs = settings, [settings["rule"]]
        if settings["rule"] == "naive":
            raise RuntimeError("this test wants an error")

    def board(self):
        import base64
        return base64.b64decode(BOARD)
"""


PYTHON = """\
from tplab.widgets import pipeline_lab
card = pipeline_lab("zb_h1")"""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[str]:
    """The address of a page with a pipeline lab on it, on a site that has what it needs."""
    pyodide.write(tmp_path)
    with served(tmp_path, [PYTHON]) as address:
        yield address


def figure_of(page: Page, name: str):
    return page.locator(".tpl-facts > div", has_text=name).first.locator("b")


def choose(page: Page, rule: str) -> None:
    page.get_by_role("combobox", name="schedule").select_option(rule)


def test_where_numpy_cannot_be_reached_the_page_says_so_and_still_plays(page: Page, site: str):
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.context.route("https://cdn.jsdelivr.net/**", lambda route: route.abort())
    page.goto(site)
    expect(figure_of(page, "makespan")).to_have_text("27")
    note = page.locator(".tpl-notice")
    expect(note).to_contain_text("loads Python from this site, about 14 MB, and NumPy from cdn.jsdelivr.net")
    page.get_by_label("play (space)").click()
    expect(page.get_by_label("pause (space)")).to_be_visible()
    of_python = {address.rpartition("/python/")[2] for address in asked if "/python/" in address}
    assert of_python == {"about.json"}  # its size; nothing more until a control is touched
    choose(page, "gpipe")
    expect(note).to_contain_text("Python is loading: 14 MB")
    expect(page.get_by_role("progressbar")).to_be_visible()
    expect(note).to_contain_text("NumPy could not be loaded from cdn.jsdelivr.net", timeout=120_000)
    expect(note).to_contain_text("try again")
    expect(page.get_by_role("combobox", name="schedule")).to_have_value("zb_h1")  # as the picture, which stays
    expect(figure_of(page, "makespan")).to_have_text("27")
    elsewhere = {address for address in asked if not address.startswith((urljoin(site, "/"), "blob:", "data:"))}
    assert elsewhere == {f"https://cdn.jsdelivr.net/pyodide/v{pyodide.version()}/full/{numpy_wheel()}"}


def numpy_wheel() -> str:
    lock = json.loads((pyodide.installed() / "pyodide-lock.json").read_text(encoding="utf8"))
    return lock["packages"]["numpy"]["file_name"]


def test_questions_go_to_python_and_answers_come_back(page: Page, site: str, tmp_path: Path):
    wheel = stand_in(tmp_path / "python", pipeline_lab("gpipe").board)

    def serve(route: Route) -> None:
        assert route.request.url.endswith(WHEEL)
        route.fulfill(body=wheel, headers={"Access-Control-Allow-Origin": "*"})

    said: list[str] = []
    page.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
    page.context.route("https://cdn.jsdelivr.net/**", serve)
    page.goto(site)
    choose(page, "gpipe")
    choose(page, "zb_v")  # while Python is loading: only the last question is kept
    expect(page.locator("header b")).to_have_text("GPipe", timeout=120_000)
    expect(figure_of(page, "makespan")).to_have_text("33")
    expect(page.get_by_role("combobox", name="schedule")).to_have_value("zb_v")
    expect(page.locator(".tpl-notice")).to_have_text("")
    expect(page.get_by_role("progressbar")).to_be_hidden()
    assert said == []  # nothing that the page's policy refuses, among other things
    choose(page, "naive")
    note = page.locator(".tpl-notice.tpl-wrong")
    expect(note).to_contain_text("Python stopped with an error: RuntimeError: this test wants an error")
    expect(page.get_by_role("combobox", name="schedule")).to_have_value("zb_v")


def test_a_link_brings_settings_and_then_the_step_or_else_says_why_not(page: Page, site: str, tmp_path: Path):
    wheel = stand_in(tmp_path / "python", pipeline_lab("gpipe", microbatches=40).board)
    allowed = {"Access-Control-Allow-Origin": "*"}
    page.context.route("https://cdn.jsdelivr.net/**", lambda route: route.fulfill(body=wheel, headers=allowed))
    page.goto(site)
    name = page.locator("figure.card").get_attribute("id")
    page.goto(f'{site}?{name}.step=80&{name}.settings.rule="gpipe"&{name}.settings.stage_costs=7')
    expect(page.locator("header b")).to_have_text("GPipe", timeout=120_000)
    expect(page.get_by_role("combobox", name="schedule")).to_have_value("gpipe")
    expect(page.locator(".tpl-slider").last).to_have_value("80")  # more steps than the schedule of the page has
    expect(page).to_have_url(re.compile("step=80"))
    page.goto(f'{site}?{name}.settings.rule="renamed"')
    note = page.locator(".tpl-notice.tpl-wrong")
    expect(note).to_contain_text(
        "The link asks for what this lab cannot show, so the lab is as it was", timeout=120_000
    )
    expect(note).to_contain_text("rule is 'renamed'; it must be one of")
    expect(page.get_by_role("combobox", name="schedule")).to_have_value("zb_h1")
    expect(page).to_have_url(site)


@pytest.mark.parametrize("wrong", ["file", "host"])
def test_no_other_file_and_no_other_host_can_be_numpy(page: Page, site: str, tmp_path: Path, wrong: str):
    """A browser compares the file with its hash in Pyodide's list, and the page's policy names the one host."""
    folder = tmp_path / "python"
    wheel = stand_in(folder, pipeline_lab("gpipe").board)
    served: list[str] = []

    def serve(route: Route) -> None:
        served.append(route.request.url)
        data = BytesIO(wheel)
        if wrong == "file":
            with zipfile.ZipFile(data, "a") as archive:
                archive.writestr("numpy/stolen.py", "")
        route.fulfill(body=data.getvalue(), headers={"Access-Control-Allow-Origin": "*"})

    host = "cdn.jsdelivr.net" if wrong == "file" else "elsewhere.example"
    if wrong == "host":
        about = json.loads((folder / "about.json").read_text(encoding="utf8"))
        about |= {"numpyFrom": f"https://{host}/", "bytes": 6_100_000}
        (folder / "about.json").write_text(json.dumps(about), encoding="utf8")
    page.context.route(f"https://{host}/**", serve)
    page.goto(site)
    size = "14 MB" if wrong == "file" else "7 MB"
    expect(page.locator(".tpl-notice")).to_contain_text(f"about {size}, and NumPy from {host}")
    choose(page, "gpipe")
    note = page.locator(".tpl-notice.tpl-wrong")
    expect(note).to_contain_text(f"NumPy could not be loaded from {host}", timeout=120_000)
    expect(page.get_by_role("combobox", name="schedule")).to_have_value("zb_h1")
    assert len(served) == (wrong == "file")


def stand_in(folder: Path, board: bytes) -> bytes:
    """A wheel in NumPy's place, which the list of packages names; and a workbench that computes nothing."""
    data = BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("numpy/__init__.py", NUMPY)
        archive.writestr("numpy/typing.py", "ArrayLike = object")
        archive.writestr("numpy-2.4.6.dist-info/METADATA", "Metadata-Version: 2.1\nName: numpy\nVersion: 2.4.6\n")
        archive.writestr(
            "numpy-2.4.6.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("numpy-2.4.6.dist-info/RECORD", "")
    wheel = data.getvalue()
    file = folder / "pyodide-lock.json"
    lock = json.loads(file.read_text(encoding="utf8"))
    lock["packages"]["numpy"] |= {"file_name": WHEEL, "sha256": hashlib.sha256(wheel).hexdigest()}
    file.write_text(json.dumps(lock), encoding="utf8")
    name = "tplab/widgets/schedule/workbench.py"
    sources = zipfile.ZipFile(BytesIO((folder / "tplab.zip").read_bytes()))
    with zipfile.ZipFile(folder / "tplab.zip", "w") as archive:
        for one in sources.namelist():
            text = sources.read(one).decode()
            if one == name:
                text += WORKBENCH.replace("BOARD", repr(base64.b64encode(board).decode()))
            archive.writestr(one, text)
    return wheel
