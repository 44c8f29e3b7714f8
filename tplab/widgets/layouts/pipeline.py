"""The pipeline of a plan as it is drawn: only a few rounds, if it has many microbatches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tplab.forecast import Forecast
from tplab.schedules import Simulation
from tplab.units import plain
from tplab.widgets.schedule.payload import charts

ACTIONS = 3000
"""The most actions that are drawn, unless one microbatch per rank has more."""


def drawn(one: Forecast) -> Simulation | None:
    """The simulated pipeline of a plan, with up to 16 microbatches, or two per rank; None without a pipeline."""
    pp = one.plan.pp
    if pp == 1:
        return None
    return one.pipeline(max(pp, min(max(16, 2 * pp), ACTIONS // (2 * pp * one.plan.virtual))))


def about(one: Forecast, run: Simulation) -> str:
    """A description of what is drawn."""
    few, count = run.schedule.num_microbatches, one.plan.microbatches(one.batch)
    many = f"All {count} microbatches are drawn" if few == count else f"{few} of {count:,} microbatches are drawn"
    many += "" if few == count else ": the rounds in the middle are alike"
    first, last = (float(run.costs.durations(run.schedule)[_forward(run, stage)]) for stage in (0, -1))
    unequal = f"A forward pass takes {_ms(first)} in the first stage and {_ms(last)} in the last, which has the head"
    bubble = f"In the whole step, the busiest rank waits for {one.parts['bubble'] / one.seconds:.1%} of the time"
    return f"{many}. {unequal}. {bubble}."


def _forward(run: Simulation, stage: int) -> int:
    """The index of the first forward pass of a stage."""
    schedule = run.schedule
    return int(np.flatnonzero((schedule.kind == 0) & (schedule.stage == stage % schedule.num_stages))[0])


def _ms(seconds: float) -> str:
    return f"{plain(1e3 * seconds)} ms"


def board(one: Forecast, index: int) -> tuple[dict[str, Any] | None, Mapping[str, np.ndarray]]:
    """The data for static/gantt.js of the plan at this index: a header and its columns."""
    run = drawn(one)
    if run is None:
        return None, {}
    header, columns = charts([run], None, [[]], ["kind"])
    return header | {"plan": index, "about": about(one, run), "lane": "pp"}, columns
