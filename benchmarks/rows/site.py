"""The time from a link to lab 00's page on the site until its first widget plays, and the size of the page."""

from __future__ import annotations

import shutil
import statistics
import threading
import time
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory

from playwright.sync_api import Browser, sync_playwright

from benchmarks.table import Row
from website.__main__ import make

LAB = "00_first_look"
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


def until_it_plays(browser: Browser, url: str) -> tuple[float, int]:
    """(Seconds until the first widget of the page has taken a step by itself, the bytes that were loaded)."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    sizes: list[int] = []
    page.on("response", lambda response: sizes.append(int(response.headers.get("content-length", 0))))
    start = time.perf_counter()
    page.goto(url, wait_until="commit")
    page.locator("figure.card").first.get_by_label("play (space)").click()
    page.wait_for_function("() => document.querySelector('figure.card .tpl-slider').value > 0")
    took = time.perf_counter() - start
    context.close()
    return took, sum(sizes)


def measure() -> list[Row]:
    with TemporaryDirectory() as folder, sync_playwright() as playwright:
        if make([LAB], Path(folder)):
            raise RuntimeError("the site cannot be made")
        server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=folder))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        found = next(path for name in CHROMIUM if (path := shutil.which(name)))
        browser = playwright.chromium.launch(
            executable_path=found, args=["--no-sandbox"]
        )  # needed where it runs as root
        url = f"http://127.0.0.1:{server.server_address[1]}/labs/{LAB}.html"
        runs = [until_it_plays(browser, url) for _ in range(5)]
        browser.close()
        server.shutdown()
    took, loaded = statistics.median(seconds for seconds, _ in runs), runs[0][1] / 1e6
    what = "the site: from a link to a widget that plays, lab 00"
    return [Row(what, "<= 1.5 s, 3 MB", f"{took:.1f} s, {loaded:.1f} MB", took <= 1.5 and loaded <= 3)]
