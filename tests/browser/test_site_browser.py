"""The site as a reader gets it: made anew, served by a plain static server, opened in Chromium.

On every page all links lead somewhere, nothing is asked of another host, nothing breaks the page's policy, and axe
finds no serious fault in light or dark.
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Locator, Page, expect

from labs.source import build
from website import lite, pyodide
from website.policy import meta

ROOT = Path(__file__).parents[2]
SITE = ROOT / "build" / "site"
LAB = "labs/00_first_look.html"
MEGABYTES = 3  # of the largest lab's page, with all that it loads

pytestmark = pytest.mark.timeout(900)  # the first test makes the site


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    """The address of the site, which is made first. Sphinx takes a warning for an error."""
    command = [sys.executable, "-m", "website", "--numpy-from-cdn"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(SITE)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@dataclass
class Html(HTMLParser):
    """What a page refers to, and the ids that can be referred to."""

    path: Path
    links: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.path.read_text(encoding="utf8"))
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = {name: value for name, value in attrs if value}
        self.ids += [named["id"]] if "id" in named else []
        self.loads += [named[name] for name in ("src", "data-module") if name in named]
        if "href" in named:
            is_loaded = tag == "link" and named.get("rel") not in (
                "canonical",
                "index",
                "search",
                "next",
                "prev",
                "author",
            )
            (self.loads if is_loaded else self.links).append(named["href"])


@cache
def page_of(path: Path) -> Html:
    return Html(path)


def pages() -> list[Path]:
    others = {"_static", lite.FOLDER}  # these are not ours
    return sorted(path for path in SITE.rglob("*.html") if not others & set(path.relative_to(SITE).parts))


def target(page: Html, link: str) -> Path:
    return (page.path.parent / unquote(urlsplit(link).path)).resolve() if urlsplit(link).path else page.path


def test_every_lab_has_a_page(site: str):
    assert {path.stem for path in (SITE / "labs").glob("[0-9]*.html")} == set(build.names())
    assert "index.html" in {path.name for path in SITE.iterdir()}


def test_all_links_and_anchors_lead_somewhere(site: str):
    dead = []
    for page in map(page_of, pages()):
        for link in page.links:
            if urlsplit(link).scheme:
                assert link.startswith(("https://", "http://", "mailto:")), link
                continue
            where, anchor = target(page, link), unquote(urlsplit(link).fragment)
            if not where.is_file() or (anchor and where.suffix == ".html" and anchor not in page_of(where).ids):
                dead.append((page.path.name, link))
    assert dead == []


def test_everything_that_is_loaded_is_in_the_site(site: str):
    for page in map(page_of, pages()):
        assert [one for one in page.loads if not target(page, one).is_file()] == []


def test_every_page_says_first_what_it_may_load(site: str):
    with_lab = set()
    for path in pages():
        text = path.read_text(encoding="utf8")
        has_lab = any(f'data-kind="{kind}"' in text for kind in ("PipelineLab", "LayoutLab")) or "tag_runs" in text
        head, policy, rest = text.partition(meta(has_lab))
        assert policy and "http-equiv" not in rest, path.name
        assert not re.search("<(script|style|link|img)", head), path.name
        with_lab |= {path.stem} if has_lab else set()
    assert {"10_pipeline_schedules", "28_which_layout"} <= with_lab and "00_first_look" not in with_lab


def test_no_page_is_large(site: str):
    for page in map(page_of, pages()):
        files = {page.path, *(target(page, one) for one in page.loads)}
        assert sum(file.stat().st_size for file in files) < MEGABYTES * 1e6, page.path.name


# ---------------------------------------------------------------------------------------------------- in the browser


@pytest.fixture
def said(page: Page, site: str) -> Iterator[list[str]]:
    """What the console said and who else was asked: nothing and nobody."""
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on(
        "request",
        lambda request: None if request.url.startswith((site, "blob:", "data:")) else said.append(request.url),
    )
    yield said
    assert said == []


def faults(page: Page, thorough: bool) -> list[str]:
    """Serious faults of accessibility on the page as it is now; colours, and what all pages share, if thorough."""
    rules = {} if thorough else {"color-contrast": {"enabled": False}}
    context = {"exclude": [[".sidebar-drawer"], [".toc-drawer"], [".highlight span"]]}
    options = {"resultTypes": ["violations"], "rules": rules}
    found = Axe().run(page, None if thorough else context, options).response["violations"]
    return [
        f"{page.url}: {fault['help']}: {node['html'][:160]}"
        for fault in found
        if fault["impact"] in ("serious", "critical")
        for node in fault["nodes"][:3]
    ]


def switch(page: Page, theme: str) -> None:
    """Switch the theme as a reader does: the button goes from one to the next."""
    for _ in range(3):
        if page.evaluate("document.body.dataset.theme") == theme:
            return
        page.locator(".theme-toggle:visible").first.click()
    raise AssertionError(f"the button never comes to {theme}")


REFUSED = """async (address) => {
  const refused = new Promise((tell) => addEventListener("securitypolicyviolation", (event) => tell(event.blockedURI)));
  await fetch(address).catch(() => {});
  return Promise.race([refused, new Promise((tell) => setTimeout(() => tell("nothing"), 1000))]);
}"""


def test_a_page_can_ask_no_other_host(page: Page, site: str):
    page.context.route("https://**", lambda route: route.fulfill(headers={"Access-Control-Allow-Origin": "*"}))
    for path in (LAB, "labs/10_pipeline_schedules.html"):
        page.goto(f"{site}/{path}")
        assert page.evaluate(REFUSED, "https://elsewhere.example/").startswith("https://elsewhere.example")


def plays(card: Locator) -> bool:
    """Whether the widget does what it is for; False if this kind of widget only stands there."""
    expect(card.locator(".tplab")).to_be_visible()
    play, slider = card.get_by_label("play (space)"), card.locator(".tpl-slider").last
    if card.get_attribute("data-plays") is not None:
        card.scroll_into_view_if_needed()  # it plays as soon as it is seen: a click at that moment would pause it
        expect(slider).not_to_have_value("0")
        return True
    if play.count():
        before = slider.input_value()
        play.click()
        expect(slider).not_to_have_value(before)
        return True
    return False


def test_every_page_is_quiet_fits_on_a_phone_and_has_no_serious_fault(page: Page, site: str, said: list[str]):
    played, found = 0, []
    for path in pages():
        page.set_viewport_size({"width": 390, "height": 844})
        page.goto(f"{site}/{path.relative_to(SITE)}")
        card = page.locator("figure.card").first
        if card.count():
            played += plays(card)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, path.name
        found += faults(page, thorough=False)
    assert found == []
    assert played >= 10


@pytest.mark.parametrize(
    "path", ["index.html", LAB, "labs/10_pipeline_schedules.html", "docs/twins.html", "search.html"]
)
def test_no_page_has_a_serious_fault_in_light_or_dark(page: Page, site: str, said: list[str], path: str):
    page.goto(f"{site}/{path}")
    for theme in ("light", "dark"):
        switch(page, theme)
        card = page.locator("figure.card .tplab").first
        if page.locator("figure.card").count():
            expect(card).to_have_attribute("data-theme", theme)
        assert faults(page, thorough=True) == []


def test_the_first_widget_plays_by_itself_and_by_keyboard(page: Page, site: str, said: list[str]):
    page.goto(f"{site}/{LAB}")
    card = page.locator("figure.card").first
    root = card.locator(".tplab")
    expect(card.locator("img")).to_have_count(0)
    root.focus()
    page.keyboard.press("ArrowRight")
    expect(card.locator(".tpl-say")).to_contain_text("step 1 of 7")
    page.keyboard.press("End")
    expect(card.locator(".tpl-say")).to_contain_text("step 7 of 7")


def test_widgets_are_drawn_when_they_come_near(page: Page, site: str, said: list[str]):
    page.goto(f"{site}/{LAB}")
    expect(page.locator("figure.card .tplab").first).to_be_visible()
    cards = page.locator("figure.card")
    assert page.locator("figure.card.alive").count() < cards.count()
    cards.last.scroll_into_view_if_needed()
    expect(cards.last.locator(".tplab")).to_be_visible()
    assert cards.last.locator("img").count() == 0


def test_it_follows_the_readers_system(page: Page, site: str, said: list[str]):
    page.emulate_media(color_scheme="dark")
    page.goto(f"{site}/{LAB}")
    root = page.locator("figure.card .tplab").first
    expect(root).to_have_attribute("data-theme", "dark")
    page.emulate_media(color_scheme="light")
    expect(root).to_have_attribute("data-theme", "light")


@pytest.mark.parametrize("words, found", [("microbatches", "10 Pipeline schedules"), ("allreduce", "02 Collectives")])
def test_a_search_finds_a_lab(page: Page, site: str, said: list[str], words: str, found: str):
    page.goto(f"{site}/{LAB}")
    page.get_by_placeholder("Search").fill(words)
    page.keyboard.press("Enter")
    expect(page.locator("#search-results li a").first).to_be_visible()
    expect(page.get_by_role("link", name=found).last).to_be_visible()
    expect(page.locator("#search-results li p.context").first).to_be_visible()
    page.wait_for_load_state("networkidle")  # the pages found are read for the words around; `said` hears of faults


def test_the_page_of_the_search_has_a_field_and_the_front_page_a_name(page: Page, site: str, said: list[str]):
    page.goto(f"{site}/search.html")
    field = page.get_by_role("main").get_by_placeholder("Search the site")
    expect(field).to_be_focused()
    field.fill("DeadlockError")
    page.keyboard.press("Enter")
    front = page.locator("#search-results li", has=page.get_by_role("link", name="Front page", exact=True))
    expect(front.locator("p.context")).to_be_visible()
    expect(page.locator("#search-results")).not_to_contain_text("<no title>")
    page.wait_for_load_state("networkidle")


def test_a_choice_that_the_front_page_does_not_have_leaves_its_link(page: Page, site: str, said: list[str]):
    page.goto(f"{site}/index.html?ranks=16&shift=1")
    page.wait_for_url(re.compile(r"\?ranks=4&shift=1&without="))


def test_the_front_page_plays_by_itself_until_it_is_touched(page: Page, site: str, said: list[str]):
    page.goto(f"{site}/index.html")
    card = page.locator(".try figure.card.alive")
    pause, play = (card.get_by_role("button", name=name) for name in ("pause (space)", "play (space)"))
    expect(pause).to_be_visible()
    pause.click()
    page.wait_for_timeout(4000)  # longer than the rest between two rounds
    expect(play).to_be_visible()


def test_reduced_motion_plays_nothing_by_itself(page: Page, site: str, said: list[str]):
    page.emulate_media(reduced_motion="reduce")
    page.goto(f"{site}/index.html")
    expect(page.locator(".try figure.card.alive").get_by_role("button", name="play (space)")).to_be_visible()


def test_the_first_picture_moves_on_a_small_laptop(page: Page, site: str, said: list[str]):
    page.set_viewport_size({"width": 1280, "height": 600})
    page.goto(f"{site}/index.html")
    expect(page.locator(".try figure.card.alive").get_by_role("button", name="pause (space)")).to_be_visible()


def test_the_program_of_the_front_page_can_be_changed_and_the_link_keeps_it(page: Page, site: str, said: list[str]):
    page.goto(f"{site}/index.html")
    card = page.locator(".try figure.card.alive")
    expect(card.locator(".tpl-about").first).to_contain_text("4 ranks")
    for choice in ("8", "previous rank", "line 5"):
        page.locator(".choices").get_by_text(choice, exact=True).click()
    for _ in range(2):
        expect(card.locator(".tpl-about").first).to_contain_text("8 ranks")
        expect(card.locator(".playing")).to_have_count(1)
        expect(page.locator(".program del")).to_contain_text("total = total + x")
        expect(page.locator(".says")).to_have_text("The ranks return 40, 13, 41, 22, 35, 17, 53 and 29.")
        page.goto(page.url)  # a link that somebody was sent


def test_dark_readers_get_a_dark_picture_before_it_plays(browser: Browser, site: str):
    context = browser.new_context(java_script_enabled=False, color_scheme="dark")
    page = context.new_page()
    page.goto(f"{site}/{LAB}")
    expect(page.locator("figure.card img.only-dark").first).to_be_visible()
    expect(page.locator("figure.card img.only-light").first).to_be_hidden()
    context.close()


def test_the_map_joins_a_lab_to_what_it_builds_on(page: Page, site: str, said: list[str]):
    page.goto(f"{site}/index.html")
    page.locator("#lab-17").hover()
    expect(page.locator(".tile.needed")).to_have_count(2)
    assert page.locator(".tile.needed").evaluate_all("tiles => tiles.map((tile) => tile.id)") == ["lab-02", "lab-16"]
    expect(page.locator("svg.needs path")).to_have_count(2)
    page.locator("h1").hover()
    expect(page.locator(".tile.needed")).to_have_count(0)


def test_what_scrolls_in_either_direction_is_reached_by_keyboard(page: Page, site: str, said: list[str]):
    page.goto(f"{site}/labs/05_block_memory.html")
    code, formula = page.locator(".highlight pre").first, page.locator("div.math").first
    expect(code).not_to_have_attribute("tabindex", "0")
    code.evaluate("box => { box.style.maxHeight = '20px'; box.style.overflow = 'auto'; }")
    page.evaluate("dispatchEvent(new Event('resize'))")
    expect(code).to_have_attribute("tabindex", "0")
    assert formula.evaluate("box => getComputedStyle(box).overflowY") == "hidden", "a font may be a pixel higher"


def test_answers_are_folded(page: Page, site: str, said: list[str]):
    page.goto(f"{site}/{LAB}")
    answer = page.get_by_text("960 bytes: sixteen ranks make fifteen steps")
    expect(answer).to_be_hidden()
    page.get_by_text("Answer", exact=True).first.click()
    expect(answer).to_be_visible()


@pytest.mark.parametrize("how", ["clicked", "opened", "slowly"])
def test_headings_have_permanent_links(page: Page, site: str, said: list[str], how: str):
    if how == "slowly":
        page.route("**/widgets/*.js", lambda route: (time.sleep(6), route.continue_()), times=1)
    page.goto(f"{site}/{LAB}" + "#one-rank-s-program" * (how != "clicked"))
    heading = page.get_by_role("heading", name=re.compile("One rank.s program"))
    while how == "clicked" and not urlsplit(page.url).fragment:  # a widget that is drawn meanwhile may move it away
        heading.locator("a.headerlink").click(force=True)
    expect(page.locator("figure.card.alive")).to_have_count(2)  # one above it, one below, higher than their pictures
    in_place = "heading => Math.abs(heading.getBoundingClientRect().top - 40) < 30"
    page.wait_for_function(in_place, arg=heading.element_handle())
    page.wait_for_timeout(500)
    assert heading.evaluate(in_place)
    assert urlsplit(page.url).fragment == "one-rank-s-program"


def test_on_paper_there_is_only_the_lab(page: Page, site: str, said: list[str]):
    page.goto(f"{site}/{LAB}")
    expect(page.locator("figure.card .tplab").first).to_be_visible()
    switch(page, "dark")
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    expect(page.locator("figure.card .tplab").first).to_have_attribute("data-theme", "light")
    for furniture in (".launch", ".sidebar-drawer", ".toc-drawer", ".related-pages"):
        expect(page.locator(furniture).first).to_be_hidden()
    answer = page.get_by_text("960 bytes: sixteen ranks make fifteen steps")
    expect(answer).to_be_visible()
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    expect(answer).to_be_hidden()


RUN = """async (code) => {
  const kernel = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel;
  const future = kernel.requestExecute({ code, store_history: false });
  let text = "";
  future.onIOPub = ({ header, content }) => {
    if (header.msg_type === "stream") text += content.text;
    if (header.msg_type === "error") text += `${content.ename}: ${content.evalue}`;
  };
  await future.done;
  return text.trim();
}"""


def test_a_lab_runs_in_jupyterlite_with_nothing_from_elsewhere_but_what_is_compiled(page: Page, site: str):
    """The app, Python, its kernel and tplab come from the site. NumPy and Pillow for Pyodide cannot be had here."""
    asked: set[str] = set()
    page.context.on("request", lambda request: asked.add(request.url))
    page.context.route("https://**", lambda route: route.abort())
    page.set_default_timeout(400_000)  # the kernel starts within 20 s, or minutes on a machine that is busy
    page.goto(f"{site}/labs/10_pipeline_schedules.html")
    page.get_by_role("link", name="Your browser").click()
    expect(page.locator(".jp-Notebook h1").first).to_contain_text("10 Pipeline schedules", timeout=60_000)
    status = "window.jupyterapp?.shell?.currentWidget?.sessionContext?.session?.kernel?.status"
    page.wait_for_function(f"() => {status} === 'idle'")
    assert page.evaluate(RUN, build.setup_cell()) == ""
    assert page.evaluate(RUN, "import ipywidgets, anywidget, tplab; print(tplab.Mesh(tp=4))") == "Mesh(tp=4)"
    for code in ("import numpy", "from tplab.widgets import gantt"):  # as the notebook says above its first cell
        assert page.evaluate(RUN, code).endswith("No module named 'numpy'")
    elsewhere = {url.rpartition("/") for url in asked if not url.startswith((site, "blob:", "data:"))}
    assert {folder + mark for folder, mark, _ in elsewhere} == {pyodide.numpy_from()}
    assert {name.partition("-")[0] for _, _, name in elsewhere} == set(lite.COMPILED)


def test_without_scripts_there_are_stills(browser: Browser, site: str):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(f"{site}/{LAB}")
    still = page.locator("figure.card img").first
    expect(still).to_be_visible()
    assert still.get_attribute("alt")
    assert still.evaluate("image => image.naturalWidth") > 400
    context.close()
