"""The search: every possible plan on a number of GPUs, the best first, and why the others lost.

The time and memory of all plans are computed together, as `Block`s, by the formulas that forecast a single plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tplab.cost import Cluster, find
from tplab.errors import PlanError, ScheduleError
from tplab.forecast.block import Block, Way, tables
from tplab.forecast.classes import class_of
from tplab.forecast.clusters import USUAL
from tplab.forecast.model import Model, expert_tp
from tplab.forecast.plan import ALIASES, Plan, divisors, takes_virtual
from tplab.forecast.ranking import Plans
from tplab.forecast.stacks import Stack, find_stack
from tplab.forecast.step import OUTSIDE
from tplab.schedules import RULES

SCHEDULES = ("1f1b", *(name for name in RULES if name not in ("one_f_one_b", "interleaved_1f1b")))
"""All rules of tplab.schedules. "1f1b" includes interleaved 1F1B."""
VIRTUAL = 4
"""The most stages per rank."""
SLOW = {"v_half": 8, "v_min": 8, "hanayo": 8}
"""The most pipeline ranks for some schedules: they are built action by action, which takes too long for more ranks."""
ZEROS = (0, 1, 2, 3)
CHOICES = ("attention", "compiled", "state_dtype", "dtype", "grad_dtype", "dispatch", "skew")
SEQUENCE = 4096
"""The default number of tokens per sequence."""
EXACT = 100
"""The number of best plans whose pipelines are simulated."""


def plans(
    model: str | Model,
    cluster: str | Cluster = USUAL,
    *,
    gpus: int,
    batch: int,
    sequence: int = SEQUENCE,
    stack: str | Stack = "megatron",
    schedules: Sequence[str] = SCHEDULES,
    virtual: int = VIRTUAL,
    exact: int = EXACT,
    inside: bool = True,
    etp: Sequence[int | None] = (None,),
    **chosen: Any,
) -> Plans:
    """All plans on `gpus` ranks: every divisor for dp, tp, pp, cp and ep, every microbatch, schedule, number of virtual
    stages (up to `virtual`), recomputation and stage of ZeRO. Everything else is the stack's default.

        found = plans("llama3-70b", "h100-measured", gpus=256, batch=1024, sequence=8192, attention="flash3")
        found[0].plan, found[0].seconds, found.lost

    schedules   from SCHEDULES; "1f1b" includes the interleaved one. Schedules that are built action by action are
                searched for up to 8 pipeline ranks (SLOW)
    virtual     the most stages per rank: with many more, stages of one layer each would be the best, which few people
                train. Two and more are searched only if all stages have equally many layers, or would have if the
                embedding and the head were layers
    exact       how many of the best plans have their pipelines simulated, and so are in their true order. Of the
                others, one in twenty may take up to 1 % longer than its place suggests
    inside      only plans of a measured class (`tplab.forecast.classes`), on a measured cluster. The others have no
                interval
    etp         the values of `Plan.etp`, such as (None, 2, 4). Plans with a value that differs from the meaning of None
                are outside what was measured
    chosen      fields of `CHOICES`, which every plan has instead of the stack's defaults
    Raises PlanError, with the reasons, if no plan could train the model.
    """
    model, cluster, stack = Model.find(model), find(cluster), find_stack(stack)
    if set(schedules) - set(SCHEDULES):
        raise PlanError(f"schedules are {', '.join(schedules)}; search over {', '.join(SCHEDULES)}")
    if set(chosen) - set(CHOICES):
        raise PlanError(f"a search cannot be given {', '.join(sorted(chosen))}; it takes {', '.join(CHOICES)}")
    for name, number in {"gpus": gpus, "batch": batch, "sequence": sequence, "virtual": virtual}.items():
        if number < 1:
            raise PlanError(f"{name} is {number}; it must be 1 or more")
    if stack.balance == "parameters" and gpus > 1:
        raise PlanError(
            f"{stack.name} gives stages equally many parameters; finding such stages takes too long for every plan of "
            "a search: forecast the plans that you mean one by one, or search with megatron"
        )
    refused = Counter[str]()
    base = replace(Plan(), **_fields(stack, cluster) | chosen)
    stack = find_stack(stack, base)
    several = [replace(base, etp=one) for one in etp]
    every = (layout for one in several for layout in _layouts(model, one, gpus, batch, sequence, refused))
    layouts = [*dict.fromkeys(every)]
    if inside and cluster.fitted is not None:
        measured = [plan for plan in layouts if class_of(stack, model, plan, cluster)]
        if layouts and not measured:
            raise PlanError(
                f"none of {len(layouts)} layouts of this model on {gpus} GPUs with {stack.name} is of a class that was "
                "measured; --outside, or plans(..., inside=False), searches them, without intervals"
            )
        refused[OUTSIDE] += len(layouts) - len(measured)
        layouts = measured
    if not layouts:
        reasons = "; ".join(reason for reason, _ in refused.most_common(5))
        raise PlanError(
            f"no plan trains this model on {gpus} GPUs in batches of {batch} x {sequence} tokens: {reasons}"
        )
    every = blocks(model, layouts, cluster, batch, sequence, stack, schedules, virtual)
    found = Plans(every, refused, (model, cluster, batch, sequence, stack))
    found.time(exact)
    return found


def blocks(
    model: Model,
    layouts: Sequence[Plan],
    cluster: Cluster,
    batch: int,
    sequence: int,
    stack: Stack,
    schedules: Sequence[str] = SCHEDULES,
    virtual: int = VIRTUAL,
) -> list[Block]:
    """All plans of layouts of ranks, which differ in their axes only: a block for each number of pipeline ranks."""
    base = replace(layouts[0], dp=1, tp=1, pp=1, cp=1, ep=1, etp=None, sequence_parallel=False)
    known = tables(base, model, cluster, sequence, stack)
    recomputes = ("none", "full") if base.flash else ("none", "selective", "full")
    alike = dict[Any, list[Plan]]()
    for layout in layouts:
        alike.setdefault((layout.pp, 0 if stack.balance == "layers" else layout.tp), []).append(layout)
    found = list[Block]()
    for (pp, _), chosen in alike.items():
        sizes = [divisors(batch // layout.dp) for layout in chosen]
        pairs = np.repeat(np.arange(len(chosen)), [*map(len, sizes)]), np.concatenate(sizes)
        found.append(Block(chosen, *pairs, batch, known, recomputes, ZEROS, ways(model, pp, schedules, virtual)))
    return found


def ways(model: Model, pp: int, schedules: Sequence[str], virtual: int) -> list[Way]:
    """The schedules for `pp` ranks, each with its numbers of stages per rank."""
    if pp == 1:
        return [Way("1f1b", 1)]
    found = list[Way]()
    for name in schedules:
        rule = ALIASES.get(name, name)
        several = takes_virtual("interleaved_1f1b" if name == "1f1b" else rule)
        found += [Way(name, 1)] if name == "1f1b" or not several else []
        found += [Way(name, number) for number in range(2, virtual + 1)] if several else []
    return [way for way in found if pp <= SLOW.get(way.schedule, pp) and _is_even(model, pp, way)]


def _is_even(model: Model, pp: int, way: Way) -> bool:
    plan, layers = way.of(Plan(pp=pp)), model.layers
    stages = plan.num_stages
    try:
        return (stages <= pp or 0 in (layers % stages, (layers + 2) % stages)) and bool(plan.placement)
    except ScheduleError:  # an odd number of ranks, say
        return False


def _fields(stack: Stack, cluster: Cluster) -> dict[str, Any]:
    """The stack's defaults, without the fields that are searched."""
    searched = ("zero", "recompute", "schedule")
    return {name: value for name, value in stack.defaults_on(cluster).items() if name not in searched}


def _layouts(model: Model, base: Plan, gpus: int, batch: int, sequence: int, lost: Counter[str]) -> Iterator[Plan]:
    """The plans that differ in their axes; counts in `lost` those that are impossible."""
    for tp in divisors(gpus):
        for pp in divisors(gpus // tp):
            if pp > model.layers:
                lost[f"pp={pp} is more than {model.layers} layers"] += 1
                continue
            for cp in divisors(gpus // tp // pp):
                dp = gpus // tp // pp // cp
                for ep in divisors(dp * cp * tp) if model.experts else (1,):
                    is_shared = base.sequence_parallel and tp > 1
                    etp = None if base.etp == expert_tp(tp, ep) else base.etp  # the default
                    plan = replace(base, dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, etp=etp, sequence_parallel=is_shared)
                    why = plan.refusal(model, batch, sequence)
                    if why is None:
                        yield plan
                    else:
                        lost[why] += 1
