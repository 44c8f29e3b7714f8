"""The exercises of lab 25: how many microbatches a stage keeps, and which remedy makes a training job fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import numpy as np

from tplab.cost import H100_MEASURED
from tplab.exercises.verdict import Verdict, check, hint, on, refuse, right
from tplab.forecast import Model, Plan
from tplab.forecast.memory import memory, usable_bytes
from tplab.schedules import one_f_one_b
from tplab.schedules.simulation import peak_activations

# --- microbatches in flight ----------------------------------------------------------------------------------------

SIZES = ((4, 8), (4, 4), (3, 7), (8, 3), (8, 5), (2, 1), (1, 6), (16, 32), (24, 50))
"""(stages, microbatches): more microbatches than stages, as many, and fewer."""


@check("in_flight", not_with=("peak_activations", "in_flight", "memory"))
def check_in_flight(fn: Callable[[int, int, int], Any]) -> Verdict:
    """Whether `fn(stage, stages, microbatches)` is how many microbatches a stage of a 1F1B pipeline keeps at most."""
    for stages, microbatches in SIZES:
        want = peak_activations(one_f_one_b(stages, microbatches)).astype(int).tolist()
        got, wrong = [], []
        for stage in range(stages):
            with on(f"for stage {stage} of {stages}, with {_microbatches(microbatches)}"):
                got.append(fn(stage, stages, microbatches))
                wrong += [stage] if bool(got[stage] != want[stage]) else []
        if wrong:
            stage = wrong[0]
            text = (
                f" is not right yet. With {_stages(stages)} and {_microbatches(microbatches)}, stage {stage} keeps at "
                f"most {want[stage]}, and in_flight says {got[stage]!r}.\n{_hint(got, stages, microbatches)}"
            )
            refuse(text.rstrip())
    return right(f" is right: it agrees with the schedule for {len(SIZES)} pipelines, on every stage.")


def _microbatches(count: int) -> str:
    return f"{count} microbatch{'es' if count != 1 else ''}"


def _stages(count: int) -> str:
    return f"{count} stage{'s' if count != 1 else ''}"


def _hint(got: list[Any], stages: int, microbatches: int) -> str:
    if None in got:
        return "Is a `return` missing?"
    stage = np.arange(stages)
    known = {
        "Stage 0 is right. How many forward passes does a later stage run before its first backward pass?": stages,
        "That is every microbatch, as in GPipe. In 1F1B a stage begins backward passes earlier.": microbatches,
        "Can a stage keep more microbatches than there are?": stages - stage,
        "These are the forward passes before the first pair of a forward and a backward pass. The pair's own is kept "
        "too.": np.minimum(stages - 1 - stage, microbatches),
        "This is in the wrong direction: the first stage waits longest for its first backward pass.": np.minimum(
            stage + 1, microbatches
        ),
    }
    return hint(got, known) if all(isinstance(one, Real) for one in got) else ""


# --- remedies ------------------------------------------------------------------------------------------------------

GB = 1e9
LIMIT = usable_bytes(H100_MEASURED.chip)
"""What an H100 with 80 GiB lets a program have: 79.2 GiB, 85 GB."""


@dataclass(frozen=True)
class Job:
    """A training job that does not fit."""

    model: Model
    plan: Plan
    batch: int
    sequence: int

    def peak(self, plan: Plan) -> tuple[int, int]:
        """The bytes that the fullest rank holds, and the stage it is in."""
        held = [one.total for one in memory(self.model, plan, self.batch, self.sequence)]
        return max(held), held.index(max(held))

    def __str__(self) -> str:
        plan = self.plan
        said = [f"tp {plan.tp}, pp {plan.pp}, dp {plan.dp}"]
        said += ["sequence parallel"] * plan.sequence_parallel + [f"ZeRO {plan.zero}" if plan.zero else "no ZeRO"]
        said += [{"none": "no recomputation", "full": "full recomputation"}[plan.recompute]]
        peak, stage = self.peak(plan)
        return (
            f"{self.model.name}, {', '.join(said)},\n   microbatches of {plan.microbatch} x {self.sequence:,} tokens: "
            f"{peak / GB:.0f} GB in stage {stage}"
        )


def _twice_the_stages(plan: Plan) -> Plan:
    return replace(plan, pp=2 * plan.pp, dp=plan.dp // 2) if plan.dp % 2 == 0 else plan


def _half_the_microbatch(plan: Plan) -> Plan:
    return replace(plan, microbatch=plan.microbatch // 2) if plan.microbatch % 2 == 0 else plan


def _with(**fields: Any) -> Callable[[Plan], Plan]:
    return lambda plan: replace(plan, **fields)


REMEDIES: Mapping[str, Callable[[Plan], Plan]] = {
    "sequence parallelism": lambda plan: replace(plan, sequence_parallel=plan.tp > 1),
    "ZeRO 1": lambda plan: replace(plan, zero=max(1, plan.zero)),
    "half the microbatch": _half_the_microbatch,
    "twice the stages, half the copies": _twice_the_stages,
    "full recomputation": _with(recompute="full"),
    "ZeRO 3": _with(zero=3),
}
"""What a job can change, with what changes a job least first. A remedy that cannot be had leaves the plan as it is."""

JOBS: Mapping[str, Job] = {
    "A": Job(Model.find("llama3-8b"), Plan(pp=2, dp=4), 64, 8192),
    "B": Job(Model.find("llama3-8b"), Plan(tp=2, dp=8, microbatch=6, zero=1), 96, 8192),
    "C": Job(Model.find("llama3-70b"), Plan(tp=4, dp=4, zero=1, sequence_parallel=True, recompute="full"), 128, 4096),
    "D": Job(Model.find("llama3-70b"), Plan(tp=4, pp=2, dp=32, microbatch=6, zero=1, recompute="full"), 1536, 8192),
}
"""No forecast of them, with or without a remedy, is within 3 GB of the limit."""


def first_enough(job: Job) -> str:
    """The first remedy with which the job fits."""
    return next(name for name, remedy in REMEDIES.items() if job.peak(remedy(job.plan))[0] <= LIMIT)


def check_remedies(chosen: Mapping[str, str]) -> Verdict:
    """Whether `chosen` has, for each job, the first remedy of the list that makes it fit."""
    if not isinstance(chosen, Mapping):
        return Verdict(False, f"my_remedies: this is an object of type {type(chosen).__name__}. Write a dict.")
    if not any(chosen.values()):
        return Verdict(None, "my_remedies: not started. Put a remedy between the quotation marks of each job.")
    judged = {name: _judged(job, chosen.get(name) or "") for name, job in JOBS.items()}
    is_right = all(passed for _, passed in judged.values())
    title = "my_remedies: all four jobs fit." if is_right else "my_remedies is not right yet."
    return Verdict(is_right, "\n".join([title, *(f"{name}: {text}" for name, (text, _) in judged.items())]))


def _judged(job: Job, choice: Any) -> tuple[str, bool]:
    """(what a remedy does to a job, whether it is the right one)."""
    names = {name.casefold(): name for name in REMEDIES}
    name = names.get(str(choice).strip().casefold())
    if name is None:
        return (f"{choice!r} is not in the list" if choice else "no remedy yet"), False
    changed = REMEDIES[name](job.plan)
    if changed == job.plan:
        return f"{_no_change(name, job.plan)}. What is the largest part?", False
    (before, _), (peak, stage) = job.peak(job.plan), job.peak(changed)
    said = f"{name} brings {before / GB:.1f} GB down to {peak / GB:.1f} GB, in stage {stage}"
    if peak > LIMIT:
        return f"{said}, and the limit is {LIMIT / GB:.1f} GB. What is the largest part?", False
    if name != first_enough(job):
        return f"{said}. It fits, but an earlier remedy is enough too.", False
    return f"right: {said}.", True


def _no_change(name: str, plan: Plan) -> str:
    """Why a remedy leaves a plan as it is."""
    impossible = {
        "sequence parallelism": "tp is 1, so no ranks share a sequence" if plan.tp == 1 else "",
        "half the microbatch": f"a microbatch of {plan.microbatch} cannot be halved" if plan.microbatch % 2 else "",
        "twice the stages, half the copies": f"dp {plan.dp} cannot be halved" if plan.dp % 2 else "",
    }
    return impossible.get(name) or f"{name} is on already"
