"""The pages that Sphinx reads, as files in folders like the repository's: notebooks, docs/, README, the front page."""

from __future__ import annotations

import html
import posixpath
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

import nbformat

from labs.source import build, course
from website import front, lite, monday, reference
from website.cards import Cards
from website.making import making
from website.opening import Opening
from website.states import Output

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
PICTURE = re.compile(
    r'<a [^>]*>\s*<picture>\s*<source [^>]*srcset="([^"]*)">\s*<img alt="([^"]*)" src="([^"]*)">\s*</picture>\s*</a>'
)
"""A picture that links to the site, with another one for dark paper, both with absolute addresses."""
DOCS = (
    "using", "torch_distributed", "types", "choosing", "formulas", "twins", "clock", "forecast", "design", "figures"
)  # fmt: skip
ABOUT = ("CONTRIBUTING", "CHANGELOG")


RUNS = "runs"
"""The tag of cells that run on their page."""


class StaleLabError(Exception):
    """A committed notebook has other outputs than its cells have now."""


class Pages:
    """Writes the pages of these labs, and all other pages.

    shown     the outputs of each lab's cells, by lab and cell
    opening   the outputs on the front page and at the top of the README
    """

    def __init__(self, folder: Path, cards: Cards, shown: Mapping[str, Mapping[str, list[Output]]], opening: Opening):
        self.folder, self.cards, self.shown, self.opening = folder, cards, shown, opening

    def write(self) -> None:
        """Write all pages. A page that has not changed is left alone, so that Sphinx does not read it again."""
        texts = {f"labs/{name}.ipynb": self.lab(name) for name in self.shown}
        texts |= {f"docs/{name}.md": self.text(f"docs/{name}.md") for name in DOCS}
        texts |= {f"{name}.md": self.text(f"{name}.md") for name in ABOUT}
        texts |= reference.pages()
        texts[monday.PATH] = self.linked(monday.page(self.shown), monday.PATH)
        texts |= {"index.md": self.front(), "readme.md": self.readme()}
        pictures = [f"docs/{name}.png" for name in ("train", "train-dark", "ring")]
        pictures += [f"labs/images/{name}.png" for name in build.names()]
        for old in self.folder.rglob("*.*"):
            if old.is_file() and old.relative_to(self.folder).as_posix() not in {*texts, *pictures}:
                old.unlink()
        for name, text in texts.items():
            _write(self.folder / name, text.encode())
        for name in pictures:
            _write(self.folder / name, (ROOT / name).read_bytes())

    # --- labs ----------------------------------------------------------------------------------------------------

    def lab(self, name: str) -> str:
        """The notebook, with its outputs as committed, its widgets as figures, and buttons instead of badges."""
        path = f"labs/{name}.ipynb"
        book = nbformat.read(ROOT / path, as_version=4)
        book.cells = [cell for cell in book.cells if cell.source != build.closing_line()]
        runs = iter(lite.on_the_page([cell.source for cell in book.cells if cell.cell_type == "code"]))
        sources: list[str] = []
        for cell in book.cells:
            if cell.cell_type == "code":
                sources.append(cell.source)
                self._show(cell, name, making(sources))
                cell.metadata.tags = [*cell.metadata.get("tags", []), *[RUNS] * next(runs)]
            else:
                cell.source = self.linked(cell.source.replace(build.badges(name), launch(name)), path)
            if cell.source == build.setup_cell():
                cell.metadata.tags.append("hide-input")
        return nbformat.writes(book)

    def _show(self, cell: nbformat.NotebookNode, name: str, python: str) -> None:
        committed = [output for output in cell.outputs if "data" in output]
        found = self.shown[name][cell.id]
        machine_dependent = "nbval-ignore-output" in cell.metadata.get("tags", [])
        here, there = ([one.data["text/plain"] for one in outputs] for outputs in (found, committed))
        if len(here) != len(there) or (here != there and not machine_dependent):
            raise StaleLabError(
                f"labs/{name}.ipynb says {there}, and now its cell {cell.id} says {here}: run `make labs`"
            )
        for output, one in zip(committed, found):
            if one.state:
                # A picture and its widget must agree, so both are of this run if the machine affects them.
                kept = one if machine_dependent else Output(dict(output.data), {}, one.state)
                output.data = {"text/html": self.cards.figure(kept, python, f"labs/{name}.html")}
                output.metadata = {}

    def opening_of(self, name: str) -> tuple[Output, str]:
        """The widget that the lab begins with, and the cell that makes it."""
        cells = nbformat.read(ROOT / f"labs/{name}.ipynb", as_version=4).cells
        ((place, cell),) = (
            (place, cell) for place, cell in enumerate(cells) if build.OPENING_PICTURE in cell.metadata.get("tags", [])
        )
        (shown,) = (one for one in self.shown[name][cell.id] if "image/png" in one.data)
        return shown, making([one.source for one in cells[: place + 1] if one.cell_type == "code"])

    # --- text ----------------------------------------------------------------------------------------------------

    def text(self, path: str) -> str:
        return self.linked((ROOT / path).read_text(encoding="utf8"), path)

    def front(self) -> str:
        """The front page, with the tables of contents from which Sphinx finds all other pages."""
        labs = course.labs(list(self.shown))
        figure = self.cards.figure(*self.opening.picture, page="index.html", plays=True)
        ddp = self.cards.figure(*self.opening.ddp, page="index.html")
        body = front.body(labs, self.opening, figure, ddp, self._thumbnail, build.repository())
        trees = [(part.title, [f"labs/{lab.name}" for lab in members]) for part, members in course.parts(labs)]
        trees.append(("Reference", [f"{reference.FOLDER}/index", "labs/on_monday", *(f"docs/{name}" for name in DOCS)]))
        trees.append(("Project", ["readme", *ABOUT]))
        titled = "```{title} Front page\n```\n"  # its name in a search
        return f"{titled}{body}\n" + "".join(_toctree(caption, pages) for caption, pages in trees)

    def readme(self) -> str:
        """The README, with widgets instead of pictures, and without the paragraphs that link to this site."""
        text = (ROOT / "README.md").read_text(encoding="utf8")
        text = PICTURE.sub(self._still, text)
        to_site = rf"\]\({re.escape(address())}[^)]*\)"
        text = re.sub(rf"^[^\n]*{to_site}(.+\n)+\n", "", text, flags=re.MULTILINE)
        return self.linked(text, "README.md")

    def _still(self, picture: re.Match[str]) -> str:
        """A picture of the README: a link that becomes its widget, or the picture itself for light and dark paper."""
        dark, alt, light = picture.groups()
        raw = build.repository().replace("https://github.com", "https://raw.githubusercontent.com") + "/main/"
        dark, light = dark.removeprefix(raw), light.removeprefix(raw)
        if self._card(light):
            return f"![{alt}]({light})"
        both = (("light", light), ("dark", dark))
        return "\n".join(f"```{{image}} {path}\n:class: only-{paper}\n:alt: {alt}\n```\n" for paper, path in both)

    def _thumbnail(self, name: str) -> str:
        small, dark = self.cards.thumbnails(build.LABS / "images" / f"{name}.png")
        lit = f'<img class="only-light" src="{small}" alt="" loading="lazy">'
        return f'{lit}<img class="only-dark" src="{dark}" alt="" loading="lazy">'

    def linked(self, text: str, path: str) -> str:
        """The text with its links adapted to the site: to its pages and pictures, or else to the repository."""

        def follow(link: re.Match[str]) -> str:
            mark, label, target = link.groups()
            if "://" in target or target.startswith(("#", "mailto:")):
                return link[0]
            place, _, anchor = target.partition("#")
            where = posixpath.normpath(posixpath.join(posixpath.dirname(path), place))
            if mark and (card := self._card(where)):
                return self.cards.figure(*card, page=re.sub(r"\.\w+$", ".html", path).replace("README", "readme"))
            if where == "README.md":
                target = target.replace("README.md", "readme.md")
            elif not self._is_page(where):
                kind = "tree" if (ROOT / where).is_dir() else "blob"
                target = f"{build.repository()}/{kind}/main/{where}{'#' * bool(anchor)}{anchor}"
            return f"{mark}[{label}]({target})"

        return LINK.sub(follow, text)

    def _card(self, picture: str) -> tuple[Output, str] | None:
        """The widget that this picture shows, and the cell that makes it; None if it shows none."""
        if picture == "docs/ring.png":
            return self.opening.largest
        found = re.fullmatch(r"labs/images/(\w+)\.png", picture)
        shown = self.opening_of(found[1]) if found and found[1] in self.shown else None
        return shown if shown and shown[0].state else None

    def _is_page(self, path: str) -> bool:
        stem, suffix = posixpath.splitext(path)
        if suffix == ".ipynb":
            return stem.removeprefix("labs/") in self.shown
        return stem in ABOUT or stem.removeprefix("docs/") in DOCS or suffix == ".png"


def address() -> str:
    """The address of the published site."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf8"))["project"]
    return project["urls"]["Documentation"]


def launch(name: str) -> str:
    """The buttons that run lab `name`, with the addresses of its badges and of its notebook on this site."""
    colab, binder = re.findall(r"\]\((https://[^)]+)\)", re.sub(r"!\[[^)]+\)", "", build.badges(name)))
    own = [("Your browser", lite.page(name))] if lite.labs([name]) else []
    source = f"{build.repository()}/blob/main/labs/{name}.ipynb"
    places = [("Colab", colab), ("Binder", binder), *own, ("GitHub", source)]
    links = "\n".join(f'<a href="{html.escape(address)}">{label}</a>' for label, address in places)
    return f'<nav class="launch" aria-label="Run this page">\n<span>Run this page:</span>\n{links}\n</nav>'


def _toctree(caption: str, pages: Iterable[str]) -> str:
    return "\n".join(["", "```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```", ""])


def _write(path: Path, data: bytes) -> None:
    if not path.is_file() or path.read_bytes() != data:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
