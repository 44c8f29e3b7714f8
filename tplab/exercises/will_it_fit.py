"""The exercises of lab 27: the bytes of each stage of a pipeline, and which remedy makes a training job fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from numbers import Real
from typing import Any

import numpy as np

from tplab.exercises.verdict import Verdict, cause, check, differs, on, refuse, right
from tplab.forecast import Model, Plan
from tplab.forecast.memory import Held, memory
from tplab.schedules import one_f_one_b
from tplab.schedules.simulation import peak_activations

# --- the bytes of each stage ---------------------------------------------------------------------------------------

GB = 1e9
STATES = 18
"""Bytes per parameter: 2 in bfloat16, 4 of its gradient in float32, and 12 of Adam's states."""


@dataclass(frozen=True)
class Case:
    """A pipeline: layers of each stage; parameters of a layer and of either end; bytes that a layer keeps."""

    cut: tuple[int, ...]
    microbatches: int
    layer: int
    ends: int
    kept: int

    def parameters(self, first: int = 1, last: int = 1) -> np.ndarray:
        """The parameters of each stage, with `first` and `last` vocabulary matrices on the first and last one."""
        held = np.array(self.cut) * self.layer
        held[0] += first * self.ends
        held[-1] += last * self.ends
        return held

    def in_flight(self) -> np.ndarray:
        """The most microbatches that each stage keeps, counted in the schedule."""
        return peak_activations(one_f_one_b(len(self.cut), self.microbatches)).astype(int)

    def bytes_of_stages(self, parameters: Any, in_flight: Any, states: int = STATES) -> np.ndarray:
        return states * parameters + in_flight * np.array(self.cut) * self.kept

    def right(self) -> np.ndarray:
        return self.bytes_of_stages(self.parameters(), self.in_flight())

    def __str__(self) -> str:
        shown = ", ".join(f"{name}={value}" for name, value in vars(self).items())
        return f"stage_bytes({shown})"


CASES = (
    Case((4, 4, 4, 4), 8, 1000, 3000, 700),
    Case((1, 2, 2, 3), 8, 1000, 500, 90_000),
    Case((3, 1, 2), 2, 640, 1100, 2000),
    Case((2, 2, 2, 2, 2), 3, 10, 7, 100),
    Case((5,), 4, 100, 60, 3000),
    Case((1, 3), 1, 512, 64, 4096),
)
"""More microbatches than stages, as many, and fewer; equal stages and unequal ones; a single one."""

OF_PARAMETERS: Mapping[str, Callable[[Case], Any]] = {
    "": Case.parameters,
    "Its parameters are the mean of all stages, and the fullest stage has more. Which stage has the embedding, and "
    "which one the output matrix?": lambda case: np.full(len(case.cut), case.parameters().mean()),
    "Its parameters leave out the embedding of the first stage and the output matrix of the last one.": (
        lambda case: case.parameters(0, 0)
    ),
    "Its parameters leave out the output matrix, on the last stage.": lambda case: case.parameters(1, 0),
    "Its parameters leave out the embedding, on the first stage.": lambda case: case.parameters(0, 1),
    "The output matrix is on the last stage, and the embedding on the first.": lambda case: case.parameters(2, 0),
    "Only the first stage has the embedding, and only the last one has the output matrix.": (
        lambda case: case.parameters(0, 0) + 2 * case.ends
    ),
    "A single stage is the first and the last one: it has both the embedding and the output matrix.": (
        lambda case: np.where(len(case.cut) == 1, case.parameters() - case.ends, case.parameters())
    ),
    "Only the first stage has the embedding, and only the last one has the output matrix. Others have neither.": (
        lambda case: case.parameters(0, 0) + case.ends
    ),
    "Every stage has its own layers, and not equally many.": (
        lambda case: replace(case, cut=len(case.cut) * (sum(case.cut) / len(case.cut),)).parameters()
    ),
}
"""hint on a mistake -> the parameters of each stage that it gives."""

OF_IN_FLIGHT: Mapping[str, Callable[[Case], Any]] = {
    "": Case.in_flight,
    "For its activations, stage 0 is right if there are many microbatches. How many forward passes does a later stage "
    "run before its first backward pass?": lambda case: len(case.cut),
    "Its activations are those of every microbatch, as in GPipe. In 1F1B a stage begins backward passes earlier.": (
        lambda case: case.microbatches
    ),
    "For its activations, can a stage keep more microbatches than there are?": (
        lambda case: len(case.cut) - np.arange(len(case.cut))
    ),
    "Its activations are those before the first pair of a forward and a backward pass. The pair's own is kept too.": (
        lambda case: np.minimum(len(case.cut) - 1 - np.arange(len(case.cut)), case.microbatches)
    ),
    "Its activations are those of one microbatch too many. The last stage runs each backward pass right after its "
    "forward pass, so it keeps one.": lambda case: case.in_flight() + 1,
    "Its microbatches are in the wrong direction: the first stage waits longest for its first backward pass.": (
        lambda case: np.minimum(np.arange(len(case.cut)) + 1, case.microbatches)
    ),
    "It has the activations of one layer for each microbatch. How many layers has a stage?": (
        lambda case: case.in_flight() / np.array(case.cut)
    ),
    "Its microbatches in flight are the mean of all stages.": lambda case: np.full(
        len(case.cut), case.in_flight().mean()
    ),
    "Its activations are those of one microbatch. How many does a stage keep at once?": lambda case: 1,
}
"""hint on a mistake -> the microbatches in flight that it gives."""

