"""A page that plays by itself: all of it is in one file, nothing in it is loaded, no text breaks out of its place."""

from __future__ import annotations

import base64
import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest

import tplab.widgets
from tests.hand_traces import ring_all_reduce
from tests.widgets.memories import two_ranks
from tplab import Mesh, P, Trace
from tplab.schedules import Costs, gpipe, one_f_one_b, simulate, zb_v
from tplab.trace import Recorder
from tplab.widgets import (
    Bars,
    Row,
    animate,
    curves,
    gantt,
    knob,
    levels,
    matrices,
    memory_timeline,
    pipeline_lab,
    shards,
    timeline,
    to_html,
)
from tplab.widgets.paper.wire import unpack

NASTY = "</script><script>window.stolen = 1</script><!-- </title>'\"&amp;<img src=x onerror=alert(1)>"


class Page(HTMLParser):
    """The elements of a page, with their attributes, and the text in them."""

    def __init__(self, path: Path):
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.source = path.read_text(encoding="utf8")
        self.feed(self.source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "img", "source"):
            self._open.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open:
            self.texts[self._open[-1]][-1] += data

    @property
    def cards(self) -> list[dict[str, dict]]:
        return json.loads(self.texts["script"][0])


def nasty_trace() -> Trace:
    recorder = Recorder(Mesh(tp=2), NASTY, "torch")
    recorder.add(0, "compute", NASTY, 0, 1, where=NASTY)
    return recorder.trace(unit="steps")


WIDGETS = {
    "animate": lambda text: animate(ring_all_reduce(Mesh(tp=3), "tp")),
    "timeline": lambda text: timeline(ring_all_reduce(Mesh(tp=3), "tp")),
    "timeline over a prediction": lambda text: timeline(simulate(gpipe(2, 2)).trace, simulate(gpipe(2, 2))),
    "gantt": lambda text: gantt(gpipe(2, 2).named(text)),
    "two gantts": lambda text: gantt(gpipe(2, 2), one_f_one_b(2, 2).named(text)),
    "pipeline_lab": lambda text: pipeline_lab(),
    "shards": lambda text: shards(Mesh(tp=2), (4, 4), P("tp")),
    "matrices": lambda text: matrices({text: [[1.0, 2.0]]}),
    "knob": lambda text: knob(text, text, {1: Bars([Row(text, {text: 1.0})], "s")}),
    "curves": lambda text: curves([1, 2], {text: {text: [1, 2]}}, title=text, sentence=text),
    "memory_timeline": lambda text: memory_timeline({text: two_ranks(title=text)}, title=text),
    "levels": lambda text: levels({text: {text: ([0, 1], [0, 1])}}, title=text, sentence=text, along="x"),
}


def test_a_trace_is_its_animation_over_its_timeline(tmp_path: Path):
    trace = ring_all_reduce(Mesh(tp=3), "tp")
    path = to_html(trace, tmp_path / "run.html")
    assert path == tmp_path / "run.html"
    page = Page(path)
    assert page.texts["title"] == page.texts["h1"] == ["ring_all_reduce"]
    sentence = "Trace of ring_all_reduce on Mesh(tp=3): 4 steps, each rank sends 4 KiB (modelled, unit times)."
    assert page.texts["p"] == [sentence]
    first, second = page.cards
    assert base64.b64decode(first["bytes"]["score"]) == animate(trace).score
    assert base64.b64decode(second["bytes"]["score"]) == timeline(trace).score
    assert first["values"] == {"above": "", "step": 0}
    assert second["values"] == {"above": "", "step": 0, "begin": 0, "end": 1}


@pytest.mark.parametrize("thing", [gpipe(2, 3).named("mine"), simulate(gpipe(2, 3).named("mine"), Costs(1, 2, 3))])
def test_a_schedule_is_its_gantt(tmp_path: Path, thing):
    page = Page(to_html(thing, str(tmp_path / "schedule.html")))
    assert page.texts["title"] == ["mine"]
    assert page.texts["p"] == [gantt(thing).sentence]
    (card,) = page.cards
    assert base64.b64decode(card["bytes"]["board"]) == gantt(thing).board


def test_a_widget_is_shown_as_it_is_now(tmp_path: Path):
    card = gantt(gpipe(2, 3))
    card.step = 2
    page = Page(to_html(card, tmp_path / "now.html"))
    assert page.cards[0]["values"] == {"above": "", "step": 2, "colour": "kind"}


@pytest.mark.parametrize("name", WIDGETS)
def test_no_widget_loads_anything_or_lets_a_text_out(tmp_path: Path, name: str):
    page = Page(to_html(WIDGETS[name](NASTY), tmp_path / "page.html"))
    check_closed(page)


def test_a_trace_lets_no_text_out(tmp_path: Path):
    page = Page(to_html(nasty_trace(), tmp_path / "page.html"))
    assert page.texts["title"] == page.texts["h1"] == [NASTY]
    check_closed(page)


