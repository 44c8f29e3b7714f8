"""Costs: how long each action takes, how long a message travels, and how large an activation is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any

import numpy as np

from tplab.errors import ScheduleError, one_of
from tplab.schedules.action import CODE, COMPUTE, B, F, I, W
from tplab.schedules.schedule import Schedule

Amount = float | Sequence[float] | Sequence[Sequence[float]] | np.ndarray
"""A rank's share of one microbatch (one number), or one figure per stage, or one per stage and microbatch."""


@dataclass(frozen=True, eq=False)
class Costs:
    """The costs that a schedule is simulated with. All times share one unit, of your choice; sizes are in bytes.

    forward, input_grad, weight_grad
                    F, I and W. One number is a *rank's* share of one microbatch: each of its v stages takes 1/v of it.
                    A sequence has one figure per stage, and a nested sequence one per stage and microbatch; neither is
                    divided by v
    stage_costs     how much the consecutive parts of the model cost relative to one another: (1, 1, 1, 2) doubles
                    F, I and W of the last quarter of the layers. Give one figure per stage, or a number of figures that
                    divides the number of stages or is a multiple of it: more stages cut the same model finer
    transfer        latency of a message between two ranks; between stages on the same rank it is zero
    full_backward   B where it is not split; I + W by default
    overlap         in an overlapped pair, the fraction of the shorter action that is hidden behind the longer, 0 to 1:
                    F & B takes F + B - overlap * min(F, B). A pair begins when both can, and ends together. F and B
                    then include their own messages, such as the all-to-all of experts, and only that share can be
                    hidden. This is a model: DeepSeek (DualPipe 2025) treats F & B as a figure to be measured
    message_bytes   size of one message (a number, or what each stage sends), and `bandwidth` in bytes per unit of time:
                    a message takes transfer + message_bytes / bandwidth
    links           "free": any number of messages travel at once. "queue": a link (one direction between two ranks)
                    carries one message at a time, for message_bytes / bandwidth each. "port": each rank sends one
                    message at a time, to any rank, as GPUs do on the modelled clock (`tplab.cost.clock`)
    optimizer_step  time of one rank's optimizer step
    gradient_sync   time to sum one rank's gradients (REDUCE_GRAD), shared among its stages; it occupies the rank
    activation      what F keeps for the backward: bytes of a rank's share of one microbatch, or one figure per stage
    input_grad_frees  the part of it that I frees (one number, or one per stage); W frees the rest (B frees all of it).
                    It is negative if I adds more than it frees: it keeps the gradients that W will need
    unit            "steps" for unit times, "s" for seconds
    """

    forward: Amount = 1.0
    input_grad: Amount = 1.0
    weight_grad: Amount = 1.0
    transfer: float = 0.0
    _: KW_ONLY
    stage_costs: Sequence[float] | None = None
    full_backward: Amount | None = None
    overlap: float = 0.0
    message_bytes: float | Sequence[float] = 0.0
    bandwidth: float = math.inf
    links: str = "free"
    optimizer_step: float = 0.0
    gradient_sync: float = 0.0
    activation: float | Sequence[float] = 1.0
    input_grad_frees: float | Sequence[float] = 0.0
    unit: str = "steps"

    def __post_init__(self):
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            if name in ("links", "unit") or (name in ("full_backward", "stage_costs") and value is None):
                continue
            amounts = _numbers(value)
            if (
                amounts is None
                or amounts.ndim > _DIMS.get(name, 0)
                or bool(np.any(np.isnan(amounts) | ((amounts < 0) & (name != "input_grad_frees"))))
                or (name != "bandwidth" and bool(np.isinf(amounts).any()))
            ):
                more = ("", ", or one for each stage", ", or one for each stage, or for each stage and microbatch")
                raise ScheduleError(
                    f"the cost {name} is {value!r}; it must be a finite number, 0 or more{more[_DIMS.get(name, 0)]}"
                )
        one_of("links", self.links, ("free", "queue", "port"), ScheduleError)
        one_of("the cost unit", self.unit, ("steps", "s"), ScheduleError)
        if self.bandwidth == 0:
            raise ScheduleError("the bandwidth is 0 bytes per unit of time: no message would ever arrive")
        if self.stage_costs is not None:
            if np.ndim(self.stage_costs) != 1 or not len(self.stage_costs):
                raise ScheduleError(f"stage_costs is {self.stage_costs!r}; it must have one number for each stage")
            for name in ("forward", "input_grad", "weight_grad", "full_backward"):
                if np.ndim(getattr(self, name)):
                    both = f"{name} has one figure for each stage, and stage_costs would multiply them"
                    raise ScheduleError(f"{both}; leave stage_costs out")
        for name in ("overlap", "input_grad_frees"):
            if bool(np.any(np.asarray(getattr(self, name)) > 1)):
                raise ScheduleError(f"{name} is {getattr(self, name)}; it is a part of a whole, 0 to 1")

    def by_stage(self, num_stages: int) -> np.ndarray:
        """The mean cost of the parts in each stage, from `stage_costs` [stages]. All ones if that is not given."""
        if self.stage_costs is None:
            return np.ones(num_stages)
        parts = np.asarray(self.stage_costs, float)
        if num_stages % len(parts) == 0:
            return np.repeat(parts, num_stages // len(parts))
        if len(parts) % num_stages == 0:
            return parts.reshape(num_stages, -1).mean(axis=1)
        raise ScheduleError(
            f"stage_costs has {len(parts)} figures and the schedule has {num_stages} stages, and neither divides the "
            f"other; give {num_stages} figures"
        )

    def durations(self, schedule: Schedule) -> np.ndarray:
        """How long each action takes by itself [actions]."""
        share = schedule.stages_per_rank
        duration = np.zeros(len(schedule))
        whole = ("input_grad", "weight_grad") if self.full_backward is None else ("full_backward",)
        for code, names in ((F, ("forward",)), (I, ("input_grad",)), (W, ("weight_grad",)), (B, whole)):
            rows = np.flatnonzero(schedule.kind == code)
            for name in names if len(rows) else ():
                duration[rows] += self.of_actions(name, schedule, rows)
        if self.stage_costs is not None and schedule.num_stages:
            computes = np.flatnonzero(schedule.kind <= max(COMPUTE))
            duration[computes] *= self.by_stage(schedule.num_stages)[np.maximum(schedule.stage[computes], 0)]
        duration[schedule.kind == CODE["REDUCE_GRAD"]] = self.gradient_sync / share
        duration[schedule.kind == CODE["STEP"]] = self.optimizer_step
        return duration

    def carrying(self, schedule: Schedule) -> np.ndarray:
        """How long each action's message occupies its link: message_bytes / bandwidth [actions]."""
        return self.message_sizes(schedule) / self.bandwidth

    def message_sizes(self, schedule: Schedule) -> np.ndarray:
        """Bytes of the message that each action sends, if it sends one [actions].

        A sequence holds what each stage's forward sends; the gradient that comes back over the same cut is as large.
        """
        sizes = np.asarray(self.message_bytes, float)
        if sizes.ndim == 0:
            return np.full(len(schedule), float(sizes))
        cut = np.where(schedule.kind == F, schedule.stage, schedule.stage - 1)
        if len(sizes) < schedule.num_stages - 1:
            raise ScheduleError(
                f"message_bytes has {len(sizes)} figures; {schedule.num_stages} stages have "
                f"{schedule.num_stages - 1} cuts between them"
            )
        return sizes[np.clip(cut, 0, max(len(sizes) - 1, 0))]

    def of_actions(self, name: str, schedule: Schedule, rows: np.ndarray | None = None) -> np.ndarray:
        """The cost with this name for the actions at `rows`, or for all actions."""
        table = np.asarray(getattr(self, name), float)
        rows = np.arange(len(schedule)) if rows is None else rows
        if table.ndim == 0:
            share = 1.0 if name == "input_grad_frees" else schedule.stages_per_rank
            return np.full(len(rows), float(table) / share)
        wanted = (schedule.num_stages, schedule.num_microbatches)[: table.ndim]
        if any(has < needs for has, needs in zip(table.shape, wanted)):
            shapes = "or [stages]" if _DIMS[name] == 1 else "[stages] or [stages, microbatches]"
            raise ScheduleError(
                f"the cost {name} has shape {table.shape}; this schedule has {schedule.num_stages} stages and "
                f"{schedule.num_microbatches} microbatches: give one number, {shapes}"
            )
        stage = np.maximum(schedule.stage[rows], 0)
        return table[stage] if table.ndim == 1 else table[stage, np.maximum(schedule.microbatch[rows], 0)]


_DIMS = {"message_bytes": 1, "input_grad_frees": 1, "stage_costs": 1} | dict.fromkeys(
    ("forward", "input_grad", "weight_grad", "full_backward", "activation"), 2
)
"""How many dims a cost may have. A cost that is not listed is a single number."""


def memory_limits(limit: float | Sequence[float] | None, num_ranks: int) -> np.ndarray:
    """The most microbatches that each rank may hold [ranks], infinite for None. Raises ScheduleError."""
    limits = _numbers(np.inf if limit is None else limit)
    if limits is None:
        raise ScheduleError(f"memory_limit is {limit!r}; it must be a number of microbatches, or one for each rank")
    if not (limits >= 0).all():
        raise ScheduleError(f"memory_limit is {limit!r}; it cannot be negative or NaN")
    if limits.shape not in ((), (num_ranks,)):
        raise ScheduleError(
            f"memory_limit has shape {limits.shape}; give one number, or one for each of the {num_ranks} ranks"
        )
    return np.broadcast_to(limits, num_ranks)


def _numbers(value: Any) -> np.ndarray | None:
    """Real numbers as an array of floats; None if `value` holds anything else."""
    try:
        found = np.asarray(value)
    except ValueError:  # rows of different lengths
        return None
    return found.astype(float) if found.dtype.kind in "biuf" else None
