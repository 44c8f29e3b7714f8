"""Simulated schedules as lanes: for each rank its actions, and what it holds in memory below them; a scene over time.

Position 1 of the playhead shows the critical path.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tplab.schedules import Schedule, Simulation
from tplab.schedules.action import CODE
from tplab.units import counted, plain, time_text
from tplab.widgets.paper.action import look_of, texts_of
from tplab.widgets.paper.lanes import draw_chain, draw_lane, lanes
from tplab.widgets.paper.legend import Key
from tplab.widgets.paper.palette import ACCENT, DIM, HUES, WORK, hue, mix
from tplab.widgets.paper.scene import Scene, packed
from tplab.widgets.schedule.facts import paper_name

TOP, TITLE, AXIS, GAP, RIGHT = 4, 22, 22, 5, 62
COLOURS = ("kind", "microbatch", "stage")


def draw(
    runs: Sequence[Simulation], limit: float | None, width: float, colours: Sequence[str] = COLOURS,
    tall: float = math.inf, lane: str = "rank", beside: Sequence[str] = (),
) -> Scene:  # fmt: skip
    """Runs below each other, on one time axis. limit: the most microbatches that a rank may hold. tall: the height that
    lanes may take. lane: the word for one. beside: a text after the name of each run."""
    ranks, several = max(run.schedule.num_ranks for run in runs), len(runs) > 1
    bar, strip = next(
        (sizes for most, sizes in ((4, (24, 14)), (8, (24, 11)), (12, (17, 8))) if ranks <= most), (13, 6)
    )
    room, gap = tall / ranks, GAP  # for a lane
    if bar + strip + gap > room:
        gap, strip = 3 if room > 12 else 1, max(1, int(room / 4))
        bar = max(2, int(room) - gap - strip)
    each = TITLE * several + AXIS
    height = TOP + sum(each + run.schedule.num_ranks * (bar + strip + gap) for run in runs)
    unit = runs[0].costs.unit
    names = [paper_name(run.schedule.name, f"schedule {place + 1}") for place, run in enumerate(runs)]
    said = [f"{name} on {counted(run.schedule.num_ranks, 'rank')}, {time_text(run.makespan, unit)} long"
            for name, run in zip(names, runs)]  # fmt: skip
    sheet = lanes(width, height, "; ".join(said), 0, max(run.makespan for run in runs), RIGHT, ranks, unit)
    most, y = max([*map(peak, runs), limit or 0.0]) or 1.0, TOP
    first = 0, 2 * sum(run.schedule.num_ranks for run in runs)  # keys of lanes, and of actions after all lanes
    for place, run in enumerate(runs):
        if several:
            x = sheet.text(0, y + TITLE / 2, names[place], size=11.5, bold=True, anchor="lm") + 8
            sheet.text(x, y + TITLE / 2, beside[place] if beside else "", size=10.5, fill=DIM, anchor="lm")
            y += TITLE
        _draw_run(sheet, run, y, (bar, strip, gap), lane, limit, most, colours, first)
        first = first[0] + 2 * run.schedule.num_ranks, first[1] + len(run.schedule)
        y += run.schedule.num_ranks * (bar + strip + gap)
        sheet.axes.append(y)
        y += AXIS
    return sheet


def peak(run: Simulation) -> float:
    """The most microbatches that a rank holds."""
    return float(run.peak_activations.max(initial=0.0))


def spans(run: Simulation) -> tuple[np.ndarray, np.ndarray]:
    """When each action starts and ends, from the first start; a pair is one span of time."""
    begin = float(run.start.min(initial=0.0))
    return np.where(run.schedule.joined, np.roll(run.start, 1), run.start) - begin, run.end - begin


def halves(schedule: Schedule, size: float) -> tuple[np.ndarray, np.ndarray]:
    """Of each action, how far its bar is below the top of its lane, and its height: the two of a pair are one above the
    other."""
    is_second = schedule.joined
    is_first = np.append(is_second[1:], False)[: len(schedule)]
    return np.where(is_second, size / 2, 0), np.where(is_first | is_second, size / 2, size)


_WORDS = ("F", "B", "I", "W", "send F", "receive F", "send B", "receive B",
          "gradient sum", "unshard", "reshard", "step")  # fmt: skip
"""The kinds of actions, in the order of their codes."""


def labels_of(schedule: Schedule) -> list[str]:
    """Of each action, its text without its stage: "F3", "gradient sum"."""
    columns = zip(schedule.kind.tolist(), schedule.microbatch.tolist())
    return [_WORDS[kind] if microbatch < 0 else f"{_WORDS[kind]}{microbatch}" for kind, microbatch in columns]


def names_of(schedule: Schedule) -> list[str]:
    """Of each action, its text: "F3 of stage 2"."""
    columns = zip(labels_of(schedule), schedule.stage.tolist())
    return [label if stage < 0 else f"{label} of stage {stage}" for label, stage in columns]


def _draw_run(
    sheet: Scene, run: Simulation, top: float, heights: tuple[float, float, float], lane: str, limit: float | None,
    most: float, colours: Sequence[str], first: tuple[int, int],
) -> None:  # fmt: skip
    """The lanes of one run from `top` on. heights: of bars, of the memory below them, and of the gap after that."""
    schedule, makespan, (size, strip, gap) = run.schedule, run.makespan, heights
    pitch, start, ranks = sum(heights), float(run.start.min(initial=0.0)), schedule.num_ranks
    strips = math.ceil(11 / pitch)
    for rank in range(ranks):
        y = top + rank * pitch
        draw_lane(sheet, rank, rank, y, pitch, size, makespan, size, lane)
        times, held = run.activations(rank)
        held_most = f"up to {plain(float(run.peak_activations[rank]))}" if rank % strips == 0 else ""
        at = sheet.width - RIGHT + 6, y + size + 1.5 + strip / 2
        sheet.text(*at, held_most, size=9.5, fill=DIM, anchor="lm")
        with sheet.in_time():
            _draw_held(sheet, np.append(times - start, makespan), held, y + size + 1.5, strip, most, limit)
            for place, (low, tall) in enumerate(((y, size), (y + size, strip + gap))):
                with sheet.about((), key=first[0] + 2 * rank + place):
                    sheet.box(0, low, makespan, tall)
    begins, ends = spans(run)
    lows, talls = halves(schedule, size)
    places = np.stack([begins, top + schedule.rank * pitch + lows, ends - begins, talls], 1)
    tiers = (schedule.slot / max(1, schedule.slot.max(initial=0))).tolist()
    kinds, critical = schedule.kind.tolist(), run.critical_indices()
    texts = [texts_of(*one) for one in zip(kinds, labels_of(schedule), talls.tolist())]
    marks = np.array(sheet.marks_of(range(first[1], first[1] + len(schedule))), int)
    every = {}
    for by in colours:
        hues = (schedule.stage if by == "stage" else schedule.microbatch).tolist()
        tints = [None if by == "kind" and kind <= CODE["W"] else hue(of) for kind, of in zip(kinds, hues)]
        every[by] = [look_of(*one) for one in zip(kinds, talls.tolist(), tiers, tints)]

    def draw_bars(which: Sequence[int], marks: np.ndarray | int) -> None:
        few = {by: [looks[index] for index in which] for by, looks in every.items()}
        sheet.bars(places[which], few.pop(colours[0]), [texts[index] for index in which], marks, **few)

    with sheet.in_time():
        draw_bars(range(len(schedule)), marks)
        with sheet.during(0.5):
            for rank in range(ranks):
                sheet.veil(0, top + rank * pitch, makespan, size)
            draw_bars(critical, -1)
            draw_chain(sheet, places[critical].tolist())


def _draw_held(
    sheet: Scene, times: np.ndarray, held: np.ndarray, y: float, size: float, most: float, limit: float | None
) -> None:
    """The memory of a rank over time; above the limit it has another colour. times: one more than amounts held."""
    within = held if limit is None else np.minimum(held, limit)
    for low, high, fill in ((0 * held, within, mix(WORK, 0.45)), (within, held, HUES[5])):
        begin, span = times[:-1], np.diff(times)
        places = np.stack([begin, y + size * (1 - high / most), span, size * (high - low) / most], 1)
        places = places[(span > 0) & (high > low + 1e-9)]
        sheet.boxes(places, [fill] * len(places))
    if limit is not None:
        level = y + size * (1 - limit / most)
        sheet.line([(0, level), (float(times[-1]), level)], ACCENT, 1)


def sent(
    drawn: Scene, runs: Sequence[Simulation], limit: float | None, legend: Sequence[Key], lane: str = "rank"
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The lanes, and what their tooltips need, for static/gantt.js: a header and its columns."""
    header, columns = packed([drawn], legend)
    header |= {"unit": runs[0].costs.unit, "limit": limit, "lane": lane}
    header["runs"] = [
        {
            "names": names_of(run.schedule),
            "ranks": run.schedule.num_ranks,
            "makespan": run.makespan,
        }
        for run in runs
    ]
    for place, run in enumerate(runs):
        begin, (start, end) = float(run.start.min(initial=0.0)), spans(run)
        stairs = [run.activations(rank) for rank in range(run.schedule.num_ranks)]
        found = {
            "rank": run.schedule.rank,
            "kind": run.schedule.kind,
            "start": start,
            "end": end,
            "waits": run.waits_for,
            "message": run.schedule.needs.message,
            "stair": np.cumsum([0, *(len(times) for times, _ in stairs)]),
            "stairTime": np.concatenate([times for times, _ in stairs]) - begin,
            "stairHeld": np.concatenate([held for _, held in stairs]),
        }
        columns |= {f"{name}.{place}": column for name, column in found.items()}
    return header, columns
