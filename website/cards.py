"""A widget on a page: a figure with a still picture, and the data from which play.js draws the widget."""

from __future__ import annotations

import base64
import hashlib
import html
import io
import os
from collections import Counter
from pathlib import Path
from typing import Any

from PIL import Image

from tplab.widgets.page import json_in_page
from tplab.widgets.paper.apng import darkened
from tplab.widgets.paper.card import Card
from website.states import Output

FOLDER = "widgets"  # of the site: modules and stills
THUMBNAIL_WIDTH = 640


def data_of(output: Output, python: str) -> dict[str, Any]:
    """The data of a widget for play.js: its traits, which of them a link keeps, and the cell that makes it."""
    state = output.state
    assert state
    return {"values": state.values, "bytes": state.packed, "kept": KEPT[state.kind], "python": python}


def kinds(kind: type[Card]) -> list[type[Card]]:
    """This kind of widget and all its subclasses."""
    return [kind, *(one for below in kind.__subclasses__() for one in kinds(below))]


KEPT = {
    kind.__name__: {trait: getattr(getattr(kind, trait), "values", None) for trait in kind.kept} for kind in kinds(Card)
}
"""kind of widget -> the traits that a link keeps, each with its possible values if these are few."""


class Cards:
    """Writes the files of all pages' figures into a folder of the site. Figures share equal files."""

    def __init__(self, site: Path):
        self.folder = site / FOLDER
        self._names = Counter[tuple[str, str]]()  # (page, name) -> figures with this name, by which links find them

    def figure(self, output: Output, python: str, page: str, plays: bool = False) -> str:
        """The HTML of a widget on the page with this path in the site. If `plays`, it starts by itself.

        python   a cell that makes the widget, and calls it `card`; "" if there is none
        Without scripts, or until the widget is in view, its still picture is shown, for light or for dark paper.
        The HTML has no blank line, since that would end it in Markdown.
        """
        assert output.state
        png = base64.b64decode(output.data["image/png"])
        width, height = Image.open(io.BytesIO(png)).size
        alt = html.escape(" ".join(output.data["text/plain"].split()))
        up = os.path.relpath(self.folder.parent, (self.folder.parent / page).parent)
        still = "\n".join(
            f'<img class="only-{paper}" src="{up}/{self._shared(data, "still", ".png")}" alt="{alt}" width="{width}" '
            f'height="{height}" loading="lazy">'
            for paper, data in (("light", png), ("dark", darkened(png)))
        )
        name = "w" + hashlib.sha256((python or alt).encode()).hexdigest()[:5]
        self._names[page, name] += 1
        name += f"-{self._names[page, name]}" * (self._names[page, name] > 1)
        module = self._shared(output.state.module.encode(), "widget", ".js")
        return (
            f'<figure class="card" data-module="{up}/{module}" data-kind="{output.state.kind}" id="{name}"'
            f"{' data-plays' * plays}>\n"
            f"{still}\n"
            f'<script type="application/json">{json_in_page(data_of(output, python))}</script>\n'
            "</figure>"
        )

    def thumbnails(self, picture: Path) -> tuple[str, str]:
        """The first frame of a picture, small, for light and for dark paper; their paths in the site."""
        with Image.open(picture) as moving:
            frame = moving.convert("RGB")
        frame.info.clear()  # the animation's
        frame.thumbnail((THUMBNAIL_WIDTH, THUMBNAIL_WIDTH))
        stream = io.BytesIO()
        frame.quantize(256).save(stream, "png", optimize=True)
        small = stream.getvalue()
        return self._shared(small, "thumbnail", ".png"), self._shared(darkened(small), "thumbnail", ".png")

    def _shared(self, data: bytes, name: str, suffix: str) -> str:
        """Write data under a name with its hash, and return its path in the site."""
        path = self.folder / f"{name}-{hashlib.sha256(data).hexdigest()[:10]}{suffix}"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        return f"{FOLDER}/{path.name}"
