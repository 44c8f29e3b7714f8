"""The picture of simulated pipeline schedules: a scene, for PNG and SVG; and the data that the browser draws."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tplab.schedules import Schedule, Simulation
from tplab.schedules.action import CODE
from tplab.units import counted, plain
from tplab.widgets.paper.action import Sheet, draw_action
from tplab.widgets.paper.frame import MARGIN, draw_axis, draw_facts, draw_head, rests
from tplab.widgets.paper.legend import IDLE, Key, actions, draw_legend, legend_height
from tplab.widgets.paper.palette import ACCENT, DIM, HATCH, HUES, SOFT, WORK, hue, mix
from tplab.widgets.paper.scene import Scene, packed
from tplab.widgets.paper.wire import pack
from tplab.widgets.schedule.facts import PAIR, Fact, facts, meanings, paper_name

At = Callable[[float], float]
LEFT, WIDTH = 58, 860
RIGHT = 52  # room beside a rank's strip, for how much it holds
WRONG = HUES[5]  # above the memory limit


def lane_heights(num_ranks: int) -> tuple[float, float]:
    """The heights of a rank's bars and of the memory strip under them."""
    return (22, 10) if num_ranks <= 8 else (13, 6) if num_ranks <= 16 else (7, 3)


def draw(runs: Sequence[Simulation], limit: float | None = None, by: str = "kind") -> Scene:
    """One run, or several below each other on one time axis. limit: the most microbatches that a rank may hold. by:
    what the colours mean, "kind", "microbatch" or "stage"."""
    first, sheet, keys, room = runs[0], Scene(WIDTH, 0), legend(runs, limit, by), WIDTH - 2 * MARGIN
    draw_head(sheet, WIDTH, paper_name(first.schedule.name), about(first), badge(first))
    draw_legend(sheet, keys, MARGIN, 48, room)
    top = 54.0 + legend_height(keys, room, sheet.width_of)
    end = max(run.makespan for run in runs)
    most = max([float(run.peak_activations.max(initial=0.0)) for run in runs] + [limit or 0.0])
    for index, run in enumerate(runs):
        if len(runs) > 1:
            name = paper_name(run.schedule.name, f"schedule {index + 1}")
            x = MARGIN + sheet.text(MARGIN, top + 8, name, size=11, bold=True, anchor="lm") + 8
            sheet.text(x, top + 8, about_beside(run, first), size=10.5, fill=DIM, anchor="lm")
            top += 20
        bottom = draw_run(sheet, run, top, end, most, limit, by)
        # A pair's time is a formula rather than a figure; there is no room for formulas.
        draw_facts(sheet, [(*fact[:2], "") for fact in facts(run, limit) if fact.name != PAIR], bottom + 27)
        top = bottom + 68
    sheet.height = top + 12
    return sheet


def about(run: Simulation) -> str:
    """ "4 ranks, 8 microbatches, F : I : W = 1 : 1 : 1"."""
    schedule, costs = run.schedule, run.costs
    stages = "" if schedule.num_stages == schedule.num_ranks else f" · {schedule.num_stages} stages"
    text = f"{counted(schedule.num_ranks, 'rank')}{stages} · {counted(schedule.num_microbatches, 'microbatch')}"
    shares = (costs.forward, costs.input_grad, costs.weight_grad)
    if all(np.ndim(share) == 0 for share in shares) and costs.full_backward is None:
        text += " · F : I : W = " + " : ".join(f"{share:g}" for share in shares)
    if costs.stage_costs is not None:
        parts = [f"{part:g}" for part in costs.stage_costs]
        text += f" · stages cost {' : '.join(parts)}" if len(parts) <= 8 else " · stages of unequal cost"
    return text


def about_beside(run: Simulation, first: Simulation) -> str:
    """The text for one of several runs: how it differs from the first, which the picture's header describes."""
    text = about(run)
    return "" if text == about(first) else text


def badge(run: Simulation) -> str:
    return "modelled · unit times" if run.costs.unit == "steps" else "modelled · seconds"


