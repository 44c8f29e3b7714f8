"""The tables "On Monday" of all labs on one page, read from the notebooks: names in other libraries."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import nbformat

ROOT = Path(__file__).parent.parent
PATH = "labs/on_monday.md"
"""Beside the labs, so that relative links in the tables stay valid."""

_HEAD = """\
# On Monday

Each lab ends with a table of what its parts are called in the libraries that you may use on Monday. This page has all
of these tables.
"""


def page(labs: Iterable[str]) -> str:
    """The page of these labs, as Markdown, without labs that have no such table."""
    parts = [_HEAD]
    for lab in labs:
        title, text = _read(lab)
        if text:
            parts.append(f"## [{title}]({lab}.ipynb)\n\n{text}\n")
    return "\n".join(parts)


def _read(lab: str) -> tuple[str, str]:
    """A lab's title, and the text under its heading "On Monday"."""
    book = nbformat.read(ROOT / "labs" / f"{lab}.ipynb", as_version=4)
    texts = [cell.source for cell in book.cells if cell.cell_type == "markdown"]
    (title,) = re.findall(r"^# (.+)$", texts[0], re.MULTILINE)
    found = [re.search(r"^## On Monday\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL) for text in texts]
    return title, next((match[1].strip() for match in found if match), "")
