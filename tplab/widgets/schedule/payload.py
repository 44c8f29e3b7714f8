"""Schedules as they are sent to the browser; `gantt` draws from this data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tplab.schedules import Schedule, Simulation
from tplab.widgets.paper.scene import packed
from tplab.widgets.paper.wire import pack
from tplab.widgets.schedule import still
from tplab.widgets.schedule.facts import Fact, facts, meanings, paper_name

MAX_STEPS = 400


def moments(runs: Sequence[Simulation]) -> np.ndarray:
    """The times at which the playhead rests: the start, and every moment at which an action ends; or, if those are too
    many, evenly spaced times."""
    ends = np.concatenate([run.end - run.start.min(initial=0.0) for run in runs])
    rounded = np.unique(np.round(ends, 9))
    last = float(rounded[-1]) if len(rounded) else 0.0
    if len(rounded) > MAX_STEPS:
        return np.linspace(0.0, last, MAX_STEPS + 1)
    rounded = rounded[rounded > 0]
    return np.concatenate([[0.0], rounded if len(rounded) else [last]])


def board(runs: Sequence[Simulation], limit: float | None) -> bytes:
    """The data that the browser draws from; static/gantt.js reads it."""
    figures = [facts(run, limit) for run in runs]
    header, columns = charts(runs, limit, figures)
    said = meanings(fact for found in figures for fact in found)
    header |= {"about": still.about(runs[0]), "badge": still.badge(runs[0]), "meanings": said}
    return pack(header, {"times": moments(runs), **columns})


def charts(
    runs: Sequence[Simulation],
    limit: float | None,
    figures: Sequence[Sequence[Fact]],
    colours: Sequence[str] = ("kind", "microbatch", "stage"),
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Runs with their figures, and the legends for each meaning of colours, as a header and its columns."""
    keys = {by: still.legend(runs, limit, by) for by in colours}
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
                "about": still.about_beside(run, runs[0]),
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