def draw_run(
    sheet: Sheet, run: Simulation, top: float, end: float, most: float, limit: float | None, by: str, name: str = "rank"
) -> float:
    """Draw the lanes of a run from `top` on, and their axis. Returns its lower edge. name: the word for a lane."""
    schedule = run.schedule
    bars, strip = lane_heights(schedule.num_ranks)
    left, width = MARGIN + LEFT, WIDTH - 2 * MARGIN - LEFT - RIGHT
    begin = float(run.start.min(initial=0.0))

    def at(time: float) -> float:
        return left + (width * (time - begin) / end if end else 0.0)

    slots = max(1, int(schedule.slot.max(initial=0)))
    for rank in range(schedule.num_ranks):
        y = top + rank * (bars + strip + 5)
        if schedule.num_ranks <= 16 or rank % 8 == 0:
            sheet.text(left - 10, y + bars / 2, f"{name} {rank}", size=10.5, fill=DIM, anchor="rm")
        sheet.box(left, y, at(begin + run.makespan) - left, bars, fill=SOFT)
        sheet.hatch(left, y, at(begin + run.makespan) - left, bars, HATCH)
        for index in range(int(schedule.offsets[rank]), int(schedule.offsets[rank + 1])):
            _bar(sheet, run, index, at, y, bars, slots, by)
        _strip(sheet, run, rank, at, y + bars + 1.5, strip, most, limit)
        if strip >= 6:
            held = f"up to {plain(float(run.peak_activations[rank]))}"
            sheet.text(at(begin + run.makespan) + 6, y + bars + 1 + strip / 2, held, size=9.5, fill=DIM, anchor="lm")
    bottom = top + schedule.num_ranks * (bars + strip + 5)
    draw_axis(sheet, lambda time: at(begin + time), end, run.costs.unit, 8, left + width - 10, bottom + 7)
    return bottom


def half(schedule: Schedule, index: int, y: float, size: float) -> tuple[float, float]:
    """(y, height) of an action's bar in its lane: the two of a pair are one above the other."""
    if schedule.joined[index]:
        return y + size / 2, size / 2
    return y, size / 2 if index + 1 < len(schedule) and schedule.joined[index + 1] else size


def _bar(sheet: Sheet, run: Simulation, index: int, at: At, y: float, size: float, slots: int, by: str) -> None:
    schedule, (y, size) = run.schedule, half(run.schedule, index, y, size)
    kind = int(schedule.kind[index])
    x, right = at(float(run.start[index - int(schedule.joined[index])])), at(float(run.end[index]))
    label = schedule.action(index).label if kind <= CODE["W"] else "step" if kind == CODE["STEP"] else ""
    colour = None if by == "kind" else hue(int((schedule.stage if by == "stage" else schedule.microbatch)[index]))
    draw_action(sheet, kind, label, x, right, y, size, schedule.slot[index] / slots, colour)


def legend(runs: Sequence[Simulation], limit: float | None, by: str = "kind") -> list[Key]:
    """The legend of the picture. by: what the colours mean."""
    keys = actions(
        {int(kind) for run in runs for kind in np.unique(run.schedule.kind)}, None if by == "kind" else hue(0)
    )
    if by != "kind":
        keys.append(Key(f"one colour per {by}", sign="hues"))
    elif any(run.schedule.slot.max(initial=0) for run in runs):
        keys.append(Key("later stages of a rank are lighter", sign="later"))
    most = max([float(run.peak_activations.max(initial=0.0)) for run in runs] + [limit or 0.0])
    return [*keys, IDLE, Key(f"microbatches held, up to {plain(most)}", mix(WORK, 0.45), sign="strip")]


