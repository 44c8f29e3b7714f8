"""The Content-Security-Policy of a page: what a browser may load for it, and from where. All else is refused.

GitHub Pages does not let us set headers, so the policy is a `meta` element at the top of each page. It would not apply
to a worker that is loaded from an address. lab.js therefore starts its worker from a blob, to which it does apply.
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
"""The rules of every page. Scripts, pictures and data come from the site itself."""

FOR_PYTHON = {
    "script-src": "'wasm-unsafe-eval'",  # Pyodide is WebAssembly
    "worker-src": "'self' blob:",  # the blob and its imports
    "connect-src": "'self'",
}
"""Further permissions of a page that has a `pipeline_lab`, a `layout_lab` or cells that run there."""


def policy(has_lab: bool, has_numpy: bool = False) -> str:
    """The policy of a page, with or without a lab on it, for a site with or without NumPy."""
    rules = {**RULES, "script-src": f"{RULES['script-src']} {_hash_of_inline_script()}"}
    for name, more in FOR_PYTHON.items() if has_lab else ():
        rules[name] = f"{rules.get(name, '')} {more}".strip()
    if has_lab and not has_numpy:
        rules["connect-src"] += f" {pyodide.numpy_from()}"
    return "; ".join(f"{name} {allowed}" for name, allowed in rules.items())


def meta(has_lab: bool, has_numpy: bool = False) -> str:
    """The policy as an element of the page's head."""
    return f'<meta http-equiv="Content-Security-Policy" content="{policy(has_lab, has_numpy)}">'


def _hash_of_inline_script() -> str:
    """The hash of the theme's only inline script, which sets the colours before the page is drawn."""
    template = Path(furo.__file__).parent / "theme" / "furo" / "base.html"
    (script,) = re.findall(r"<script>(.*?)</script>", template.read_text(encoding="utf8"), re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
