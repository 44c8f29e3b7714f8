"""The reference has every public name and loses no word of a docstring; the tables of all labs are on one page."""

from __future__ import annotations

import html
import inspect
import re
from functools import cache
from importlib import import_module

import pytest

from labs.source import build
from website import monday, reference
from website.docstrings import as_html, first_sentence

PACKAGES = ("tplab.torch", "tplab.jax", *reference.CORE)


@cache
def pages() -> dict[str, str]:
    return reference.pages()


def section(name: str, page: str) -> str:
    """What a page says of a name."""
    (found,) = re.findall(rf"^## {name}$(.*?)(?=^\(\S+\)=$|\Z)", pages()[page], re.MULTILINE | re.DOTALL)
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_on_one_page_and_in_the_index(package: str):
    twins = package in ("tplab.torch", "tplab.jax")
    cores = {f"reference/{reference.short(name)}.md" for name in reference.CORE}
    where = set(pages()) - cores - {"reference/index.md"} if twins else {f"reference/{reference.short(package)}.md"}
    for name in import_module(package).__all__:
        if not name.startswith("_"):
            assert [page for page in where if re.search(rf"^## {name}$", pages()[page], re.MULTILINE)], name
            assert f"[`{name}`]" in pages()["reference/index.md"]


def test_every_package_with_public_names_is_there():
    names = (reference.ROOT / "tests" / "public_names.txt").read_text(encoding="utf8").split()
    packages = {name.rpartition(".")[0] for name in names if not name.rpartition(".")[2].startswith("_")}
    inner = {one for one in packages if one.count(".") > 1} | {"tplab.exercises.check"}  # for tplab's own rooms
    assert packages - inner == {*PACKAGES}


def test_every_link_of_the_index_has_a_target():
    links = set(re.findall(r"\]\(#([^)]+)\)", pages()["reference/index.md"]))
    targets = [target for text in pages().values() for target in re.findall(r"^\((\S+)\)=$", text, re.MULTILINE)]
    assert links == set(targets) and len(targets) == len(set(targets))


def test_twins_are_on_one_page_and_what_is_alone_says_why():
    both = section("all_reduce", "reference/comm.md")
    assert both.index("**In torch**") < both.index("x: Tensor") < both.index("**In JAX**") < both.index("x: Any")
    assert "**In JAX**" not in section("split_batch", "reference/pipeline.md")  # one function, which both hand on
    assert "Only in `tplab.torch`: all ranks of a compiled program take part" in section("send", "reference/comm.md")
    assert "Only in `tplab.torch`: all ranks of a compiled program take part" in section("receive", "reference/comm.md")
    fused = section("FusedColumn", "reference/models.md")
    assert "is whole to its reader" not in fused and "puts such a model's weights on a mesh" not in fused
    assert "the same" not in fused.splitlines()[2]


def test_a_class_has_its_own_methods_and_none_of_torch():
    mesh = section("Mesh", "reference/core.md")
    assert "\n.coordinates(rank: int)" in mesh or "\n.neighbor(" in mesh
    assert "Should be overridden by all subclasses" not in "".join(pages().values())


def test_constants_are_shown_with_what_is_said_of_them():
    assert "Every rule by name" in section("RULES", "reference/schedules.md")
    assert "{naive, gpipe, one_f_one_b" in section("RULES", "reference/schedules.md")
    assert "Every rule by name" not in section("Schedule", "reference/schedules.md")


# --- docstrings ------------------------------------------------------------------------------------------------------

TABLE = """\
Run `fn` on <every> rank.

args        what `fn` is called with:
            arrays
forward, backward
            two names, and a line of their own
checkpoint_every  a name that is too long for its column,
            which goes on
Raises ShapeError."""


def test_a_table_becomes_a_list_of_its_names():
    assert as_html(TABLE) == (
        "<p>Run <code>fn</code> on &lt;every&gt; rank.</p>\n"
        '<dl class="arguments"><dt><code>args</code></dt><dd>what <code>fn</code> is called with: arrays</dd>'
        "<dt><code>forward, backward</code></dt><dd>two names, and a line of their own</dd>"
        "<dt><code>checkpoint_every</code></dt><dd>a name that is too long for its column, which goes on</dd></dl>\n"
        "<p>Raises ShapeError.</p>"
    )


def test_equations_and_drawings_keep_their_columns():
    shapes = "x [B, F/R]   w [F/R, D]   ->   y [B, D]"
    drawing = "    F0 F1 ..\n    .. F0 F1"
    assert as_html(f"{shapes}\n\n{drawing}") == (
        '<pre class="form">x [B, F/R]   w [F/R, D]   -&gt;   y [B, D]</pre>\n<pre class="form">F0 F1 ..\n.. F0 F1</pre>'
    )


def test_the_first_sentence():
    assert first_sentence("Add `x` up: e.g. 2.5 times. Then stop.") == "Add `x` up: e.g. 2.5 times."
    assert first_sentence("x_i * [B] of `f(*a, **b)`") == r"x\_i \* \[B\] of `f(*a, **b)`"


@pytest.mark.parametrize("package", PACKAGES)
def test_no_word_of_a_docstring_is_lost(package: str):
    module = import_module(package)
    for name in module.__all__:
        doc = inspect.getdoc(getattr(module, name)) or ""
        made = as_html(doc)
        text = html.unescape(re.sub(r"</?(?:p|pre|dl|dt|dd|code|br)(?: [^>]*)?>", " ", made))
        assert "".join(text.replace("`", "").split()) == "".join(doc.replace("`", "").split()), name
        assert "\n\n" not in made  # a blank line would end the HTML in Markdown


# --- on Monday -------------------------------------------------------------------------------------------------------


def test_the_tables_of_all_labs_are_on_one_page():
    text = monday.page(build.names())
    for lab in build.names():
        source = (monday.ROOT / "labs" / "source" / f"{lab}.py").read_text(encoding="utf8")
        rows = [line.removeprefix("# ") for line in source.partition("## On Monday")[2].splitlines()]
        table = [row for row in rows[: rows.index("## To take away")] if row.startswith("|")] if rows else []
        assert f"]({lab}.ipynb)\n\n" in text
        assert len(table) > 2 and "\n".join(table) in text
