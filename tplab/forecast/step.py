"""How long a training step takes, from its parts.

    layer      `tplab.forecast.layers`
    pipeline   the makespan of the plan's own schedule, simulated with each stage's times. The first stage also has the
               embedding, and the last one the final norm, the logits and the loss
    step       pipeline + gradients and parameters that are not hidden + optimizer + what the host does once per step

The layers' `factor` and `host` belong to a stack, and were fitted to published runs (`benchmarks.fit.steps`) on the
measured clock. On a data sheet they are left out, and the result is a bound. Besides, there are four rules for all
stacks and plans:

    overlap    two fifths of the messages of tensor, context and expert parallelism are hidden. Gradients are sent
               during the last microbatch's backward pass, and at most two fifths of their time are hidden
    ZeRO 1, 2  parameters are gathered after the optimizer, and nothing hides that
    ZeRO 3     parameters and gradients travel while layers compute, and what is longer counts; but for each microbatch
               nothing hides the first parameters and the last gradients
    once       a step costs the host what half a microbatch does
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from tplab.cost import Cluster
from tplab.forecast.layers import AXES, Layer, ends_seconds, layer_seconds, local
from tplab.forecast.messages import send_seconds
from tplab.forecast.model import Model
from tplab.forecast.once import at_end, once_seconds
from tplab.forecast.plan import Plan
from tplab.forecast.stacks import Stack, find_stack
from tplab.forecast.stages import Stage, stages_on
from tplab.schedules import Costs, Simulation, simulate

ONCE = 0.5
"""What a step costs the host once, as a part of what one microbatch costs it."""


@dataclass(frozen=True)
class Step:
    """A training step.

    seconds       from the first microbatch to the updated parameters
    parts         seconds by reason; they add up to `seconds`. "computing", "recompute", "tp", "cp", "ep" and "host" are
                  of the pipeline rank that has most to do. "bubble" is what it waits for, and "pp" how much of that is
                  due to messages; "dp" are gradients and parameters that are not hidden
    low, high     nine of ten of the measured steps that this was fitted to took between low and high; for mixtures of
                  experts, see `Stack.between`
    """

    seconds: float
    parts: Mapping[str, float]
    low: float
    high: float


def step(
    model: Model, plan: Plan, cluster: Cluster, batch: int, sequence: int, stack: str | Stack = "megatron"
) -> Step:
    """How long a step on `batch` sequences takes. Raises PlanError where the plan cannot train the model."""
    plan.check(model, batch, sequence)
    stack, key = on_cluster(find_stack(stack), cluster), local(plan)
    count = plan.microbatches(batch)
    layer = layer_seconds(model, key, cluster, sequence, stack)
    ends = ends_seconds(model, key, cluster, sequence, stack)
    held = [stages_on(model, plan, place) for place in range(plan.pp)]
    ranks = [_total(stages, layer, ends) for stages in held]
    busy = max(ranks, key=lambda rank: rank.forward + rank.backward)
    stages = {stage.number: _of_stage(stage, layer, ends) for rank in held for stage in rank}
    alone = pipeline_seconds(plan, stages, count, 0.0)
    together = pipeline_seconds(plan, stages, count, send_seconds(model, plan, cluster, sequence))
    after = [
        at_end(plan, rank, once_seconds(model, plan, place, cluster, stack), count)
        for place, rank in enumerate(ranks)
        if place in (0, plan.pp // 2, plan.pp - 1)
    ]
    dp, optimizer = max(after, key=sum)
    parts = {
        **{name: count * getattr(busy, name) for name in ("computing", "recompute", *AXES)},
        "bubble": alone - count * (busy.forward + busy.backward),
        "pp": together - alone,
        "dp": dp,
        "optimizer": optimizer,
        "host": count * busy.host + ONCE * stack.host * max(sum(stage.layers for stage in rank) for rank in held),
    }
    seconds = sum(parts.values())
    low, high = stack.between(model)
    return Step(seconds, parts, seconds * low, seconds * high)


def on_cluster(stack: Stack, cluster: Cluster) -> Stack:
    """The stack, without what was fitted to the measured clock where the cluster is a data sheet: that is a bound."""
    if cluster.fitted is not None:
        return stack
    return replace(stack, factor=1.0, host=0.0, low=1.0, high=math.inf)


def _of_stage(stage: Stage, layer: Layer, ends: tuple[Layer, Layer]) -> Layer:
    return layer.times(stage.layers).plus(*ends[:1] * stage.is_first, *ends[1:] * stage.is_last)


def _total(stages: Iterable[Stage], layer: Layer, ends: tuple[Layer, Layer]) -> Layer:
    """All stages of a rank, for one microbatch."""
    return Layer().plus(*(_of_stage(stage, layer, ends).times(stage.share) for stage in stages))


def pipeline_seconds(plan: Plan, stages: Mapping[int, Layer], count: int, send: float) -> float:
    """The makespan of the plan's schedule over `count` microbatches.

    It is simulated for some rounds. After these, every further microbatch takes what the busiest rank has to do.
    """
    if plan.pp == 1:
        return float(count * sum(stage.forward + stage.backward for stage in stages.values()))
    rounds = count // plan.pp
    few = count - max(0, rounds - 4) * plan.pp
    schedule, costs = plan.rule(few), _costs(stages, send)
    work = np.bincount(schedule.rank, costs.durations(schedule), plan.pp) / few
    return simulate(schedule, costs).makespan + (count - few) * float(work.max())


def pipeline(
    model: Model, plan: Plan, cluster: Cluster, batch: int, sequence: int, stack: Stack, most: int
) -> Simulation:
    """The plan's schedule with each stage's times, as `step` simulates it. Where there are over `most` microbatches,
    rounds of one per pipeline rank are left out."""
    stack, key = on_cluster(stack, cluster), local(plan)
    layer = layer_seconds(model, key, cluster, sequence, stack)
    ends = ends_seconds(model, key, cluster, sequence, stack)
    held = [stage for place in range(plan.pp) for stage in stages_on(model, plan, place)]
    costs = _costs(
        {stage.number: _of_stage(stage, layer, ends) for stage in held}, send_seconds(model, plan, cluster, sequence)
    )
    count = plan.microbatches(batch)
    left_out = min(-(-max(0, count - most) // plan.pp), (count - 1) // plan.pp)
    return simulate(plan.rule(count - left_out * plan.pp), costs)


def _costs(stages: Mapping[int, Layer], send: float) -> Costs:
    forward, backward, again = (
        np.array([getattr(stages[number], name) for number in range(len(stages))])
        for name in ("forward", "backward", "recompute")
    )
    inputs, weights = (backward + again) / 2, (backward - again) / 2  # all of recomputation is before I
    return Costs(forward, inputs, weights, send, full_backward=backward, unit="s")
