"""The Content-Security-Policy of a page: what a browser may load for it, and from where. All else is refused.

GitHub Pages sends no headers of our choice, so the policy is a `meta` element at the top of each page. A worker that
comes from an address would not be bound by it. lab.js therefore starts its worker from a blob, which is.
"""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

import furo

from website import pyodide

RULES = {
    "default-src": "'self'",
    "script-src": "'self'",
    "style-src": "'self' 'unsafe-inline'",
    "img-src": "'self' data:",
    "object-src": "'none'",
    "base-uri": "'none'",
    "form-action": "'self'",
}
"""Of every page. Its scripts, pictures and data come from the site itself."""

FOR_PYTHON = {
    "script-src": "'wasm-unsafe-eval'",  # Pyodide is WebAssembly
    "worker-src": "'self' blob:",  # the blob, and what it imports
    "connect-src": "'self'",
}
"""What a page may do besides that has a `pipeline_lab`, a `layout_lab` or cells that run there."""


def policy(has_lab: bool, has_numpy: bool = False) -> str:
    """The policy of a page of the theme, with or without a pipeline lab on it, where the site has NumPy or has not."""
    rules = {**RULES, "script-src": f"{RULES['script-src']} {_hash_of_inline_script()}"}
    for name, more in FOR_PYTHON.items() if has_lab else ():
        rules[name] = f"{rules.get(name, '')} {more}".strip()
    if has_lab and not has_numpy:
        rules["connect-src"] += f" {pyodide.numpy_from()}"
    return "; ".join(f"{name} {allowed}" for name, allowed in rules.items())


def meta(has_lab: bool, has_numpy: bool = False) -> str:
    """The element of the page's head that says so."""
    return f'<meta http-equiv="Content-Security-Policy" content="{policy(has_lab, has_numpy)}">'


def _hash_of_inline_script() -> str:
    """Of the one script that the theme writes into its pages; it sets the colours before the page is drawn."""
    template = Path(furo.__file__).parent / "theme" / "furo" / "base.html"
    (script,) = re.findall(r"<script>(.*?)</script>", template.read_text(encoding="utf8"), re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
