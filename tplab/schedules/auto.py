"""An automatic scheduler: a good schedule for given costs and memory, or the optimal one for a small pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import islice, pairwise, product
from math import lcm

import numpy as np

from tplab.errors import ScheduleError, one_of
from tplab.schedules.action import B, F, I, W
from tplab.schedules.costs import Costs, memory_limits
from tplab.schedules.placement import Placement, counts, name_of, v_shape, wrapped
from tplab.schedules.rules.greedy import Durations, Policy, list_schedule
from tplab.schedules.rules.stamp import Block, blocks, v_half, v_min
from tplab.schedules.rules.streams import hanayo, zb_v
from tplab.schedules.rules.turns import gpipe, interleaved_1f1b, interleaved_zb, looped_bfs, one_f_one_b, zb_h1, zb_h2
from tplab.schedules.schedule import Schedule, row
from tplab.schedules.simulate import simulate
from tplab.schedules.simulation import peak_activations

_POLICIES = [Policy(*choice) for choice in product((True, False), (True, False), (0.0, 0.5, 1.0))]

_MANY, _MOST = 20_000, 250_000
"""Numbers of actions. Each guess places them one by one, in Python. Above the first number there are fewer guesses, so
that an answer takes seconds; above the second, `auto_schedule` raises."""


def auto_schedule(
    ranks: int,
    microbatches: int,
    costs: Costs | None = None,
    *,
    memory_limit: float | Sequence[float] | None = None,
    placement: str | Placement = "linear",
    virtual_stages: int = 2,
    split_backward: bool = True,
    objective: str = "makespan",
    solver: str = "heuristic",
    seconds: float = 10.0,
) -> Schedule:
    """A good schedule for these costs that stays within the memory limit.

    costs           as for `simulate`; F = I = W = 1 by default
    memory_limit    the most microbatches whose activations a rank may hold (one figure, or one per rank)
    placement       "linear", "v", "wrapped" (with `virtual_stages` per rank), or a placement
    split_backward  whether the backward may be split into I and W
    objective       "makespan"; or "span", if each rank takes its optimizer step as soon as it is done
    solver          "heuristic"; "quick", its first guesses, for an immediate answer; or "exact", proven optimal, for
                    small pipelines (needs the extra package ortools)
    seconds         how long the exact solver may search; if that is too short, the schedule's name says so

    The heuristic tries the known rules that fit, building blocks stamped and squeezed into the limit, and list
    scheduling with several sets of preferences, and returns the best, which is the same every time. On small
    pipelines the result is within a few per cent of the proven optimum, and usually equal to it. For more than 20,000
    actions (80 ranks x 80 microbatches) it makes fewer guesses.
    Raises ScheduleError if no schedule fits, or if there would be more than 250,000 actions.
    """
    ranks, microbatches = counts(ranks=ranks, microbatches=microbatches)
    costs = costs or Costs()
    held = _placement(placement, ranks, virtual_stages)
    one_of("objective", objective, ("makespan", "span"), ScheduleError)
    one_of("solver", solver, ("heuristic", "quick", "exact"), ScheduleError)
    _refuse_too_many(held, microbatches, split_backward)
    virtual = sum(map(len, held)) / ranks
    limits = memory_limits(memory_limit, ranks)
    slots = [len(stages) * microbatches if np.isinf(limit) else int(limit * virtual + 1e-9)
             for stages, limit in zip(held, limits)]  # fmt: skip
    for rank, (stages, slot) in enumerate(zip(held, slots)):
        if slot < len(stages):
            raise ScheduleError(
                f"rank {rank} may hold {limits[rank]:g} microbatches and has {len(stages)} stages; even one microbatch "
                f"needs {len(stages) / virtual:g}: raise the memory limit"
            )

    candidates = _candidates(held, microbatches, costs, slots, split_backward, quick=solver == "quick")
    if solver != "exact":
        return min(candidates, key=lambda schedule: _score(schedule, costs, objective)).named("auto")
    alike = (schedule for schedule in candidates if schedule.splits_backward == split_backward)
    return solve(min(alike, key=lambda schedule: _score(schedule, costs, objective)), costs, slots, objective, seconds)


def _num_actions(held: Placement, microbatches: int, split: bool) -> int:
    return sum(map(len, held)) * microbatches * (3 if split else 2)


def _refuse_too_many(held: Placement, microbatches: int, split: bool) -> None:
    actions = _num_actions(held, microbatches, split)
    if actions > _MOST:
        fewer = _MOST // _num_actions(held, 1, split)
        less = f"take at most {fewer:,} microbatches, since the steady state in between only repeats" if fewer else ""
        ways = [less, "take a rule, such as zb_h1 or one_f_one_b, which makes a schedule of this size at once"]
        raise ScheduleError(
            f"auto_schedule would place {actions:,} actions ({len(held):,} ranks x {microbatches:,} microbatches) one "
            f"by one, several times over; it takes at most {_MOST:,}: " + "; or ".join(way for way in ways if way)
        )


def _score(schedule: Schedule, costs: Costs, objective: str) -> tuple[float, float]:
    run = simulate(schedule, costs)
    return (run.makespan, run.span) if objective == "makespan" else (run.span, run.makespan)


def _candidates(
    held: Placement, microbatches: int, costs: Costs, slots: Sequence[int], split: bool, quick: bool
) -> Iterator[Schedule]:
    """Schedules that fit into `slots` stage activations: from rules, building blocks and list scheduling."""
    durations = _durations(held, microbatches, costs, split)
    many = _num_actions(held, microbatches, split) > _MANY
    chooses = any(len(stages) > 1 for stages in held)  # between a later stage and an earlier one
    for policy in _POLICIES:
        is_usual = policy.backward_first and policy.deep_first
        if not (policy.deep_first or chooses) or ((quick or many) and not is_usual):
            continue
        yield Schedule(list_schedule(held, microbatches, durations, slots, split, policy), held)
    known = [rule for rule in _rules(held, microbatches, split) if _fits(rule, slots)]
    yield from known
    if not split:
        return
    split_rules = [rule for rule in known if rule.splits_backward]
    if many:
        split_rules = sorted(split_rules, key=lambda rule: simulate(rule, costs).makespan)[:1]
    plans = [_plan(rule) for rule in split_rules]
    if quick:
        for plan in plans[-1:]:
            yield Schedule(list_schedule(held, microbatches, durations, slots, True, Policy(), plan), held)
        return
    if name_of(held) != "custom" and not (many and plans):
        best = _best_blocks(held, microbatches, costs, slots, tries=4 if many else 16)[: 1 if many else 4]
        plans += [block.squeezed(microbatches, slots)[0] for block in best]
    for plan, patience in product(plans, (0.0, 0.5, 1.0)):
        policy = Policy(patience=patience)
        yield Schedule(list_schedule(held, microbatches, durations, slots, True, policy, plan), held)


def _rules(held: Placement, microbatches: int, split: bool) -> list[Schedule]:
    """The known rules for this placement."""
    ranks, kind = len(held), name_of(held)
    known: dict[str, list[Callable[..., Schedule]]] = {
        "linear": [gpipe, one_f_one_b, zb_h1, zb_h2],
        "V": [zb_v, v_half, v_min],
        "wrapped": [interleaved_1f1b, looped_bfs, interleaved_zb],
    }
    more = {"virtual_stages": len(held[0])} if kind == "wrapped" else {}
    made = [rule(ranks, microbatches, **more) for rule in known.get(kind, [])]
    if kind in ("V", "wave") and len(held[0]) % 2 == 0:
        made.append(hanayo(ranks, microbatches, len(held[0])))
    return [schedule for schedule in made if split or not schedule.splits_backward]


def _best_blocks(held: Placement, microbatches: int, costs: Costs, slots: Sequence[int], tries: int) -> list[Block]:
    """`tries` blocks, those that do best on a few microbatches first; they also do best on many."""
    few = min(microbatches, 2 * len(held))
    durations, tried = _durations(held, few, costs, True), []
    for block in islice(blocks(held, slots), 60):
        try:
            schedule = block.schedule(few, slots, durations)
        except ScheduleError:  # holds more than its slope promised
            continue
        tried.append((simulate(schedule, costs).makespan, len(tried), block))
        if len(tried) == tries:
            break
    return [block for *_, block in sorted(tried)]


def _plan(schedule: Schedule) -> list[list[tuple[int, int, int]]]:
    """The order of everything but W on each rank."""
    steps = list(zip(schedule.kind.tolist(), schedule.stage.tolist(), schedule.microbatch.tolist()))
    return [[step for step in steps[row] if step[0] != W] for row in schedule.rows]


def _fits(schedule: Schedule, slots: Sequence[int]) -> bool:
    return bool(np.all(peak_activations(schedule) * schedule.stages_per_rank <= np.asarray(slots) + 1e-9))


def _durations(held: Placement, microbatches: int, costs: Costs, split: bool) -> Durations:
    """The costs in the form that list scheduling needs: one figure per stage, the mean over the microbatches."""
    k = np.arange(microbatches)
    kinds = (F, I, W) if split else (F, B)
    rows = [np.concatenate([row(kind, stage, k) for kind in kinds for stage in stages]) for stages in held]
    template = Schedule(rows, held)
    duration = costs.durations(template)

    def mean(kind: int) -> list[float]:
        chosen = template.kind == kind
        return (np.bincount(template.stage[chosen], duration[chosen], template.num_stages) / microbatches).tolist()

    carrying = float(costs.carrying(template).max(initial=0.0))
    return Durations(mean(F), mean(I if split else B), mean(W), costs.transfer + carrying)


def _placement(placement: str | Placement, ranks: int, virtual_stages: int) -> Placement:
    if not isinstance(placement, str):
        held = tuple(tuple(stages) for stages in placement)
        if (
            sorted(stage for stages in held for stage in stages) != list(range(sum(map(len, held))))
            or len(held) != ranks
        ):
            raise ScheduleError(f"a placement for {ranks} ranks names every stage once; {held} does not")
        return held
    if placement not in ("linear", "v", "wrapped"):
        raise ScheduleError(f"the placement is 'linear', 'v', 'wrapped' or one tuple per rank, not {placement!r}")
    return v_shape(ranks) if placement == "v" else wrapped(ranks, 1 if placement == "linear" else virtual_stages)


# --- the proven optimal schedule, by constraint programming -----------------------------------------------------------


def solve(start: Schedule, costs: Costs, slots: Sequence[int], objective: str, seconds: float) -> Schedule:
    """The best order of `start`'s actions on its ranks, with at most `slots` stage activations on each, found by
    OR-Tools CP-SAT, an extra package.

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
        start.crosses(message),
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
    for rank, rows in enumerate(start.rows):
        indices = range(rows.start, rows.stop)
        model.add_no_overlap([model.new_fixed_size_interval_var(begin[x], int(lasts[x]), f"work {x}") for x in indices])
        held = []
        for index in indices:
            if start.kind[index] == F:
                gone = end[lets_go[start.stage[index], start.microbatch[index]]]
                length = model.new_int_var(0, horizon, f"life {index}")
                held.append(model.new_interval_var(begin[index], length, gone, f"held {index}"))
        model.add_cumulative(held, [1] * len(held), int(slots[rank]))

    longest = model.new_int_var(0, horizon, "longest")
    for rank, rows in enumerate(start.rows):
        indices = range(rows.start, rows.stop)
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
    common = lcm(*(fraction.denominator for fraction in denominators))
    exact = all(abs(float(f) - x) < 1e-12 for f, x in zip(denominators, np.unique(amounts)))
    return common if exact and common <= 10_000 else max(1, round(10_000 / max(float(amounts.max()), 1e-9)))
