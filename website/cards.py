"""A widget on a page: a figure with a still picture and the data from which play.js draws the widget in its place."""

from __future__ import annotations

import base64
import hashlib
import html
import io
import os
from pathlib import Path

from PIL import Image

from tplab.widgets.page import json_in_page
from tplab.widgets.paper.dark import darkened
from website.states import Output

FOLDER = "widgets"  # of the site: modules and stills
THUMBNAIL_WIDTH = 640


class Cards:
    """Writes what the figures of all pages need into a folder of the site; one file for what several of them share."""

    def __init__(self, site: Path):
        self.folder = site / FOLDER

    def figure(self, output: Output, page: str, plays: bool = False) -> str:
        """The HTML of a widget on the page with this path in the site. If it `plays`, it begins by itself.

        Where scripts are off, or the widget is still out of sight, its picture is shown, for light or for dark paper.
        The HTML has no blank line, at which Markdown would end it.
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
        data = json_in_page({"values": output.state.values, "bytes": output.state.packed})
        module = self._shared(output.state.module.encode(), "widget", ".js")
        return (
            f'<figure class="card" data-module="{up}/{module}" data-kind="{output.state.kind}"'
            f"{' data-plays' * plays}>\n"
            f"{still}\n"
            f'<script type="application/json">{data}</script>\n'
            "</figure>"
        )

    def thumbnails(self, picture: Path) -> tuple[str, str]:
        """The first frame of a picture, small, for light and for dark paper; their paths in the site."""
        with Image.open(picture) as moving:
            frame = moving.convert("RGB")
        frame.info.clear()  # of the moving picture
        frame.thumbnail((THUMBNAIL_WIDTH, THUMBNAIL_WIDTH))
        stream = io.BytesIO()
        frame.quantize(256).save(stream, "png", optimize=True)
        small = stream.getvalue()
        return self._shared(small, "thumbnail", ".png"), self._shared(darkened(small), "thumbnail", ".png")

    def _shared(self, data: bytes, name: str, suffix: str) -> str:
        """Write it under a name that says what is in it, and return its path in the site."""
        path = self.folder / f"{name}-{hashlib.sha256(data).hexdigest()[:10]}{suffix}"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        return f"{FOLDER}/{path.name}"
