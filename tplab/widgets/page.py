"""`to_html(thing, path)`: a page that plays in any browser, without Python, a server or a network."""

from __future__ import annotations

import base64
import html
import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import anywidget
from PIL import Image

from tplab.schedules import Schedule, Simulation, simulate
from tplab.trace.trace import Trace
from tplab.widgets.animate import Animation
from tplab.widgets.gantt import Gantt, gantt
from tplab.widgets.paper.apng import darkened, encode
from tplab.widgets.paper.card import Card, script
from tplab.widgets.paper.shown import a, way_out
from tplab.widgets.schedule.facts import paper_name
from tplab.widgets.score import words
from tplab.widgets.score.score import score
from tplab.widgets.timeline import Timeline

_STATIC = Path(__file__).parent / "static"

_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline'; \
style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="description" content="{sentence}">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<main>
<h1>{title}</h1>
<p>{sentence}</p>
{places}
<noscript><footer>Scripts are off here, so this is a still. Open the file in a browser to play it.</footer></noscript>
<footer hidden>Click a picture to use the keyboard: space plays and pauses, ← and → go one step, Home and End go to \
the start and to the end. Hover over anything to see its contents.</footer>
</main>
<script type="application/json" id="cards">{cards}</script>
<script type="module">
{script}</script>
</body>
</html>
"""


Run = Schedule | Simulation
"""An input of `gantt`: a schedule, for F = I = W = 1, or a simulation with its own costs."""


def to_html(
    thing: Trace | Run | Sequence[Run] | Mapping[str, Run] | Card, path: str | Path, *, timeline_first: bool = False
) -> Path:
    """Write a page that shows `thing` and plays it wherever it is opened. Returns the path.

    thing   a Trace: its animation, with its timeline below it and one playhead for both; with `timeline_first`, for
            whole programs, the timeline is above;
            a Schedule or a Simulation: its `gantt`;
            several schedules or simulations, in a list or in a dict with your own names: all on one time axis, for
            comparison;
            or a widget of `tplab.widgets`, in its current state
    path    the file, such as "run.html". It is a single file that loads nothing, so you can mail it or put it on a wiki
    Raises TypeError if `thing` is something else, and ValueError if simulations in seconds and in steps are mixed.
    """
    title, sentence, cards = _shown(thing)
    if timeline_first and isinstance(thing, Trace):
        cards.reverse()
    where = Path(path)
    where.write_text(_page(title, sentence, cards), encoding="utf8")
    return where


def _shown(thing: Any) -> tuple[str, str, list[Card]]:
    """The title, the sentence and the cards of the page."""
    if isinstance(thing, Trace):
        of = score(thing)
        return thing.title or "A program", words.summary(of, "Trace"), [Animation(of), Timeline(of)]
    if isinstance(thing, Schedule | Simulation):
        card = gantt(thing)
        return paper_name(card.runs[0].schedule.name, "A schedule"), card.sentence, [card]
    if isinstance(thing, Mapping):
        return _compared([_named(run, str(name)) for name, run in thing.items()], thing)
    if isinstance(thing, Sequence) and not isinstance(thing, str | bytes):
        return _compared(thing, thing)
    if isinstance(thing, Card):
        return re.split(r"[:.] |\.$", thing.sentence)[0], thing.sentence, [thing]
    raise _unknown(thing)


def _compared(runs: Sequence[Any], thing: Any) -> tuple[str, str, list[Card]]:
    """Schedules and simulations below each other, on one time axis."""
    if not runs:
        raise TypeError(f"to_html was given an empty {type(thing).__name__}; put at least one schedule into it")
    for run in runs:
        if not isinstance(run, Run):
            raise _unknown(run, f", so {a(type(thing))} may only hold Schedules and Simulations")
    simulated = [run if isinstance(run, Simulation) else simulate(run) for run in runs]
    units = {"seconds" if run.costs.unit == "s" else "steps": paper_name(run.schedule.name) for run in simulated}
    if len(units) > 1:
        which = " and ".join(f"{name} in {unit}" for unit, name in units.items())
        raise ValueError(f"one time axis cannot show {which}; simulate all of them with costs of one unit")
    card = Gantt(simulated)
    names = [paper_name(run.schedule.name, f"schedule {index + 1}") for index, run in enumerate(simulated)]
    return ", ".join(names), card.sentence, [card]


def _named(run: Any, name: str) -> Any:
    """A schedule or a simulation under another name; anything else is returned unchanged."""
    if isinstance(run, Simulation):
        return replace(run, schedule=run.schedule.named(name))
    return run.named(name) if isinstance(run, Schedule) else run


def _unknown(thing: Any, so: str = "") -> TypeError:
    known = "a Trace, a Schedule, a Simulation, several of the last two, or a widget of tplab"
    return TypeError(f"to_html shows {known}, not {a(type(thing))}{so}{way_out(thing, Trace)}")


def _page(title: str, sentence: str, cards: Sequence[Card]) -> str:
    places = "\n".join(f'<div class="card"><noscript>{_picture(card)}</noscript></div>' for card in cards)
    return _PAGE.format(
        title=html.escape(_one_line(title)),
        sentence=html.escape(_one_line(sentence)),
        style=_text(cards[0], "_css") + (_STATIC / "page.css").read_text(encoding="utf8"),
        places=places,
        cards=json_in_page([_traits(card) for card in cards]),
        script="const renderers = [];\n" + "".join(map(_module, cards)) + script("page"),
    )


def _one_line(text: str) -> str:
    """A title without control characters, which HTML does not allow."""
    return re.sub(r"[\x00-\x1f\x7f]+", " ", text)


def _module(card: Card) -> str:
    """A card's script as a block of the page's module, so that its names stay local. It exposes the card's renderer."""
    code, found = re.subn(r"(?m)^export default \{ render \};$", "renderers.push(render);", _text(card, "_esm"))
    if found != 1 or "</script" in code.lower() or "<!--" in code:
        raise ValueError(f"the script of {type(card).__name__} cannot be part of a page: it must end on its render")
    return f"{{\n{code}}}\n"


def _text(card: Card, name: str) -> str:
    """A widget's script (_esm) or style sheet (_css)."""
    return str(getattr(card, name))


def _traits(card: Card) -> dict[str, dict[str, Any]]:
    """The traits that a widget's script reads from its model: numbers and words unchanged, bytes in base64."""
    own = set(card.trait_names(sync=True)) - set(anywidget.AnyWidget.class_trait_names(sync=True))
    values = {name: getattr(card, name) for name in sorted(own) if not name.startswith("_")}
    packed = {name: base64.b64encode(value).decode() for name, value in values.items() if isinstance(value, bytes)}
    return {"bytes": packed, "values": {name: value for name, value in values.items() if name not in packed}}


def json_in_page(data: Any) -> str:
    """JSON that is safe inside a script element: no text in it can close the element."""
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")


def _picture(card: Card) -> str:
    """The fallback if scripts are off, as in a mail preview: the first frame of the card's picture."""
    first = Image.open(io.BytesIO(card.picture())).convert("RGB")
    png = encode([first], [0])
    light, dark = (f"data:image/png;base64,{base64.b64encode(one).decode()}" for one in (png, darkened(png)))
    alt = html.escape(_one_line(card.sentence))
    source = f'<source media="(prefers-color-scheme: dark)" srcset="{dark}">'
    return f'<picture>{source}<img alt="{alt}" src="{light}"></picture>'
