"""Sphinx's configuration for the site. `python -m website` writes the pages."""

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from website import front, pyodide  # noqa: E402  Sphinx runs this file from anywhere
from website.policy import meta  # noqa: E402

_project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf8"))["project"]

project = "tplab"
author = "the authors of tplab"
copyright = f"{author}. {_project['license']}"
version = release = _project["version"]

extensions = ["myst_nb", "sphinx_copybutton", "website.mathml"]
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb"}
nb_execution_mode = "off"
nb_merge_streams = True
nb_code_prompt_show = nb_code_prompt_hide = "Set-up"  # the only folded cell
smartquotes = False  # pages keep the characters of the labs
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
html_math_renderer = "mathml"

html_theme = "furo"
html_title = "tplab"
html_baseurl = _project["urls"]["Documentation"]
templates_path = ["templates"]
html_static_path = ["static", *(f"../tplab/widgets/static/{name}" for name in ("tplab.css", "model.js"))]
html_favicon = "static/ring.svg"
html_css_files = ["tplab.css", "site.css", "reference.css", "front.css"]
html_js_files = [
    ("play.js", {"type": "module", "async": "async"}),  # pictures do not wait for other scripts
    *((name, {"type": "module"}) for name in ("reach.js", "front.js")),
    ("search.js", {"defer": "defer"}),  # after Sphinx's own scripts, and before they search
]
html_show_sourcelink = False
html_copy_source = False
html_permalinks_icon = "#"
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"
html_theme_options = {
    "top_of_page_buttons": [],
    "source_repository": _project["urls"]["Repository"],
    "footer_icons": [],
    "light_css_variables": {
        "font-stack": 'Inter, system-ui, "Segoe UI", Roboto, sans-serif',
        "color-brand-primary": "#1f5fd0",
        "color-brand-content": "#1f5fd0",
        "color-brand-visited": "#1f5fd0",
    },
    "dark_css_variables": {
        "color-background-primary": "#0d1015",
        "color-background-secondary": "#12161d",
        "color-background-border": "#363d4b",
        "color-code-background": "#171b22",
        "color-brand-primary": "#7db0ff",
        "color-brand-content": "#7db0ff",
        "color-brand-visited": "#7db0ff",
    },
}
copybutton_exclude = ".linenos, .gp, .go"


def _level_of_captions(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Give the captions in the sidebar a heading level for screen readers, which Sphinx leaves out."""
    tree = context.get("furo_navigation_tree", "")
    context["furo_navigation_tree"] = tree.replace('role="heading"', 'role="heading" aria-level="2"')


def _what_it_may_load(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Put the page's Content-Security-Policy at the top of its head, before anything is loaded."""
    marks = ("tag_runs", *(f'data-kind="{kind}"' for kind in pyodide.KINDS))
    has_lab = any(mark in context.get("body", "") for mark in marks)
    context["metatags"] = meta(has_lab, pyodide.has_numpy(Path(app.outdir))) + context.get("metatags", "")


_MODULE = re.compile(r'data-module="([^"]+)"')
_SOURCE = re.compile(r'src="([^"]+)"')


def _deferred(script: Any) -> Any:
    """The same script, run after the page has been parsed. Modules always are."""
    if "type" in script.attributes:
        return script
    return type(script)(script.filename, priority=script.priority, **{**script.attributes, "defer": "defer"})


def _pictures_first(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Preload what the first picture of a page needs, and defer the scripts of the theme."""
    if page != "search":  # there, scripts of Sphinx run in the order of the page
        context["script_files"] = [_deferred(script) for script in context["script_files"]]
    if first := _MODULE.search(context.get("body", "")):
        (play,) = (script for script in context["script_files"] if "play.js" in str(script.filename))
        source = _SOURCE.search(context["js_tag"](play))
        assert source
        beside = [context["pathto"](f"_static/{name}", 1) for name in ("model.js", "lab.js", "link.js")]
        links = (f'<link rel="modulepreload" href="{url}">' for url in (first[1], source[1], *beside))
        context["metatags"] = context.get("metatags", "") + "".join(links)


def _front(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> str | None:
    """The template of the front page, which has its own."""
    return front.TEMPLATE if page == "index" else None


def setup(app: Sphinx) -> None:
    app.connect("html-page-context", _pictures_first, priority=850)  # below the policy, which applies to them
    app.connect("html-page-context", _front, priority=950)
    app.connect("html-page-context", _what_it_may_load, priority=900)  # after others have added to metatags
    app.connect("html-page-context", _level_of_captions, priority=900)  # after furo has made the tree