OF_STATES = {"": STATES, "Are the bytes per parameter those above, with gradients in float32?": 16}


@check("stage_bytes", not_with=("peak_activations", "in_flight", "memory"))
def check_stage_bytes(fn: Callable[[Any, int, int, int, int], Any]) -> Verdict:
    """Check that `fn(cut, microbatches, layer, ends, kept)` returns the bytes of each stage of a 1F1B pipeline: 18 per
    parameter, plus those that its layers keep for the microbatches in flight."""
    for case in CASES:
        found, want = _bytes_of(fn, case), case.right()
        if (wrong := np.flatnonzero(~np.isclose(found, want, rtol=1e-9))).size:
            stage = int(wrong[0])
            text = f" is not right yet. In {case}, stage {stage} takes {want[stage]:,} B, and yours are"
            yours = f"{found[stage]:,.9f}".rstrip("0").rstrip(".")
            tried = ((_bytes_of(fn, one), _known(one)) for one in (case, *CASES))
            refuse(f"{text} {yours}.\n{cause(tried, '', slack=1e-7)}".rstrip())
    return right(f" is right: it agrees with the schedule for {len(CASES)} pipelines, on every stage.")


def _bytes_of(fn: Callable[[Any, int, int, int, int], Any], case: Case) -> np.ndarray:
    """The learner's result for a case."""
    with on(f"in {case}"):
        given = list(case.cut)
        got = fn(given, case.microbatches, case.layer, case.ends, case.kept)
        if given != list(case.cut):
            refuse(": it changes the list that it is given.")
        if got is None:
            refuse(f": {case} returned None; is a `return` missing?")
        if np.shape(got) != (len(case.cut),):
            refuse(f": {case} is {got!r}; return one number for each of {len(case.cut)} stages.")
        return np.array(got, float)


def _known(case: Case) -> dict[str, np.ndarray]:
    """hint -> the bytes that mistakes give, in one of their parts or in several"""
    ways = product(OF_STATES.items(), OF_PARAMETERS.items(), OF_IN_FLIGHT.items())
    known = {}
    for said in sorted(ways, key=lambda way: sum(bool(text) for text, _ in way)):
        (_, states), (_, parameters), (_, in_flight) = said
        text = "\n".join(text for text, _ in said if text)
        known[text] = case.bytes_of_stages(parameters(case), in_flight(case), states)
    units = {"GB": GB, "GiB": 2**30, "MB": 1e6, "MiB": 2**20}
    return known | {f"These are {unit}. Return bytes.": case.right() / of for unit, of in units.items()}


# --- remedies ------------------------------------------------------------------------------------------------------

KINDS = ("parameters", "gradients", "optimizer", "gathered", "activations", "logits", "buffers")
LIMIT = 80e9
"""The limit of a forecast on an H100, where a program can use 85.0 GB: torch reserves more than it needs."""


@dataclass(frozen=True)
class Job:
    """A training job that does not fit."""

    model: Model
    plan: Plan
    batch: int
    sequence: int

    def fullest(self, plan: Plan) -> tuple[Held, int]:
        """The memory of the fullest rank, and its stage."""
        held = memory(self.model, plan, self.batch, self.sequence)
        stage = max(range(len(held)), key=lambda one: held[one].total)
        return held[stage], stage

    def peak(self, plan: Plan) -> tuple[int, int]:
        """The bytes of the fullest rank, and its stage."""
        held, stage = self.fullest(plan)
        return held.total, stage

    def __str__(self) -> str:
        plan = self.plan
        said = [f"tp {plan.tp}, pp {plan.pp}, dp {plan.dp}"]
        said += ["sequence parallel"] * plan.sequence_parallel + [f"ZeRO {plan.zero}" if plan.zero else "no ZeRO"]
        said += [{"none": "no recomputation", "full": "full recomputation"}[plan.recompute]]
        held, stage = self.fullest(plan)
        parts = ", ".join(f"{kind} {getattr(held, kind) / GB:.1f}" for kind in KINDS if getattr(held, kind))
        return (
            f"{self.model.name}, {', '.join(said)},\n   microbatches of {plan.microbatch} x {self.sequence:,} tokens: "
            f"{held.total / GB:.1f} GB in stage {stage},\n   of that {parts}"
        )