def check_closed(page: Page) -> None:
    """The page has the elements that it should have, and none of them loads anything."""
    tags = [tag for tag, _ in page.elements]
    assert tags.count("script") == 2 and tags.count("title") == 1 and tags.count("style") == 1
    for _, attributes in page.elements:
        for name, value in attributes.items():
            assert not name.startswith("on")
            if name in ("src", "srcset", "href"):
                assert value is not None and value.startswith("data:")
    assert {tag for tag, _ in page.elements} <= {
        "html", "head", "meta", "link", "title", "style", "body", "main", "h1", "p", "div", "noscript", "picture",
        "source", "img", "footer", "script",
    }  # fmt: skip
    assert page.elements[-1] == ("script", {"type": "module"})
    assert "import" not in page.texts["script"][1].split()
    assert "default-src 'none'" in page.source


def test_a_ring_over_64_ranks_is_small_enough_for_a_mail(tmp_path: Path):
    path = to_html(ring_all_reduce(Mesh(tp=64), "tp"), tmp_path / "ring.html")
    assert path.stat().st_size < 300_000


COMPARED = [gpipe(2, 3), simulate(one_f_one_b(2, 3), Costs(2, 1, 1)), zb_v(2, 4)]


@pytest.mark.parametrize("names", [None, ["mine", "yours", NASTY]], ids=["a list", "a dict"])
def test_several_schedules_are_compared_on_one_time_axis(tmp_path: Path, names: list[str] | None):
    page = Page(to_html(COMPARED if names is None else dict(zip(names, COMPARED)), tmp_path / "compared.html"))
    check_closed(page)
    said = names or ["GPipe", "1F1B", "ZB-V"]
    assert page.texts["title"] == [", ".join(said)]
    (card,) = page.cards
    header, columns = unpack(base64.b64decode(card["bytes"]["board"]))
    assert [run["name"] for run in header["runs"]] == said
    assert [run["makespan"] for run in header["runs"]] == [12, 16, simulate(zb_v(2, 4)).makespan]
    assert header["about"].endswith("F : I : W = 1 : 1 : 1") and header["runs"][0]["about"] == ""
    assert [run["about"] for run in header["runs"][1:]] == [
        "2 ranks · 3 microbatches · F : I : W = 2 : 1 : 1",
        "2 ranks · 4 stages · 4 microbatches · F : I : W = 1 : 1 : 1",
    ]
    assert columns["times"].max() == max(run["makespan"] for run in header["runs"])


def test_what_cannot_be_compared_is_said(tmp_path: Path):
    with pytest.raises(TypeError, match=r"an empty dict; put at least one schedule into it$"):
        to_html({}, tmp_path / "a.html")
    with pytest.raises(TypeError, match=r"not a Trace, so a list may only hold Schedules and Simulations$"):
        to_html([gpipe(2, 2), nasty_trace()], tmp_path / "a.html")  # pyright: ignore[reportArgumentType]
    in_seconds = simulate(gpipe(2, 2), Costs(unit="s"))
    with pytest.raises(ValueError, match=r"cannot show 1F1B in steps and GPipe in seconds; simulate all of them with"):
        to_html([one_f_one_b(2, 2), in_seconds], tmp_path / "a.html")
    assert not (tmp_path / "a.html").exists()


def test_what_cannot_be_shown_is_said(tmp_path: Path):
    with pytest.raises(TypeError, match=r"several of the last two, or a widget of tplab, not an int$"):
        to_html(7, tmp_path / "a.html")  # pyright: ignore[reportArgumentType]

    class Result:
        trace = nasty_trace()

    with pytest.raises(TypeError, match=r"not a Result; give its trace$"):
        to_html(Result(), tmp_path / "a.html")  # pyright: ignore[reportArgumentType]
    assert not (tmp_path / "a.html").exists()


def test_the_timeline_of_a_whole_program_may_come_first(tmp_path: Path):
    trace = ring_all_reduce(Mesh(tp=3), "tp")
    first, second = Page(to_html(trace, tmp_path / "run.html", timeline_first=True)).cards
    assert base64.b64decode(first["bytes"]["score"]) == timeline(trace).score
    assert base64.b64decode(second["bytes"]["score"]) == animate(trace).score


def test_no_two_scripts_have_one_name():
    """They become one module, in which a second `const` of a name is an error."""
    names: list[str] = []
    for file in sorted((Path(tplab.widgets.__file__).parent / "static").glob("*.js")):
        text = file.read_text(encoding="utf8")
        for found in re.finditer(
            r"^(?:export )?(?:async )?(?:const|let|function|class) (\[.*?\]|\w+)", text, re.MULTILINE
        ):
            names += re.findall(r"\w+", found[1])
    assert {name: count for name, count in Counter(names).items() if count > 1}.keys() == {"render"}
