"""The picture of simulated pipeline schedules: a scene, for PNG and SVG; and the data that the browser draws."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tplab.schedules import Simulation
from tplab.units import counted, plain
from tplab.widgets.paper.frame import MARGIN, draw_facts, draw_head, rests
from tplab.widgets.paper.legend import IDLE, Key, actions, draw_legend, legend_height
from tplab.widgets.paper.palette import WORK, hue, mix
from tplab.widgets.paper.scene import Scene
from tplab.widgets.paper.wire import pack
from tplab.widgets.schedule import lanes
from tplab.widgets.schedule.facts import PAIR, facts, meanings, paper_name
from tplab.widgets.schedule.lanes import COLOURS, peak

WIDTH = 860


def draw(runs: Sequence[Simulation], limit: float | None = None, by: str = "kind") -> Scene:
    """One run, or several below each other on one time axis. limit: the most microbatches that a rank may hold. by:
    what the colours mean, "kind", "microbatch" or "stage"."""
    first, sheet, keys, room = runs[0], Scene(WIDTH, 0), legend(runs, limit, by), WIDTH - 2 * MARGIN
    draw_head(sheet, WIDTH, paper_name(first.schedule.name), about(first), badge(first))
    draw_legend(sheet, keys, MARGIN, 48, room)
    top = 54.0 + legend_height(keys, room, sheet.width_of)
    drawn = lanes.draw(runs, limit, room, [by], beside=[about_beside(run, first) for run in runs])
    drawn.paint(sheet, 0, MARGIN, top)
    top += drawn.height + 14
    for index, run in enumerate(runs):
        if len(runs) > 1:
            sheet.text(
                MARGIN, top, paper_name(run.schedule.name, f"schedule {index + 1}"), size=11, bold=True, anchor="lm"
            )
            top += 18
        # A pair's time is a formula rather than a figure; there is no room for formulas.
        draw_facts(sheet, [(*fact[:2], "") for fact in facts(run, limit) if fact.name != PAIR], top)
        top += 40
    sheet.height = top
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


def legend(runs: Sequence[Simulation], limit: float | None, by: str = "kind") -> list[Key]:
    """The legend of the picture. by: what the colours mean."""
    keys = actions(
        {int(kind) for run in runs for kind in np.unique(run.schedule.kind)}, None if by == "kind" else hue(0)
    )
    if by != "kind":
        keys.append(Key(f"one colour per {by}", sign="hues"))
    elif any(run.schedule.slot.max(initial=0) for run in runs):
        keys.append(Key("later stages of a rank are lighter", sign="later"))
    most = max([*map(peak, runs), limit or 0.0])
    return [*keys, IDLE, Key(f"microbatches held, up to {plain(most)}", mix(WORK, 0.45), sign="strip")]


def sentence(runs: Sequence[Simulation]) -> str:
    """One plain sentence, which replaces the picture if there is none."""
    said = [
        f"{run.schedule.name or 'a schedule'} on {counted(run.schedule.num_ranks, 'rank')} with "
        f"{counted(run.schedule.num_microbatches, 'microbatch')}: makespan {run.makespan:g}, "
        f"{100 * run.bubble_fraction:.1f}% idle, {held:g} microbatch{'es' * (held != 1)} held at most"
        for run in runs
        for held in [peak(run)]
    ]
    return "; beside it ".join(said) + "."


def moments(runs: Sequence[Simulation]) -> np.ndarray:
    """The times at which the playhead rests."""
    return rests(np.concatenate([run.end - run.start.min(initial=0.0) for run in runs]))


def board(runs: Sequence[Simulation], limit: float | None) -> bytes:
    """The data that the browser draws from; static/pipeline.js reads it."""
    figures, first, keys = [facts(run, limit) for run in runs], runs[0], {by: legend(runs, limit, by) for by in COLOURS}
    beside = [about_beside(run, first) for run in runs]
    drawn = lanes.draw(runs, limit, WIDTH, beside=beside)
    header, columns = lanes.sent(drawn, runs, limit, [key for of in keys.values() for key in of])
    rest = iter(header.pop("legend"))
    header |= {
        "legends": {by: [next(rest) for _ in of] for by, of in keys.items()},
        "title": paper_name(first.schedule.name),
        "about": about(first),
        "badge": badge(first),
        "meanings": meanings(fact for found in figures for fact in found),
    }
    for said, run, text, found in zip(header["runs"], runs, beside, figures):
        said |= {"name": paper_name(run.schedule.name), "about": text, "facts": found}
    return pack(header, {"times": moments(runs), **columns})