REMEDIES: Mapping[str, Callable[[Plan], Plan]] = {
    "sequence parallelism": lambda plan: replace(plan, sequence_parallel=plan.tp > 1),
    "ZeRO 1": lambda plan: replace(plan, zero=max(1, plan.zero)),
    "half the microbatch": (
        lambda plan: plan if plan.microbatch % 2 else replace(plan, microbatch=plan.microbatch // 2)
    ),
    "twice pp, half dp": lambda plan: plan if plan.dp % 2 else replace(plan, pp=2 * plan.pp, dp=plan.dp // 2),
    "full recomputation": lambda plan: replace(plan, recompute="full"),
    "ZeRO 3": lambda plan: replace(plan, zero=3),
}
"""Possible changes of a job, the smallest first. A remedy that is impossible leaves the plan as it is."""
KEPT = {"ZeRO 3": " (A rank keeps no bfloat16 parameters.)"}
"""Effects of a remedy that its name does not state."""

JOBS: Mapping[str, Job] = {
    "A": Job(Model.find("llama3-8b"), Plan(pp=2, dp=4), 64, 8192),
    "B": Job(Model.find("llama3-8b"), Plan(tp=2, dp=8, microbatch=6, zero=1), 96, 8192),
    "C": Job(Model.find("llama3-70b"), Plan(tp=4, dp=4, zero=1, sequence_parallel=True, recompute="full"), 128, 4096),
    "D": Job(Model.find("llama3-70b"), Plan(tp=4, pp=2, dp=32, microbatch=6, zero=1, recompute="full"), 1536, 8192),
}
"""No forecast of them, up to the first remedy that is enough, is within 1.5 GB of the limit."""


def first_enough(job: Job) -> str:
    """The first remedy with which the job fits."""
    return next(name for name, remedy in REMEDIES.items() if job.peak(remedy(job.plan))[0] <= LIMIT)


def check_remedies(chosen: Mapping[str, tuple[str, float]]) -> Verdict:
    """Check that `chosen` has, for each job, the first remedy of the list that makes it fit, and the GB that the
    fullest rank then holds, to within a tenth."""
    if not isinstance(chosen, Mapping):
        return Verdict(False, f"my_remedies: this is an object of type {type(chosen).__name__}. Write a dict.")
    if not any(name for name, _ in map(_pair, chosen.values())):
        return Verdict(None, "my_remedies: not started. Put a remedy between the quotation marks of each job.")
    judged = {name: _judged(job, *_pair(chosen.get(name))) for name, job in JOBS.items()}
    is_right = all(passed for _, passed in judged.values())
    title = "my_remedies: all four jobs fit." if is_right else "my_remedies is not right yet."
    return Verdict(is_right, "\n".join([title, *(f"{name}: {text}" for name, (text, _) in judged.items())]))


def _pair(choice: Any) -> tuple[str, Any]:
    """A remedy and its GB, of which one or both may be missing."""
    name, gb, *_ = [*choice, None, None] if isinstance(choice, tuple | list) else [choice, None]
    return str(name or "").strip(), gb


def _judged(job: Job, choice: str, gb: Any) -> tuple[str, bool]:
    """(the effect of a remedy, in words; whether it is the right one, with the right GB)."""
    names = {name.casefold(): name for name in REMEDIES}
    name = names.get(choice.casefold().replace("-", " "))
    if name is None:
        return (f"{choice!r} is not in the list." if choice else "no remedy yet."), False
    changed = REMEDIES[name](job.plan)
    if changed == job.plan:
        return f"{_no_change(name, job.plan)}. What is the largest part?", False
    (before, _), (peak, stage) = job.peak(job.plan), job.peak(changed)
    if not isinstance(gb, Real) or isinstance(gb, bool) or not gb:
        return "how many GB does the fullest rank then hold? Write a number after the remedy.", False
    if float(gb) > 1e6:
        return f"{gb:g} is not a number of GB. Did you write bytes?", False
    if differs(float(gb), peak / GB, 0.1 * peak / GB):
        return (
            f"with {name}, the forecast is not {gb:g} GB. Which parts does '{name}' make smaller, by which factor, and "
            f"what stays?{KEPT.get(name, '')} Once you know that, you will see whether it is the right remedy."
        ), False
    said = f"{name} brings {before / GB:.1f} GB down to {peak / GB:.1f} GB ({peak / 2**30:.1f} GiB), in stage {stage}"
    if peak > LIMIT:
        return f"{said}, and the limit is {LIMIT / GB:.0f} GB. What is the largest part?", False
    if name != first_enough(job):
        return f"{said}. It fits, but an earlier remedy is enough too.", False
    return f"right: {said}.", True


def _no_change(name: str, plan: Plan) -> str:
    """Why a remedy leaves a plan as it is."""
    impossible = {
        "sequence parallelism": "tp is 1, so no ranks share a sequence" if plan.tp == 1 else "",
        "half the microbatch": f"a microbatch of {plan.microbatch} cannot be halved" if plan.microbatch % 2 else "",
        "twice pp, half dp": f"dp {plan.dp} cannot be halved" if plan.dp % 2 else "",
    }
    return impossible.get(name) or f"{name} is on already"
