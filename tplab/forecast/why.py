"""Why: one sentence about a plan's main obstacle, and what would change it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from tplab.cost.chip import Chip
from tplab.forecast.memory import Held, peak_bytes, room
from tplab.forecast.model import Model
from tplab.forecast.plan import Plan
from tplab.forecast.stacks import Stack

GIB = 2**30
NAMES = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "the optimizer's states",
    "gathered": "gathered layers",
    "activations": "activations",
    "logits": "logits",
    "buffers": "buffers",
}
LOST = {
    "recompute": ("recomputation", "recomputing less, where memory allows it"),
    "tp": ("messages of tensor parallelism", "fewer tensor-parallel ranks"),
    "cp": ("messages of context parallelism", "fewer context-parallel ranks"),
    "ep": ("tokens on their way to experts", "experts shared by fewer ranks, of one node"),
    "pp": ("messages between stages", "fewer stages"),
    "bubble": ("the pipeline's bubble", "more microbatches, or more stages per rank"),
    "dp": ("gradients and parameters that are not hidden", "more tokens per rank, or fewer data-parallel ranks"),
    "optimizer": ("the optimizer", "dividing its states over more ranks"),
    "host": ("waiting for the host", "larger microbatches, or fewer tensor-parallel ranks"),
}


def it_takes_so_long(plan: Plan, parts: Mapping[str, float], held: Held, usable: float) -> str:
    """Where the time goes: "computing takes 71 % of the step, and most is lost to the pipeline's bubble, 12 %: ..."."""
    whole = sum(parts.values())
    lost = max(LOST, key=lambda name: parts.get(name, 0.0))
    room = f"{held.total / GIB:.1f} of {usable / GIB:.1f} GiB are in use"
    text = f"computing takes {parts.get('computing', 0.0) / whole:.0%} of the step"
    if parts.get(lost, 0.0) / whole < 0.01:
        return f"{text}, and {room}"
    name, way_out = LOST[lost]
    return f"{text}; most is lost to {name}, {parts[lost] / whole:.0%}: less with {way_out}; {room}"


def it_does_not_fit(
    model: Model, plan: Plan, chip: Chip, batch: int, sequence: int, stack: Stack, held: Sequence[Held]
) -> str:
    """Which rank holds what, and what would fit: "stage 0 holds 4 microbatches of 9.1 GiB; pp 8 or ... would fit"."""
    place = max(range(len(held)), key=lambda place: held[place].total)
    worst, (usable, most) = held[place], room(chip, stack)
    kind = max(NAMES, key=lambda name: getattr(worst, name))
    if kind == "activations" and worst.in_flight >= 1:
        one = worst.activations / worst.in_flight / GIB
        what = f"holds {worst.in_flight:.3g} microbatch{'es' * (worst.in_flight > 1)} of {one:.1f} GiB"
    else:
        what = f"holds {getattr(worst, kind) / GIB:.1f} GiB of {NAMES[kind]}"
    ways = _ways_out(model, plan, batch, sequence)
    fitting = (name for name, other in ways if peak_bytes(model, other, batch, sequence, stack) <= usable)
    found = [*islice(fitting, 2)]
    way_out = f"{' or '.join(found)} would fit" if found else "no single change of the plan would fit: take more GPUs"
    if worst.total <= most:
        way_out += f"; it may fit as it is, because forecasts for {stack.name} have been too high by as much"
    where = f"stage {place}" if plan.pp > 1 else "each rank"
    return f"{where} {what}, {worst.total / GIB:.1f} of {usable / GIB:.1f} GiB together; {way_out}"


def _ways_out(model: Model, plan: Plan, batch: int, sequence: int) -> Iterator[tuple[str, Plan]]:
    """Plans on as many ranks that differ in one respect and hold less, in order of the time they cost."""
    smaller, fewer = plan.microbatch // 2, plan.dp // 2
    changes: tuple[tuple[object, str, dict[str, Any]], ...] = (
        (plan.zero == 0 and plan.copies > 1, "ZeRO 1", {"zero": 1}),
        (plan.tp > 1 and not plan.sequence_parallel, "sequence parallelism", {"sequence_parallel": True}),
        (smaller and plan.microbatch % 2 == 0, f"microbatch {smaller}", {"microbatch": smaller}),
        (plan.recompute == "none" and not plan.flash, "selective recomputation", {"recompute": "selective"}),
        *(
            (fewer and plan.dp % 2 == 0, f"{axis} {2 * size} with dp {fewer}", {axis: 2 * size, "dp": fewer})
            for axis, size in (("pp", plan.pp), ("tp", plan.tp), ("cp", plan.cp))
        ),
        (plan.recompute != "full", "full recomputation", {"recompute": "full"}),
        (plan.zero < 3 and plan.copies > 1, "ZeRO 3", {"zero": 3}),
    )
    for is_possible, name, change in changes:
        if is_possible and (other := replace(plan, **change)).refusal(model, batch, sequence) is None:
            yield name, other
