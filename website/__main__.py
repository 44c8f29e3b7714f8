"""Make the site: python -m website [lab ...]

With names of labs, the site has only these.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from nbclient.exceptions import CellExecutionError
from sphinx.cmd.build import build_main

from labs.source import build
from website import lite, pyodide
from website.cards import Cards
from website.opening import Opening
from website.pages import Pages, StaleLabError, address
from website.states import OPENING, states

ROOT = Path(__file__).parent.parent
OUT = ROOT / "build" / "site"
PAGES = ROOT / "build" / "site-pages"
DOCTREES = ROOT / "build" / "site-doctrees"


def make(labs: list[str], out: Path = OUT, numpy_from_cdn: bool = False) -> int:
    """Make the site of these labs in folder `out`. Return 0 if Sphinx reported nothing."""
    shown = states([*labs, OPENING])
    opening = Opening(shown.pop(OPENING))
    Pages(PAGES, Cards(out), shown, opening).write()
    for old in (out / "labs").glob("[0-9]*.html"):
        if old.stem not in labs:
            old.unlink()
    pyodide.write(out, numpy_from_cdn)
    if any(any(lite.on_the_page(lite.sources_of(name))) for name in labs):
        lite.write(out, lite.labs(labs), address())
    return built(PAGES, out, DOCTREES, Path(__file__).parent)


def built(pages: Path, out: Path, doctrees: Path, conf: Path) -> int:
    """Let Sphinx make `out` from `pages`. Return 0 if it reported nothing.

    The `doctrees` of an interrupted build do not match `out`, so Sphinx then starts from scratch.
    """
    unfinished = doctrees.with_name(doctrees.name + "-unfinished")
    if unfinished.exists() or not (out / "searchindex.js").exists():
        shutil.rmtree(doctrees, ignore_errors=True)
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    unfinished.touch()
    options = ["--fail-on-warning", "--keep-going", "--quiet"]
    failed = build_main([*options, "-c", str(conf), "-d", str(doctrees), str(pages), str(out)])
    if not failed:
        unfinished.unlink()
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m website", description=__doc__)
    parser.add_argument("labs", nargs="*", help="labs that the site has; all, if none is named")
    parser.add_argument("--numpy-from-cdn", action="store_true", help="do not put NumPy for browsers into the site")
    given = parser.parse_args()
    chosen = given.labs
    if unknown := sorted(set(chosen) - set(build.names())):
        parser.error(f"no lab {', '.join(unknown)}; there are {', '.join(build.names())}")
    try:
        failed = make(sorted(chosen) or build.names(), numpy_from_cdn=given.numpy_from_cdn)
    except (CellExecutionError, StaleLabError) as error:
        print(error, file=sys.stderr)
        return 1
    if not failed:
        print("the site is in build/site; to see it: python -m http.server --directory build/site")
    return failed


if __name__ == "__main__":
    sys.exit(main())
