"""The pictures of `layout_lab`: the map of plans, and beside it the chosen plan's step and memory.

A position of the playhead is the index of the chosen plan. Neither this file nor anything it imports needs a font.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from tplab.forecast import Forecast
from tplab.units import plain, ticks
from tplab.widgets.layouts.candidates import Candidates
from tplab.widgets.layouts.words import GIB, KIND_HUES, KINDS, PART_HUES, PARTS, seconds_text
from tplab.widgets.paper.legend import Key, dashes, draw_legend
from tplab.widgets.paper.measured import draw_diamond
from tplab.widgets.paper.palette import ACCENT, DIM, HATCH, HUES, INK, LINE, PAPER, SOFT, Colour, hue, mix
from tplab.widgets.paper.scene import Scene, spans

WIDTH, TALL = 440, 310
LABEL, TOTAL = 104, 90
"""In pixels: room for the name of a part of a step, and for its seconds."""
_REACH = 14


def legend(bench: Candidates) -> list[Key]:
    keys = [Key("fits", mix(HUES[0], 0.55), HUES[0], "disc"), Key("does not fit, or may not", HUES[1], sign="cross")]
    keys += [Key("no other is faster and smaller", edge=mix(DIM, 0.6), sign="stair")]
    return [*keys, Key(f"measured by {bench.by}", sign="diamond")] if bench.measured else keys


def note(bench: Candidates) -> str:
    found = bench.survey
    return f"{len(bench.shown)} of {found.considered:,} plans are drawn; {found.fitting:,} fit"


def plan_map(bench: Candidates) -> Scene:
    """Seconds along x, on a logarithmic scale; GiB along y. The key of a plan is its index."""
    found, plans = bench.points(), range(len(bench.shown))
    seconds, gib = found["seconds"].tolist(), found["gib"].tolist()
    took = [*seconds, *(one.seconds for one in bench.measured)]
    low, high = min(took) / 1.1, max(took) * 1.06
    most = 1.04 * max([*gib, *(one.gib or 0 for one in bench.measured), 1.1 * bench.limit])
    left, right, top, base = 44, WIDTH - 12, 14, TALL - 34
    about = f"{len(plans)} plans, seconds of a step against GiB of the rank that holds most"
    sheet = Scene(WIDTH, TALL, about)

    def across(amount: float) -> float:
        return left + math.log(amount / low) / math.log(high / low) * (right - left)

    def up(amount: float) -> float:
        return base - amount / most * (base - top)

    limit = up(bench.limit)
    sheet.box(left, top, right - left, limit - top, fill=SOFT)
    for tick in ticks(0, most, 5):
        sheet.line([(left, up(tick)), (right, up(tick))], LINE, 0.7)
        sheet.text(left - 6, up(tick), plain(tick), size=10, fill=DIM, anchor="rm")
    for tick in round_numbers(low, high):
        sheet.line([(across(tick), base), (across(tick), base + 4)], DIM, 1)
        sheet.text(across(tick), base + 13, plain(tick), size=10, fill=DIM)
    sheet.text(left - 6, 5, "GiB", size=10, fill=DIM, anchor="rm")
    sheet.text(right, TALL - 6, "seconds per step", size=10, fill=DIM, anchor="rm")
    dashes(sheet, left, right, limit)
    room, marks = f"a GPU has {plain(bench.limit)} GiB", [(across(seconds[plan]), up(gib[plan])) for plan in plans]
    room_wide = sheet.width_of(room, 10)
    ends = range(right - 4, math.ceil(left + room_wide), -8)  # of its text: where no plan is under it
    free = (
        (end, y) for y in (limit - 9, limit + 10) for end in ends
        if not any(end - room_wide - 7 < x < end + 7 and abs(up_there - y) < 12 for x, up_there in marks)
    )  # fmt: skip
    room_x, room_y = next(free, (right - 4, limit - 9))
    sheet.text(room_x, room_y, room, size=10, fill=DIM, anchor="rm")
    front = sorted((across(seconds[plan]), up(gib[plan])) for plan in plans if found["front"][plan])
    corners = [corner for (_, y), (x, low_y) in pairwise(front) for corner in ((x, y), (x, low_y))]
    sheet.line([*front[:1], *corners], mix(DIM, 0.6), 1)
    for plan in plans:
        x, y = across(seconds[plan]), up(gib[plan])
        with sheet.about(_about_plan(bench, plan, seconds[plan], gib[plan], int(found["fits"][plan])), key=plan):
            sheet.box(x - _REACH, y - _REACH, 2 * _REACH, 2 * _REACH)
        if gib[plan] <= bench.limit:
            _ring(sheet, x, y, 4, HUES[0], fill=mix(HUES[0], 0.55), line=1.2)
        else:
            for sign in (-1, 1):
                sheet.line([(x - 3.2, y - 3.2 * sign), (x + 3.2, y + 3.2 * sign)], HUES[1], 1.6)
    at = {one.plan: index for index, one in enumerate(bench.shown)}
    for plan, measured, held in bench.measured:
        end = across(measured), up(gib[at[plan]] if held is None else held)
        sheet.line([(across(seconds[at[plan]]), up(gib[at[plan]])), end], INK, 1)
        draw_diamond(sheet, *end)

    def mark(plan: int, words: str, radius: float, colour: str, is_left: bool, rise: float) -> None:
        x, y, wide = across(seconds[plan]), up(gib[plan]), sheet.width_of(words, 11, bold=True)
        _ring(sheet, x, y, radius, colour, line=2.2)
        begin = x - radius - 4 - wide if is_left else x + radius + 4
        if begin < room_x and room_x - room_wide < begin + wide and abs(y - rise - room_y) < 13:
            rise = -rise  # on the other side of the plan
        sheet.box(begin - 2, y - rise - 7, wide + 4, 14, fill=PAPER, radius=3)
        sheet.text(begin, y - rise, words, size=11, bold=True, anchor="lm")

    for plan in plans:
        with sheet.during(plan - 0.5, plan + 0.5):
            words = "best, chosen" if plan == bench.best else "chosen"
            is_left = across(seconds[plan]) > right - 16 - sheet.width_of(words, 11, bold=True)
            mark(plan, words, 10, ACCENT, is_left, 11)
    for span in spans({*plans} - {bench.best}):
        with sheet.during(*span):
            mark(bench.best, "best", 6.5, HUES[2], across(seconds[bench.best]) > left + 50, 0)
    return sheet


def _about_plan(bench: Candidates, plan: int, seconds: float, gib: float, fits: int) -> list[tuple[str, str]]:
    one = bench.forecasts.get(bench.shown[plan].plan)
    rows = [("", str(bench.shown[plan].plan))]
    rows += [("a step", seconds_text(one) if one else f"about {plain(seconds)} s, an estimate")]
    rows += [("memory", f"{plain(gib)} of {plain(bench.limit)} GiB")]
    rows += [("", said) for said in ["does not fit", "may not fit", ""][fits : fits + 1] if said]
    for of, took, held in bench.measured:
        if of == bench.shown[plan].plan:
            rows += [("measured", f"{plain(took)} s{'' if held is None else f', {plain(held)} GiB'}, by {bench.by}")]
    return rows


def step(bench: Candidates) -> Scene:
    """The parts of the step of each plan with a forecast, and the memory of its ranks, beside the best plan's."""
    known = [index for index, one in enumerate(bench.shown) if one.plan in bench.forecasts]
    best = bench.forecast(bench.best)
    rivals = {index: [bench.forecast(index), *([best] if index != bench.best else [])] for index in known}
    rows = max(len(_parts_of(pair)) for pair in rivals.values())
    sheet = Scene(WIDTH, 24 + 26 * rows + 190, "the chosen plan's step, and what its ranks hold")
    for index, pair in rivals.items():
        with sheet.during(index - 0.5, index + 0.5):
            names = ["chosen plan", "best plan"] if len(pair) > 1 else ["best plan, chosen"]
            x = sheet.text(0, 8, "A step", size=12, bold=True, anchor="lm") + 8
            said = seconds_text(pair[0]) + "; outlined: the best's" * (len(pair) > 1)
            sheet.text(x, 8, said, size=11, fill=DIM, anchor="lm")
            _parts(sheet, pair, names)
            _held(sheet, pair, names, bench.limit, 24 + 26 * rows + 8)
    return sheet


