"""The time of what happens once per step: sending gradients and parameters, and the optimizer."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from tplab.cost import Cluster
from tplab.forecast.layers import Layer, from_memory
from tplab.forecast.messages import over_cards, price, ranks_along
from tplab.forecast.model import Model
from tplab.forecast.plan import ITEMSIZE, Plan
from tplab.forecast.stacks import Stack
from tplab.forecast.stages import held_parameters, stages_on
from tplab.forecast.traffic import step_traffic


class Once(NamedTuple):
    """Seconds of one rank outside the layers: sending all gradients, sending all parameters, and its optimizer.

    first    ZeRO 3: the messages that nothing hides, the first layer's parameters and the last gradients
    hidden   the largest share of gradients that can be hidden: the last bucket never is
    """

    gradients: Any = 0.0
    parameters: Any = 0.0
    optimizer: Any = 0.0
    first: Any = 0.0
    hidden: Any = 0.0


@lru_cache(maxsize=1 << 14)
def once_seconds(model: Model, plan: Plan, place: int, cluster: Cluster, stack: Stack) -> Once:
    """The times of a rank at this place of its pipeline.

    Gradients and parameters are sent in buckets like torch's; with ZeRO 3, layer by layer.
    """
    plan = stack.cut(plan)
    held, stages = held_parameters(model, plan, place, stack), stages_on(model, plan, place)
    units = 1 + sum(stage.layers for stage in stages)
    if plan.zero == 3:
        cluster = over_cards(cluster, stack.cards)
    sums, most = {"gradients": 0.0, "parameters": 0.0, "tied": 0.0}, 1
    for one in step_traffic(model, plan, 1, place, stack):
        if one.part in sums and one.phase in ("step", "backward"):
            ranks = ranks_along(plan, "pp")[:: plan.pp - 1] if one.axis == "pp" else ranks_along(plan, "dp", one.ranks)
            buckets = units if plan.zero == 3 else max(1, round(one.bytes / stack.bucket))
            most = max(most, buckets)
            sums[one.part] += one.count * buckets * price(cluster, one.op, one.bytes / buckets, ranks).seconds
    kept = held.dense / plan.copies + held.experts / plan.expert_copies if plan.zero else held.total
    grad, size, state = ITEMSIZE[plan.grad_dtype], plan.kept_size, ITEMSIZE[plan.state_dtype or "float32"]
    # AdamW reads the gradient, reads and writes both moments and the parameter, and writes its narrower copy, if any
    moved = grad + 4 * state + 2 * max(size, state) + size * (size < state)
    optimizer = from_memory(cluster, kept * moved + 2 * grad * held.total) + sums["tied"]
    gradients, parameters = sums["gradients"], sums["parameters"]
    if plan.zero < 3:
        has_two_ways = any(stage.share < 1 for stage in stages)  # each waits for its twin's gradients
        can_hide = plan.overlap and not has_two_ways
        return Once(gradients, parameters, optimizer, hidden=min(stack.hidden[1], 1 - 1 / most) * can_hide)
    again = stack.gathers == 3 and plan.recompute == "full"
    early = stack.gathers == 2 or (stack.plain and not again)
    if not (early and plan.overlap):  # layers are gathered only when they are needed
        hidden = stack.hidden[1] if plan.overlap and not stack.plain else 0.0
        return Once(gradients, (1.5 if again else 1) * parameters, optimizer, hidden=hidden)
    return Once(gradients, parameters, optimizer, (gradients + parameters) / units, stack.hidden[1])


def at_end(plan: Plan, busy: Layer, once: Once, count: Any) -> tuple[Any, Any]:
    """(gradients and parameters that are not hidden, optimizer) in one step."""
    gradients, parameters = once.gradients, once.parameters
    if plan.zero < 3:
        late = gradients - np.minimum(busy.backward, once.hidden * gradients)
        return (count if plan.zero == 2 else 1) * late + parameters, once.optimizer
    sent = gradients + 2 * parameters
    late = np.maximum(0.0, parameters - busy.forward) + np.maximum(0.0, gradients + parameters - busy.backward)
    early = np.minimum(late + once.first, sent)
    needed = sent - np.minimum(busy.forward + busy.backward, once.hidden * sent)
    return count * np.where(np.equal(once.first, 0), needed, early), once.optimizer
