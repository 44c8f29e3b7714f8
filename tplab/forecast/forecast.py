"""A forecast: how long a training step takes, what each rank holds, whether it fits, and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np

from tplab.cost import Cluster, find
from tplab.forecast.block import Block, Tables
from tplab.forecast.memory import Held, memory, peak_bytes, room
from tplab.forecast.model import Model
from tplab.forecast.pipelines import part_hidden
from tplab.forecast.plan import Plan
from tplab.forecast.stacks import Stack, find_stack
from tplab.forecast.step import BACKWARD, FORWARD, OUTSIDE, RECOMPUTE, UNDER, Step, step
from tplab.schedules import Costs, Simulation, simulate

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


@dataclass(frozen=True)
class Forecast(Step):
    """The time and memory of a step of `batch` sequences: its seconds and their parts are those of a `Step`.

    held     what the ranks at each place of a pipeline hold at their peak
    """

    model: Model
    plan: Plan
    cluster: Cluster
    batch: int
    sequence: int
    stack: Stack
    held: tuple[Held, ...] = field(repr=False)

    # --- time --------------------------------------------------------------------------------------------------------

    @property
    def tokens_per_second(self) -> float:
        return self.batch * self.sequence / self.seconds

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.tokens_per_second / self.plan.ranks

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: the model's own FLOPs (`Model.flops_per_token`) as a share of the chips' peak."""
        peak = self.cluster.chip.flops[self.plan.chip_dtype]
        return self.tokens_per_second_per_gpu * self.model.flops_per_token(self.sequence) / peak

    def pipeline(self, most: int = 64) -> Simulation:
        """The simulation of each of the plan's dp x cp x tp pipelines, with the durations of this forecast. Of more
        than `most` microbatches, some rounds in the middle are left out, because they are all alike; DualPipe keeps
        two. All pairs of passes hide the same part of the shorter one: the mean."""
        given = Tables(self.model, self.cluster, self.sequence, self.stack)
        block, plan = Block.of_plan(self.plan, self.batch, given), self.plan
        fields = (np.array(block.families[0].stages, float) @ block.micro[0, 0]).T
        forward, backward, again = fields[[FORWARD, BACKWARD, RECOMPUTE]]
        inputs, weights = (backward + again) / 2, (backward - again) / 2  # I includes all recomputation
        count, least = plan.microbatches(self.batch), plan.pp * (1 + plan.rule_name.startswith("dualpipe"))
        left_out = max(0, min(-(-(count - most) // plan.pp), (count - least) // plan.pp))
        schedule = plan.rule(count - left_out * plan.pp)
        overlap, send = part_hidden(schedule, forward, backward, fields[UNDER:]), float(block.sends[0])
        return simulate(
            schedule, Costs(forward, inputs, weights, send, full_backward=backward, overlap=overlap, unit="s")
        )

    # --- memory ------------------------------------------------------------------------------------------------------

    @cached_property
    def memory(self) -> Sequence[Held]:
        """The memory of each rank of the plan's mesh: `memory[rank]`."""
        return tuple(self.held[self.plan.pipeline_rank(rank)] for rank in range(self.plan.ranks))

    @cached_property
    def worst_rank(self) -> int:
        """The first of the ranks that hold most."""
        place = max(range(len(self.held)), key=lambda place: self.held[place].total)
        return place * (self.plan.ranks // self.plan.pp)

    @property
    def peak(self) -> Held:
        """The memory of the fullest rank."""
        return max(self.held, key=lambda held: held.total)

    @property
    def usable(self) -> float:
        """Bytes of a chip's memory that a program can use."""
        return room(self.cluster.chip, self.stack).sure

    @property
    def fits(self) -> bool:
        """False only if it surely does not fit: see `tplab.forecast.memory.room`."""
        return self.peak.total <= room(self.cluster.chip, self.stack).most

    @property
    def surely_fits(self) -> bool:
        """Whether it fits even if the forecast of memory is not too high. `plans` finds only such plans."""
        return self.peak.total <= self.usable

    # --- why ---------------------------------------------------------------------------------------------------------

    @cached_property
    def why(self) -> str:
        """The main obstacle in one sentence: memory, and what would fit; or the part of a step that is lost."""
        if not self.surely_fits:
            return self._does_not_fit()
        text = self._takes_so_long()
        if self.measured is None and self.cluster.fitted is not None:
            text += f"; {OUTSIDE}, so there is no interval"
        return text

    def _takes_so_long(self) -> str:
        """Where the time goes: "computing takes 71 % of the step, and most is lost to the pipeline's bubble, 12 %"."""
        whole, lost = self.seconds, max(LOST, key=lambda name: self.parts.get(name, 0.0))
        held = f"{self.peak.total / GIB:.1f} of {self.usable / GIB:.1f} GiB are in use"
        text = f"computing takes {self.parts.get('computing', 0.0) / whole:.0%} of the step"
        if self.parts.get(lost, 0.0) / whole < 0.01:
            return f"{text}, and {held}"
        name, way_out = LOST[lost]
        return f"{text}; most is lost to {name}, {self.parts[lost] / whole:.0%}: less with {way_out}; {held}"

    def _does_not_fit(self) -> str:
        """Which rank holds what, and what would fit: "stage 0 holds 4 microbatches of 9 GiB; pp 8 or ... would fit"."""
        worst = self.peak
        kind = max(NAMES, key=lambda name: getattr(worst, name))
        if kind == "activations" and worst.in_flight >= 1:
            one = worst.activations / worst.in_flight / GIB
            what = f"holds {worst.in_flight:.3g} microbatch{'es' * (worst.in_flight > 1)} of {one:.1f} GiB"
        else:
            what = f"holds {getattr(worst, kind) / GIB:.1f} GiB of {NAMES[kind]}"
        found = " or ".join(islice(self._ways_out(), 2))
        way_out = f"{found} would fit" if found else "no single change of the plan would fit: take more GPUs"
        if self.fits:
            way_out += f"; it may fit as it is, because forecasts for {self.stack.name} have been too high by as much"
        where = f"stage {self.plan.pipeline_rank(self.worst_rank)}" if self.plan.pp > 1 else "each rank"
        return f"{where} {what}, {worst.total / GIB:.1f} of {self.usable / GIB:.1f} GiB together; {way_out}"

    def _ways_out(self) -> Iterator[str]:
        """Plans on as many ranks that differ in one respect and surely fit, in order of the time they cost."""
        plan, given = self.plan, (self.batch, self.sequence)
        smaller, fewer = plan.microbatch // 2, plan.dp // 2
        changes: tuple[tuple[object, str, dict[str, Any]], ...] = (
            (plan.zero == 0 and plan.copies > 1, "ZeRO 1", {"zero": 1}),
            (plan.tp > 1, "sequence parallelism", {"sequence_parallel": True}),
            (smaller and plan.microbatch % 2 == 0, f"microbatch {smaller}", {"microbatch": smaller}),
            (plan.recompute == "none" and not plan.flash, "selective recomputation", {"recompute": "selective"}),
            *(
                (fewer and plan.dp % 2 == 0, f"{axis} {2 * size} with dp {fewer}", {axis: 2 * size, "dp": fewer})
                for axis, size in (("pp", plan.pp), ("tp", plan.tp), ("cp", plan.cp))
            ),
            (True, "full recomputation", {"recompute": "full"}),
            (plan.zero < 3 and plan.copies > 1, "ZeRO 3", {"zero": 3}),
        )
        for is_possible, name, change in changes:
            other = replace(plan, **change) if is_possible else plan
            if other == plan or other.refusal(self.model, *given) is not None:
                continue
            if peak_bytes(self.model, other, *given, self.stack) <= self.usable:
                yield name

    def __str__(self) -> str:
        rate = f"{self.tokens_per_second_per_gpu:,.0f} tokens/s per GPU"
        took = f"{self.seconds:.3g} s ({self.between}), {rate}, MFU {self.mfu:.1%}"
        held = f"{self.peak.total / GIB:.1f} of {self.usable / GIB:.1f} GiB on rank {self.worst_rank}"
        return f"{self.plan}: {took}; {held}. {self.why}"


def forecast(
    model: str | Model,
    plan: Plan,
    cluster: str | Cluster,
    *,
    batch: int,
    sequence: int,
    stack: str | Stack = "megatron",
) -> Forecast:
    """Time and memory of a training step on `batch` sequences of `sequence` tokens.

        forecast("llama3-70b", Plan(dp=8, tp=8, pp=4, zero=1), "h100-measured", batch=1024, sequence=8192)

    model     a Model, or the name of one in `tplab.forecast.MODELS`
    cluster   as for `run`; a measured one gives a forecast with its error, a data sheet gives seconds at peak rates
    Raises PlanError if the plan cannot train the model, with the numbers that do not divide.
    """
    model, cluster, stack = Model.find(model), find(cluster), find_stack(stack, plan)
    taken = step(model, plan, cluster, batch, sequence, stack)
    held = memory(model, plan, batch, sequence, stack)
    return Forecast(
        **vars(taken), model=model, plan=plan, cluster=cluster, batch=batch, sequence=sequence, stack=stack, held=held
    )
