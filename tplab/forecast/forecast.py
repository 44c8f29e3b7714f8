"""A forecast: how long a training step takes, what each rank holds, whether it fits, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from tplab.cost import Cluster, find
from tplab.forecast.memory import Held, memory, room
from tplab.forecast.model import Model
from tplab.forecast.plan import Plan
from tplab.forecast.stacks import Stack, find_stack
from tplab.forecast.step import OUTSIDE, Step, pipeline, step
from tplab.forecast.why import it_does_not_fit, it_takes_so_long
from tplab.schedules import Simulation


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
        than `most` microbatches, some rounds in the middle are left out, because they are all alike."""
        given = (self.model, self.plan, self.cluster, self.batch, self.sequence, self.stack)
        return pipeline(*given, most=most)

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
            given = (self.model, self.plan, self.cluster.chip, self.batch, self.sequence, self.stack)
            return it_does_not_fit(*given, self.held)
        text = it_takes_so_long(self.plan, self.parts, self.peak, self.usable)
        if self.measured is None and self.cluster.fitted is not None:
            text += f"; {OUTSIDE}, so there is no interval"
        return text

    def __str__(self) -> str:
        gib, rate = 2**30, f"{self.tokens_per_second_per_gpu:,.0f} tokens/s per GPU"
        took = f"{self.seconds:.3g} s ({self.between}), {rate}, MFU {self.mfu:.1%}"
        held = f"{self.peak.total / gib:.1f} of {self.usable / gib:.1f} GiB on rank {self.worst_rank}"
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