def _parts_of(rivals: Sequence[Forecast]) -> list[str]:
    return [part for part in PARTS if any(one.parts[part] > 0.004 * one.seconds for one in rivals)]


def _parts(sheet: Scene, rivals: Sequence[Forecast], names: Sequence[str]) -> None:
    parts, room = _parts_of(rivals), WIDTH - LABEL - TOTAL
    longest = max(one.parts[part] for part in parts for one in rivals)
    for place, part in enumerate(parts):
        y = 24 + place * 26
        sheet.text(LABEL - 8, y + 8, PARTS[part], size=11, anchor="rm")
        fill, edge = _tint(PART_HUES[part])
        for number, (one, name) in enumerate(zip(rivals, names)):
            took = max(one.parts[part], 0.0)
            wide = max(room * took / longest, 1) if took else 0
            said = [("", f"{PARTS[part]}, {name}"), ("seconds", f"{plain(took)} s")]
            with sheet.about([*said, ("of the step", f"{took / one.seconds:.1%}")]):
                if number:
                    sheet.box(LABEL, y + 14, wide, 7, edge=DIM, radius=min(2, wide / 4))
                else:
                    sheet.box(LABEL, y + 1, wide, 12 if len(rivals) > 1 else 15, fill=fill, edge=edge, radius=2)
        took = rivals[0].parts[part]
        end = LABEL + room * max(one.parts[part] for one in rivals) / longest
        sheet.text(end + 7, y + 8, f"{plain(took)} s, {took / rivals[0].seconds:.1%}", size=10.5, anchor="lm")


