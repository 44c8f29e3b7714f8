"""A page with widgets as on the site: their figures, the site's scripts and policy, served by a plain server."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tplab.widgets.page import _traits
from tplab.widgets.paper.card import Card
from website import policy, pyodide
from website.cards import Cards
from website.states import Output, State


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def served(folder: Path, cells: Sequence[str], body: str = "") -> Iterator[str]:
    """The address of a page with the `card` that each of these cells makes, below `body`."""
    cards, figures, style = Cards(folder), body, ""
    for cell in cells:
        card = made(cell)
        traits = _traits(card)
        state = State(type(card).__name__, str(getattr(card, "_esm")), traits["values"], traits["bytes"])  # noqa: B009
        data = {"image/png": base64.b64encode(card.picture()).decode(), "text/plain": card.sentence}
        figures += cards.figure(Output(data, {}, state), cell, "lab.html")
        style = str(getattr(card, "_css"))  # noqa: B009  only anywidget knows of them
    static = folder / "_static"
    static.mkdir()
    for source in (pyodide.HERE / "static", pyodide.ROOT / "tplab" / "widgets" / "static"):
        for file in source.glob("*.js"):
            (static / file.name).write_bytes(file.read_bytes())
    head = f'<!doctype html><html lang="en">{policy.meta(has_lab=True)}<title>lab</title>'
    head += f'<link rel="icon" href="data:,"><style>{style}</style>'
    play = '<script type="module" src="_static/play.js"></script>'
    (folder / "lab.html").write_text(head + figures + play, encoding="utf8")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/lab.html"
    server.shutdown()
    server.server_close()


def made(cell: str) -> Card:
    """The `card` that a cell makes."""
    names: dict[str, Card] = {}
    exec(compile(cell, "cell", "exec"), names)
    return names["card"]
