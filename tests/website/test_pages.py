"""The pages that Sphinx reads: links, buttons, widgets in their places. No lab is run, and nothing is drawn."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path

import nbformat
import pytest
from PIL import Image

from labs.source import build, course
from tplab.widgets.paper.card import Card
from website import front, opening
from website.cards import KEPT, Cards, kinds
from website.opening import Opening
from website.pages import Pages, StaleLabError, address, launch
from website.states import Output, State

NASTY = '</script><script>window.stolen = 1</script>"\n\n# not a heading'
LAB = "00_first_look"
REPOSITORY = build.repository()


def widget(sentence: str, picture: str = "") -> Output:
    stream = io.BytesIO()
    Image.new("RGB", (3, 2), "white").quantize(2).save(stream, "png")
    state = State("Knob", "export default {};", {"content": {"title": NASTY}}, {"score": "AAAA"})
    png = picture or base64.b64encode(stream.getvalue()).decode()
    return Output({"text/plain": sentence, "image/png": png}, {}, state)


def committed() -> dict[str, list[Output]]:
    """What the cells of a lab show, as they are in the notebook, each picture as a widget."""
    book = nbformat.read(build.LABS / f"{LAB}.ipynb", as_version=4)
    shown: dict[str, list[Output]] = {}
    for cell in book.cells:
        outputs = [output.data for output in cell.get("outputs", []) if "data" in output]
        shown[cell.id] = [
            widget(data["text/plain"], data["image/png"]) if "image/png" in data else Output(dict(data), {}, None)
            for data in outputs
        ]
    return shown


def opened() -> Opening:
    """What the front page's programs might have shown."""
    shown = {
        ring.cell: [Output({"text/plain": "[250.0, 250.0]"}, {}, None), widget("A ring")] for ring in opening.rings()
    }
    said = {"hang": "rank 0 waits at hang.py:6", "doctor": "4 times\n  at train.py:13\n  also see train.py:2"}
    shown |= {cell: [Output({"text/plain": text}, {}, None)] for cell, text in said.items()}
    return Opening({**shown, "ddp": [widget("A timeline")]})


@pytest.fixture
def pages(tmp_path: Path) -> Pages:
    return Pages(tmp_path / "pages", Cards(tmp_path / "site"), {LAB: committed()}, opened())


@pytest.mark.parametrize(
    "path, link, becomes",
    [
        ("docs/design.md", "[a](twins.md)", "[a](twins.md)"),
        ("docs/design.md", "[a](../CONTRIBUTING.md#versions)", "[a](../CONTRIBUTING.md#versions)"),
        ("docs/design.md", "[a](../README.md#labs)", "[a](../readme.md#labs)"),
        ("README.md", "[a\nb](labs/00_first_look.ipynb)", "[a\nb](labs/00_first_look.ipynb)"),
        ("README.md", "[`a`](tplab/mesh.py)", f"[`a`]({REPOSITORY}/blob/main/tplab/mesh.py)"),
        ("README.md", "[a](tplab/trace)", f"[a]({REPOSITORY}/tree/main/tplab/trace)"),
        ("README.md", "[a](https://arxiv.org/abs/1#x)", "[a](https://arxiv.org/abs/1#x)"),
        ("labs/16_x.ipynb", "[a](#here)", "[a](#here)"),
    ],
)
def test_links_lead_to_pages_or_else_to_the_repository(pages: Pages, path: str, link: str, becomes: str):
    assert pages.linked(link, path) == becomes


def test_a_lab_has_buttons_for_badges_and_widgets_for_pictures(pages: Pages):
    book = nbformat.reads(pages.lab(LAB), as_version=4)
    first, setup, *rest = book.cells
    assert "badge" not in first.source and launch(LAB) in first.source
    for target in re.findall(r'href="([^"]+)"', launch(LAB))[:2]:
        assert f"]({target})" in build.badges(LAB)
    assert '<figure class="card" data-module="../widgets/widget-' in first.source
    assert setup.metadata.tags == ["hide-input"]
    assert build.closing_line() not in {cell.source for cell in rest}
    shown = [output.data for cell in rest for output in cell.get("outputs", []) if "data" in output]
    assert [list(data) for data in shown] == [["text/html"]] * 3 + [["text/plain"]]