def _strip(
    sheet: Sheet, run: Simulation, rank: int, at: At, y: float, size: float, most: float, limit: float | None
) -> None:
    """The memory of a rank over time, under its bars."""
    times, held = run.activations(rank)
    if len(times) < 2 or not most:
        return
    xs = [at(float(time)) for time in times] + [at(float(run.start.min()) + run.makespan)]
    corners = [(xs[1], y + size)]
    for index in range(1, len(times)):
        level = y + size * (1 - float(held[index]) / most)
        corners += [(xs[index], level), (xs[index + 1], level)]
    corners.append((corners[-1][0], y + size))
    sheet.area(corners, mix(DIM, 0.36))
    if limit is not None and limit < most:
        for index in range(1, len(times)):
            if held[index] > limit + 1e-9:
                a, b = y + size * (1 - float(held[index]) / most), y + size * (1 - limit / most)
                sheet.box(xs[index], a, xs[index + 1] - xs[index], b - a, fill=WRONG)
    if limit is not None:
        level = y + size * (1 - limit / most)
        sheet.line([(xs[0], level), (xs[-1], level)], ACCENT, 0.8)


def sentence(runs: Sequence[Simulation]) -> str:
    """One plain sentence, which replaces the picture if there is none."""
    said = [
        f"{run.schedule.name or 'a schedule'} on {counted(run.schedule.num_ranks, 'rank')} with "
        f"{counted(run.schedule.num_microbatches, 'microbatch')}: makespan {run.makespan:g}, "
        f"{100 * run.bubble_fraction:.1f}% idle, {held:g} microbatch{'es' * (held != 1)} held at most"
        for run in runs
        for held in [float(run.peak_activations.max(initial=0.0))]
    ]
    return "; beside it ".join(said) + "."


def moments(runs: Sequence[Simulation]) -> np.ndarray:
    """The times at which the playhead rests."""
    return rests(np.concatenate([run.end - run.start.min(initial=0.0) for run in runs]))


def board(runs: Sequence[Simulation], limit: float | None) -> bytes:
    """The data that the browser draws from; static/gantt.js reads it."""
    figures = [facts(run, limit) for run in runs]
    header, columns = charts(runs, limit, figures)
    said = meanings(fact for found in figures for fact in found)
    header |= {"about": about(runs[0]), "badge": badge(runs[0]), "meanings": said}
    return pack(header, {"times": moments(runs), **columns})


def charts(
    runs: Sequence[Simulation],
    limit: float | None,
    figures: Sequence[Sequence[Fact]],
    colours: Sequence[str] = ("kind", "microbatch", "stage"),
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Runs with their figures, and the legends for each meaning of colours, as a header and its columns."""
    keys = {by: legend(runs, limit, by) for by in colours}
    header, columns = packed([], [key for of in keys.values() for key in of])
    rest = iter(header.pop("legend"))
    header |= {
        "legends": {by: [next(rest) for _ in of] for by, of in keys.items()},
        "title": paper_name(runs[0].schedule.name),
        "unit": runs[0].costs.unit,
        "limit": limit,
        "runs": [
            {
                "name": paper_name(run.schedule.name),
                "about": about_beside(run, runs[0]),
                "ranks": run.schedule.num_ranks,
                "makespan": run.makespan,
                "peak": float(run.peak_activations.max(initial=0.0)),
                "facts": found,
            }
            for run, found in zip(runs, figures)
        ],
    }
    for index, run in enumerate(runs):
        columns |= {f"{name}.{index}": column for name, column in columns_of(run).items()}
    return header, columns


def actions_of(schedule: Schedule) -> dict[str, np.ndarray]:
    columns = {name: getattr(schedule, name) for name in ("rank", "kind", "stage", "slot", "microbatch")}
    return columns | {"joined": schedule.joined.astype(np.int8)}


def columns_of(run: Simulation) -> dict[str, np.ndarray]:
    """A run as arrays that a chart draws: its actions, and what each rank holds."""
    schedule, begin = run.schedule, float(run.start.min(initial=0.0))
    stairs = [run.activations(rank) for rank in range(schedule.num_ranks)]
    start = np.where(schedule.joined, np.roll(run.start, 1), run.start)  # a pair is one span of time
    return {
        **actions_of(schedule),
        "start": start - begin,
        "end": run.end - begin,
        "waits": run.waits_for,
        "message": schedule.needs.message,
        "critical": np.array(run.critical_indices(), np.int32),
        "stair": np.cumsum([0, *(len(times) for times, _ in stairs)]),
        "stairTime": np.concatenate([times for times, _ in stairs]) - begin,
        "stairHeld": np.concatenate([held for _, held in stairs]),
    }
