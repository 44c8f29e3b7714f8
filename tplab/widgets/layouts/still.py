"""The still picture of `layout_lab`: the card as a PNG."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

import numpy as np

from tplab.forecast import Forecast
from tplab.units import plain, ticks
from tplab.widgets.layouts import still_views
from tplab.widgets.layouts.words import GIB, KIND_HUES, KINDS, PART_HUES, PARTS, badge, seconds_text
from tplab.widgets.layouts.workbench import Workbench
from tplab.widgets.paper.apng import encode
from tplab.widgets.paper.measured import draw_diamond
from tplab.widgets.paper.palette import ACCENT, DIM, HATCH, HUES, INK, LINE, PAPER, SOFT, WORK, Colour, hue, mix
from tplab.widgets.paper.pen import Pen, fitted

WIDTH, MARGIN, TOP, TALL = 900, 18, 74, 330
MIDDLE = 496  # where the right half begins


def still(bench: Workbench, view: str = "plans") -> bytes:
    """The card with its chosen plan. view: "plans", "pipeline" or "nodes"."""
    chosen, best = bench.forecast(bench.chosen), bench.forecast(bench.best)
    rivals, label = [chosen] if chosen is best else [chosen, best], badge(best)
    says = textwrap.wrap(f"{chosen.plan} {bench.says(bench.chosen)}", int((WIDTH - 2 * MARGIN) / 6.6))
    tall = TALL if view == "plans" else still_views.height(chosen, view)
    pen = Pen(WIDTH, TOP + tall + 24 + 17 * len(says))
    pen.box(0.5, 0.5, pen.width - 1, pen.height - 1, edge=LINE, radius=12)
    x = MARGIN + pen.text(MARGIN, 26, bench.title, size=14, bold=True, anchor="lm") + 10
    wide = pen.width_of(label, 10.5) + 20
    pen.box(WIDTH - MARGIN - wide, 15, wide, 22, edge=LINE, radius=11)
    pen.text(WIDTH - MARGIN - wide / 2, 26, label, size=10.5, fill=DIM)
    pen.text(x, 26.5, fitted(bench.about, 11, WIDTH - MARGIN - wide - 10 - x), size=11, fill=DIM, anchor="lm")
    for number, line in enumerate(says):
        pen.text(MARGIN, TOP + tall + 16 + 17 * number, line, size=11.5, anchor="lm")
    if view != "plans":
        {"pipeline": still_views.pipeline, "nodes": still_views.nodes}[view](pen, chosen, TOP - 24)
        return encode([pen.image()], [0])
    _legend(pen, bench)
    _map(pen, bench)
    pen.text(MIDDLE, TOP + 6, "A step", size=11.5, bold=True, anchor="lm")
    outlined = "" if chosen is best else "; outlined: the best's"
    pen.text(MIDDLE + 50, TOP + 6, f"{seconds_text(chosen)}{outlined}", size=11, fill=DIM, anchor="lm")
    _parts(pen, rivals)
    _held(pen, rivals, bench.limit)
    return encode([pen.image()], [0])


def _legend(pen: Pen, bench: Workbench) -> None:
    x, y = float(MARGIN), 54.0
    pen.disc(x + 6, y, 4, mix(HUES[0], 0.55), HUES[0])
    x += 18 + pen.text(x + 18, y, "fits", size=10.5, fill=DIM, anchor="lm") + 14
    _cross(pen, x + 6, y)
    x += 18 + pen.text(x + 18, y, "does not fit", size=10.5, fill=DIM, anchor="lm") + 14
    if bench.measured:
        draw_diamond(pen, x + 6, y)
        pen.text(x + 18, y, fitted(f"measured by {bench.by}", 10.5, 360), size=10.5, fill=DIM, anchor="lm")
    found = bench.survey
    many = f"{len(bench.shown)} of {found.considered:,} plans are drawn; {found.fitting:,} fit"
    pen.text(WIDTH - MARGIN, y, many, size=10.5, fill=DIM, anchor="rm")


def _cross(pen: Pen, x: float, y: float) -> None:
    for sign in (-1, 1):
        pen.line([(x - 3.2, y - 3.2 * sign), (x + 3.2, y + 3.2 * sign)], HUES[1], 1.6)


def _map(pen: Pen, bench: Workbench) -> None:
    """Seconds along, on a scale of logarithms; GiB up."""
    found = bench.points()
    seconds, gib = found["seconds"], found["gib"]
    took = [*seconds, *(one.seconds for one in bench.measured)]
    low, high = min(took) / 1.1, max(took) * 1.06
    most = 1.04 * max([*gib, *(one.gib or 0 for one in bench.measured), 1.1 * bench.limit])
    left, right, top, base = MARGIN + 30, MIDDLE - 26, TOP + 14, TOP + TALL - 34

    def across(amount: float) -> float:
        return left + math.log(amount / low) / math.log(high / low) * (right - left)

    def up(amount: float) -> float:
        return base - amount / most * (base - top)

    pen.box(left, top, right - left, up(bench.limit) - top, fill=SOFT)
    for tick in ticks(0, most, 5):
        pen.line([(left, up(tick)), (right, up(tick))], LINE, 0.7)
        pen.text(left - 6, up(tick), plain(tick), size=10, fill=DIM, anchor="rm")
    for tick in round_numbers(low, high):
        pen.line([(across(tick), base), (across(tick), base + 4)], DIM, 1)
        pen.text(across(tick), base + 13, plain(tick), size=10, fill=DIM)
    pen.text(left - 6, TOP + 4, "GiB", size=10, fill=DIM, anchor="rm")
    pen.text(right, base + 29, "seconds per step", size=10, fill=DIM, anchor="rm")
    for x in np.arange(left, right, 8.0):
        pen.line([(x, up(bench.limit)), (min(x + 5, right), up(bench.limit))], INK, 1.4)
    pen.text(right - 4, up(bench.limit) - 9, f"a GPU has {plain(bench.limit)} GiB", size=10, fill=DIM, anchor="rm")
    for x, y in zip(map(across, seconds), map(up, gib)):
        if y >= up(bench.limit):
            pen.disc(x, y, 4, mix(HUES[0], 0.55), HUES[0])
        else:
            _cross(pen, x, y)
    at = {one.plan: index for index, one in enumerate(bench.shown)}
    for plan, took_, held in bench.measured:
        end = across(took_), up(gib[at[plan]] if held is None else held)
        pen.line([(across(seconds[at[plan]]), up(gib[at[plan]])), end], INK, 1)
        draw_diamond(pen, *end)
    best = bench.best
    marks = [(bench.chosen, "best, chosen" if bench.chosen == best else "chosen", ACCENT)]
    marks += [(best, "best", HUES[2])] if bench.chosen != best else []
    for index, words, colour in marks:
        x, y = across(seconds[index]), up(gib[index])
        pen.disc(x, y, 8, PAPER, colour)
        pen.disc(x, y, 4.5, colour)
        wide = pen.width_of(words, 11, bold=True)
        x = x - wide - 14 if x + wide + 14 > right else x + 12
        pen.box(x - 2, y + 6, wide + 4, 14, fill=PAPER, radius=3)
        pen.text(x, y + 13, words, size=11, bold=True, anchor="lm")


def round_numbers(low: float, high: float) -> list[float]:
    """Round numbers from `low` to `high` for an axis of logarithms, two to nine; else the ends."""
    for digits in ((1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9), (1, 1.5, 2, 3, 4, 5, 7), (1, 2, 3, 5), (1,)):
        powers = range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 1)
        found = [digit * 10.0**power for power in powers for digit in digits if low <= digit * 10.0**power <= high]
        if 2 <= len(found) <= 9:
            return found
    return [low, high]


def _tint(index: int) -> tuple[Colour, Colour]:
    colour = WORK if index < 0 else hue(index)
    return mix(colour, 0.55), colour


def _parts(pen: Pen, rivals: Sequence[Forecast]) -> None:
    names = [part for part in PARTS if any(one.parts[part] > 0.004 * one.seconds for one in rivals)]
    left, right, row = MIDDLE + 104, WIDTH - MARGIN - 90, 25 if len(rivals) > 1 else 21
    longest = max(one.parts[part] for part in names for one in rivals)
    for place, part in enumerate(names):
        y = TOP + 18 + place * row
        pen.text(left - 8, y + 8, PARTS[part], size=11, anchor="rm")
        fill, edge = _tint(PART_HUES[part]) if part != "bubble" else (HATCH, DIM)
        wide = [(right - left) * one.parts[part] / longest for one in rivals]
        pen.box(left, y + 2, wide[0], 11, fill=fill, edge=edge, radius=2)
        if len(rivals) > 1:
            pen.box(left, y + 14, wide[1], 6, edge=DIM, radius=2)
        took = rivals[0].parts[part]
        said = f"{plain(took)} s, {took / rivals[0].seconds:.1%}"
        pen.text(left + max(wide) + 6, y + 8, said, size=10.5, anchor="lm")


def _held(pen: Pen, rivals: Sequence[Forecast], limit: float) -> None:
    top, base, left = TOP + TALL - 124, TOP + TALL - 42, MIDDLE
    pen.text(MIDDLE, top - 16, "Memory at the peak", size=11.5, bold=True, anchor="lm")
    pen.text(MIDDLE + 140, top - 16, "GiB, by rank of a pipeline", size=11, fill=DIM, anchor="lm")
    wide = (WIDTH - MARGIN - left - 18 * (len(rivals) - 1)) / len(rivals)
    scale = (base - top) / max(1.08 * limit, *(one.peak.total / GIB for one in rivals))
    there: dict[str, None] = {}
    for number, one in enumerate(rivals):
        x = left + number * (wide + 18)
        each = min(wide / one.plan.pp, 54)
        for place, held in enumerate(one.held):
            y = base
            for kind, index in KIND_HUES.items():
                tall = getattr(held, kind) / GIB * scale
                if tall > 0.4:
                    y -= tall
                    fill, edge = _tint(index)
                    pen.box(x + place * each, y, max(each - 2, 1), tall, fill=fill, edge=edge if each > 8 else None)
                    there[kind] = None
        for dash in np.arange(x, x + wide, 8.0):
            pen.line([(dash, base - limit * scale), (min(dash + 5, x + wide), base - limit * scale)], INK, 1.2)
        name = "chosen" if number == 0 and len(rivals) > 1 else "best" if number else "best, chosen"
        many = f", {one.plan.pp} ranks" if one.plan.pp > 1 else ""
        pen.text(x, base + 9, f"{name}{many}: up to {one.peak.total / GIB:.1f} GiB", size=10, anchor="lm")
    x, y = float(MIDDLE), base + 27
    for kind in (kind for kind in KIND_HUES if kind in there):
        fill, edge = _tint(KIND_HUES[kind])
        if x + 20 + pen.width_of(KINDS[kind], 9.5) > WIDTH - MARGIN:
            x, y = float(MIDDLE), y + 15
        pen.box(x, y - 5, 12, 9, fill=fill, edge=edge, radius=2)
        x += 16 + pen.text(x + 16, y, KINDS[kind], size=9.5, fill=DIM, anchor="lm") + 9