def _held(sheet: Scene, rivals: Sequence[Forecast], names: Sequence[str], limit: float, top: float) -> None:
    """The memory of the ranks at each place of a pipeline, by kind: one column per place."""
    x = sheet.text(0, top, "Memory at the peak", size=12, bold=True, anchor="lm") + 8
    sheet.text(x, top, "GiB, by rank of a pipeline", size=11, fill=DIM, anchor="lm")
    high, base, left, gap = top + 30, top + 130, 30, 18
    most = max(1.08 * limit, *(one.peak.total / GIB for one in rivals))
    scale, wide = (base - high) / most, (WIDTH - left - gap * (len(rivals) - 1)) / len(rivals)
    for tick in ticks(0, most, 3):
        sheet.line([(left, base - tick * scale), (WIDTH, base - tick * scale)], LINE, 0.7)
        sheet.text(left - 5, base - tick * scale, plain(tick), size=10, fill=DIM, anchor="rm")
    for number, (one, name) in enumerate(zip(rivals, names)):
        x, each = left + number * (wide + gap), min(wide / one.plan.pp, 54)
        said = f"{name}: up to {one.peak.total / GIB:.1f} GiB"
        sheet.text(x, high - 12, said.replace(" plan", ""), size=10.5, bold=True, anchor="lm")
        for place, held in enumerate(one.held):
            kinds = {kind: getattr(held, kind) / GIB for kind in KIND_HUES}
            where = f"pipeline rank {place} of {one.plan.pp}" if one.plan.pp > 1 else "each rank"
            rows = [("", f"{name}, {where}")]
            rows += [(KINDS[kind], f"{plain(gib)} GiB") for kind, gib in kinds.items() if gib > 0.005]
            with sheet.about([*rows, ("together", f"{plain(sum(kinds.values()))} of {plain(limit)} GiB")]):
                y = base
                for kind, gib in kinds.items():
                    fill, edge = _tint(KIND_HUES[kind])
                    y -= gib * scale
                    if gib * scale > 0.4:
                        box = (x + place * each + 1, y, max(each - 2, 0.8), gib * scale)
                        sheet.box(*box, fill=fill, edge=edge if each > 8 else None, line=0.8)
            if place % math.ceil(18 / each) == 0:
                said = str(place) if one.plan.pp > 1 else "each"
                sheet.text(x + (place + 0.5) * each, base + 10, said, size=10, fill=DIM)
        dashes(sheet, x, x + wide, base - limit * scale)
    there = {kind for kind in KIND_HUES for one in rivals for held in one.held if getattr(held, kind) / GIB > 0.005}
    keys = [Key(KINDS[kind], *_tint(number)) for kind, number in KIND_HUES.items() if kind in there]
    draw_legend(sheet, keys, 0, base + 27, WIDTH)


def _ring(sheet: Scene, x: float, y: float, radius: float, edge: str, fill: Colour | None = None, line: float = 1
          ) -> None:  # fmt: skip
    sheet.box(x - radius, y - radius, 2 * radius, 2 * radius, fill=fill, edge=edge, radius=radius, line=line)


def _tint(index: int) -> tuple[Colour, Colour]:
    """(fill, outline) of a hue; -1 is computing, -2 waiting."""
    return (HATCH, DIM) if index == -2 else (mix(hue(index), 0.55), hue(index))


def round_numbers(low: float, high: float) -> list[float]:
    """Two to nine round numbers from `low` to `high` for a logarithmic axis; if there are none, the ends."""
    for digits in ((1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9), (1, 1.5, 2, 3, 4, 5, 7), (1, 2, 3, 5), (1,)):
        powers = range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 1)
        found = [digit * 10.0**power for power in powers for digit in digits if low <= digit * 10.0**power <= high]
        if 2 <= len(found) <= 9:
            return found
    return [low, high]