def test_what_is_on_the_page_is_what_was_committed(pages: Pages):
    cell = next(cell for cell, outputs in pages.shown[LAB].items() if outputs)
    pages.shown[LAB][cell][0].data["text/plain"] = "Something else"  # pyright: ignore
    with pytest.raises(StaleLabError, match=rf"labs/{LAB}.ipynb says .* its cell {cell} says \['Something else'\]"):
        pages.lab(LAB)


def test_the_front_page_has_a_picture_that_plays_the_paths_and_a_map(pages: Pages):
    text = pages.front()
    assert text.count(" data-plays>") == 1 and "Every rank returns 250." in text
    assert text.count("<li class=marked>") == 2  # the line where a rank waits, and the one at fault
    assert "<li class=marked><code>    dist.all_reduce(parameter.grad)</code>" in text
    assert f'href="labs/{LAB}.html" data-needs="">' in text
    assert "What travels when eight ranks add up their numbers?" in text and "20 min, needs no other lab" in text
    assert [f"<h3>{path.title}</h3>" in text for path in course.PATHS] == [
        "00" in path.numbers for path in course.PATHS
    ]
    assert ":caption: Splitting a layer\n\nlabs/00_first_look\n" in text and ":caption: Project\n\nreadme\n" in text
    assert "\n\n" not in text[: text.index("```{toctree}")].rstrip(), "Markdown would end the HTML there"


def test_a_tile_of_the_map_knows_what_its_lab_builds_on():
    text = front.body(course.labs(), opened(), "<figure>", "<figure>", lambda name: f"<img alt={name!r}>", REPOSITORY)
    for lab in course.labs():
        assert f'id="lab-{lab.number}" href="labs/{lab.name}.html" data-needs="{" ".join(lab.needs)}">' in text
    assert "<img alt='17_zero'>" in text and "50 min, builds on 02, 16" in text


def test_the_readme_does_not_send_readers_of_the_site_to_the_site(pages: Pages):
    text = pages.readme()
    assert address() not in text
    assert "<picture>" not in text and text.count(":alt: A timeline of eight ranks.") == 2
    assert "```{image} docs/train-dark.png\n:class: only-dark" in text
    assert text.count('<figure class="card"') == 1


def test_no_text_breaks_out_of_its_figure(tmp_path: Path):
    figure = Cards(tmp_path).figure(widget(NASTY), NASTY, "labs/x.html")
    assert figure.count("</script>") == figure.count("<script") == 1
    assert 'alt="&lt;/script&gt;&lt;script&gt;window.stolen = 1&lt;/script&gt;&quot; # not a heading"' in figure
    assert "\n\n" not in figure
    assert 'width="3" height="2"' in figure


def test_what_widgets_share_is_one_file(tmp_path: Path):
    cards = Cards(tmp_path)
    first, second = (cards.figure(widget("a"), "card = a", "index.html") for _ in range(2))
    assert re.sub(' id="(\\w+)-2"', r' id="\1"', second) == first != second  # links tell them apart
    assert len(list(tmp_path.rglob("*.js"))) == 1
    assert len(list(tmp_path.rglob("*.png"))) == 2  # for light and for dark paper


def test_what_readers_change_in_a_widget_is_kept_by_links():
    changed = {"settings", "chosen", "view", "colour", "step", "index", "rank", "begin", "end"}
    traits = {kind.__name__: changed & {*kind.class_trait_names(sync=True)} for kind in kinds(Card)}
    assert traits == {name: {*kept} for name, kept in KEPT.items()}
    assert len([kept for kept in KEPT.values() if kept]) >= 10
