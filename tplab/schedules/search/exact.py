"""The proven optimal schedule of a small pipeline, by constraint programming (OR-Tools CP-SAT, an extra package)."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

import numpy as np

from tplab.errors import ScheduleError
from tplab.schedules.action import B, F, I, W
from tplab.schedules.costs import Costs
from tplab.schedules.rules.row import row
from tplab.schedules.schedule import Schedule
from tplab.schedules.simulate import simulate


def solve(start: Schedule, costs: Costs, slots: Sequence[int], objective: str, seconds: float) -> Schedule:
    """The best order of `start`'s actions on its ranks, with at most `slots` stage activations on each.

    Its name is "exact" if it is proven optimal, and otherwise says how far the proof got. `start` is the first guess.

    Each action is an interval that starts once its input has arrived, and the intervals of one rank do not overlap. A
    stage's activations for one microbatch are an interval from its F to its W (or B); a rank may hold `slots` of them
    at once. All microbatches are alike, so each stage takes them in order.
    """
    try:
        from ortools.sat.python import cp_model  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ScheduleError(
            "the exact solver needs OR-Tools: pip install ortools; or use solver='heuristic'"
        ) from error
    if costs.links != "free":
        raise ScheduleError("the exact solver does not know links that queue; use links='free', or solver='heuristic'")

    run = simulate(start, costs)
    durations, message = costs.durations(start), start.needs.message
    travel = np.where(
        (message >= 0) & (start.rank[np.maximum(message, 0)] != start.rank),
        costs.transfer + costs.carrying(start)[np.maximum(message, 0)],
        0.0,
    )
    scale = _scale(np.concatenate([durations, travel]))
    lasts, lags = (durations * scale).round().astype(int), (travel * scale).round().astype(int)
    horizon = int(lasts.sum() + lags.sum())

    model = cp_model.CpModel()
    begin = [model.new_int_var(0, horizon, f"start {index}") for index in range(len(start))]
    end = [begin[index] + int(lasts[index]) for index in range(len(start))]
    for index in range(len(start)):
        model.add_hint(begin[index], round(float(run.start[index]) * scale))
        if message[index] >= 0:
            model.add(begin[index] >= end[message[index]] + int(lags[index]))
        if start.needs.own[0][index] >= 0:
            model.add(begin[index] >= end[start.needs.own[0][index]])
    for kinds in ((F,), (B, I), (W,)):
        for stage in range(start.num_stages):
            rows = np.flatnonzero(np.isin(start.kind, kinds) & (start.stage == stage))
            rows = rows[np.argsort(start.microbatch[rows])].tolist()
            for one, next_one in pairwise(rows):
                model.add(begin[next_one] >= end[one])
    lets_go = np.where(start.needs.weight >= 0, start.needs.weight, start.needs.backward)
    for rank in range(start.num_ranks):
        indices = range(int(start.offsets[rank]), int(start.offsets[rank + 1]))
        model.add_no_overlap([model.new_fixed_size_interval_var(begin[x], int(lasts[x]), f"work {x}") for x in indices])
        held = []
        for index in indices:
            if start.kind[index] == F:
                gone = end[lets_go[start.stage[index], start.microbatch[index]]]
                length = model.new_int_var(0, horizon, f"life {index}")
                held.append(model.new_interval_var(begin[index], length, gone, f"held {index}"))
        model.add_cumulative(held, [1] * len(held), int(slots[rank]))

    longest = model.new_int_var(0, horizon, "longest")
    for rank in range(start.num_ranks):
        indices = range(int(start.offsets[rank]), int(start.offsets[rank + 1]))
        first = model.new_int_var(0, horizon, f"first {rank}")
        if objective == "span":
            model.add_min_equality(first, [begin[index] for index in indices])
        for index in indices:
            model.add(longest >= end[index] - (first if objective == "span" else 0))
    model.minimize(longest)

    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = max(seconds, 0.1)
    solver.parameters.num_workers = 8
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise ScheduleError(
            f"no schedule was found within {seconds:g} s; allow more seconds, or use solver='heuristic'"
        )
    times = np.array([solver.value(at) for at in begin])
    columns = row(start.kind, start.stage, start.microbatch)
    rows = []
    for a, b in zip(start.offsets[:-1], start.offsets[1:]):
        # W may cost nothing: actions that start together keep the order F, I, W within a microbatch
        rows.append(columns[a:b][np.lexsort((start.microbatch[a:b], start.kind[a:b], lasts[a:b] > 0, times[a:b]))])
    proven = status == cp_model.OPTIMAL
    name = "exact" if proven else f"exact (not proven; nothing below {solver.best_objective_bound / scale:g})"
    return Schedule(rows, start.placement, name)


def _scale(amounts: np.ndarray) -> int:
    """A factor that makes all amounts whole numbers or, if they are not simple fractions, one large enough for
    rounding to do little harm."""
    denominators = [Fraction(float(x)).limit_denominator(1000) for x in np.unique(amounts)]
    common = int(np.lcm.reduce([fraction.denominator for fraction in denominators], dtype=np.int64))
    exact = all(abs(float(f) - x) < 1e-12 for f, x in zip(denominators, np.unique(amounts)))
    return common if exact and common <= 10_000 else max(1, round(10_000 / max(float(amounts.max()), 1e-9)))
