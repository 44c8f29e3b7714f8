"""The exercises of lab 28: a guess compared with measurements, useful FLOPs, and a rule that chooses layouts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from numbers import Real
from types import SimpleNamespace
from typing import Any

from tplab.cost import find
from tplab.errors import TplabError
from tplab.exercises.verdict import Verdict, cause, check, listed, on, refuse, right
from tplab.exercises.will_it_fit import LIMIT
from tplab.forecast import Forecast, Model, Plan, forecast, plans
from tplab.forecast.forecast import LOST
from tplab.forecast.measured import Run, playbook

# --- a guess -------------------------------------------------------------------------------------------------------


@cache
def measured_runs(model: str, gpus: int) -> tuple[Run, ...]:
    """The published runs of this model on this many GPUs without a pipeline, the fastest first."""
    found = [run for run in playbook() if run.is_fitted and (run.model.name, run.plan.ranks) == (model, gpus)]
    return tuple(sorted(found, key=lambda run: run.seconds))


def forecast_of(run: Run) -> Forecast:
    """The forecast for a measured run."""
    return forecast(run.model, run.plan, run.on, batch=run.batch, sequence=run.sequence, stack=run.stack)


def check_guess(dp: int | None, tp: int | None, microbatch: int | None, model: str, gpus: int) -> Verdict:
    """Compare the measured time of a layout of this model with that of the fastest one, and show its forecast."""
    guess = {"dp": dp, "tp": tp, "microbatch": microbatch}
    if None in guess.values():
        return Verdict(None, "my_guess: not started. Put three numbers in place of the three None.")
    for name, number in guess.items():
        if isinstance(number, bool) or not isinstance(number, Real) or not number >= 1 or number % 1:
            return Verdict(False, f"{name} is {number!r}; it is a whole number, 1 or more.")
    dp, tp, microbatch = (int(number) for number in guess.values() if number is not None)
    if dp * tp != gpus:
        ranks = f"{dp * tp} rank{'s' if dp * tp > 1 else ''}"
        return Verdict(False, f"dp {dp} times tp {tp} makes {ranks}, and there are {gpus} GPUs.")
    runs = measured_runs(model, gpus)
    if not runs:
        return Verdict(False, f"No run of {model} on {gpus} GPUs was published.")
    alike = [run for run in runs if (run.plan.dp, run.plan.tp, run.plan.microbatch) == (dp, tp, microbatch)]
    if not alike:
        return Verdict(False, _not_measured(runs, replace(runs[0].plan, dp=dp, tp=tp, microbatch=microbatch, zero=1)))
    best, mine = runs[0], min(alike, key=lambda run: run.seconds)
    said = forecast_of(mine)
    parts = ", ".join(f"{part} {seconds:.2f}" for part, seconds in said.parts.items() if seconds > 0.005)
    shown = f"Forecast: {said.seconds:.2f} s: {parts}."
    if mine.seconds <= 1.03 * best.seconds:
        as_good = f"That is {'' if mine is best else 'as good as '}the best of {len(runs)} runs."
        return Verdict(True, f"Measured: {mine.seconds:.2f} s per step. {as_good}\n{shown}")
    lost = {name: seconds for name, seconds in said.parts.items() if name != "computing"}
    part = WORDS[max(lost, key=lambda name: lost[name])]
    return Verdict(
        False,
        f"Measured: {mine.seconds:.2f} s per step, and the best of {len(runs)} runs took {best.seconds:.2f} s: yours "
        f"takes {mine.seconds / best.seconds:.2f} times as long.\n{shown}\n"
        f"By the forecast, most of what is not computing goes to {part}. Guess again.",
    )


def _not_measured(runs: tuple[Run, ...], plan: Plan) -> str:
    """A text on a plan that was not measured: which similar ones were, and its forecast."""
    sizes = sorted({run.plan.microbatch for run in runs if run.plan.tp == plan.tp})
    known = f"Runs with tp {listed(sorted({run.plan.tp for run in runs}))} were."
    if sizes:
        known = f"With tp {plan.tp}, microbatches of {listed(sizes)} were."
    text = f"That was not measured, or it did not run. {known}"
    one = runs[0]
    if refusal := plan.refusal(one.model, one.batch, one.sequence):
        return f"{text}\nIt is not possible: {refusal}."
    said = forecast_of(one._replace(plan=plan))
    fits = "" if said.surely_fits else ", so it may not fit" if said.fits else ", so it does not fit"
    held = f"{said.peak.total / 1e9:.0f} GB with ZeRO 1, and a GPU has {said.usable / 1e9:.0f} GB"
    return f"{text}\nForecast: {said.seconds:.2f} s. It needs {held}{fits}."


# --- useful FLOPs --------------------------------------------------------------------------------------------------


MFU_PLANS = (
    ("llama2-7b", 4096, Plan(dp=4, tp=2, zero=1, sequence_parallel=True)),
    ("llama3-8b", 8192, Plan(dp=8, tp=2, zero=1, sequence_parallel=True)),
    ("llama3-8b", 8192, Plan(dp=2, pp=2, cp=2, zero=1, recompute="selective")),
    ("llama2-7b", 4096, Plan(dp=4, tp=2, zero=1, sequence_parallel=True, recompute="full")),
    ("llama3-8b", 8192, Plan(dp=8, tp=2, zero=1, sequence_parallel=True, recompute="full")),
)
"""(model, tokens in a sequence, plan)."""


class _Given(SimpleNamespace):
    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"`one` has {', '.join(vars(self))}, and no {name}")


@check()
def check_mfu(fn: Callable[..., Any]) -> Verdict:
    """Check that `fn(forecast)` is the model FLOPs utilisation, which does not count recomputation. Its argument has a
    forecast's model, plan, batch, sequence and seconds, but no `mfu`."""
    for given in MFU_PLANS:
        (model, sequence, plan), one = given, _of(*given)
        how = "without recomputation" if plan.recompute == "none" else f"with {plan.recompute} recomputation"
        where = f"{model} on {plan.ranks} GPUs {how}, in sequences of {sequence:,} tokens"
        with on(f"for {where}"):
            answer = fn(_given(one))
            if answer is None:
                refuse(f" returned None for {where}; is a `return` missing?")
            got = float(answer)
        if not abs(got / one.mfu - 1) <= 1e-3:
            text = f" is not right yet. For {where}, it is {one.mfu:.1%}, not {got:.1%}."
            tried = (_beside(fn, _of(*case)) for case in (given, *MFU_PLANS))
            refuse(f"{text}\n{cause(tried, DIVIDE, slack=5e-3)}")
    return right(" is right: it counts each useful FLOP once, with and without recomputation.")


DIVIDE = "Divide the FLOPs that the model needs by those that all GPUs could do in that time."


@cache
def _of(model: str, sequence: int, plan: Plan) -> Forecast:
    return forecast(model, plan, CLUSTER, batch=4 * plan.ranks, sequence=sequence)


def _given(one: Forecast) -> Any:
    return _Given(**{key: getattr(one, key) for key in ("model", "plan", "batch", "sequence", "seconds")})


def _beside(fn: Callable[..., Any], one: Forecast) -> tuple[float, dict[str, float]]:
    """The logarithm of an answer's ratio to the right one, and of the ratios that known mistakes give."""
    ratio, plan, flops = float(fn(_given(one))) / one.mfu, one.plan, one.model.flops_per_token
    again = 4 / 3 if plan.recompute == "full" else 1
    times = {
        "These are 6 FLOPs per parameter, without those of attention: flops_per_token of the model has both.": (
            6 * one.model.parameters / flops(one.sequence)
        ),
        "The FLOPs of attention depend on the length of the sequence: it is one.sequence.": (
            flops(4096) / flops(one.sequence)
        ),
        "These FLOPs include those that were computed a second time. A plan that recomputes more would look better, "
        "and take longer.": again,
        "With full recomputation, a quarter is taken off. The model needs the same FLOPs with and without it.": (
            1 / again
        ),
        "That is 4/3 of it: the FLOPs of one more forward pass, though no layer is computed a second time here.": 4 / 3,
        "That is 4/3 of it. In selective recomputation no layer is computed a second time.": (
            4 / 3 if plan.recompute != "none" else 1
        ),
        f"That is the work of all {plan.ranks} GPUs, relative to the peak of one.": plan.ranks,
        "That is the forward pass alone. The backward pass takes twice as many FLOPs.": 1 / 3,
        "That is a percentage. Return a share of 1.": 100,
        "That is nearly right. Do not round, and divide by the 989e12 FLOP/s of the cell above.": (
            ratio if abs(ratio - 1) < 0.02 else 1
        ),
    }
    return math.log(max(ratio, 1e-30)), {text: math.log(by) for text, by in times.items()}


# --- a rule --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """A model to train on this many GPUs."""

    model: str
    gpus: int
    batch: int
    sequence: int

    def forecast(self, plan: Plan) -> Forecast:
        return forecast(self.model, plan, CLUSTER, batch=self.batch, sequence=self.sequence)

    def __str__(self) -> str:
        return f"{self.model} on {self.gpus} GPUs, {self.batch} sequences of {self.sequence:,} tokens"


CLUSTER = find("h100-measured", fabric="infiniband-ndr")
"""The network of all of Megatron's measured runs on H100s."""
JOBS = (
    Job("llama3-8b", 8, 64, 8192),
    Job("llama3-8b", 64, 256, 8192),
    Job("llama2-13b", 16, 128, 4096),
    Job("llama3-70b", 64, 256, 8192),
    Job("llama3-70b", 256, 1024, 8192),
)
MORE_JOBS = (Job("llama3-8b", 32, 128, 8192), Job("llama3-70b", 128, 512, 8192))
"""Jobs that no page names, so that a list of plans is not enough."""
WORDS = {name: what for name, (what, _) in LOST.items()} | {
    "computing": "computing",
    "dp": "sending gradients and parameters",
}
"""The parts of a step, worded for a sentence."""
FORBIDDEN = ("plans", "forecast", "forecast_rows", "forecast_file", "step", "best_of", "Job")

ENOUGH = 1.25
"""How many times as long as the best of all plans a plan may take: about the error of a forecast of large models, and
less than the cost of recomputation."""


@cache
def best_of(job: Job) -> Forecast:
    return plans(job.model, CLUSTER, gpus=job.gpus, batch=job.batch, sequence=job.sequence)[0]


@check(not_with=FORBIDDEN, aside=" A rule needs no forecast of time: which plan would you try first?")
def check_choose(fn: Callable[..., Any]) -> Verdict:
    """Check that `fn(model, gpus, batch, sequence)` chooses a plan that fits and is nearly as fast as the best, without
    forecasting times itself."""
    lines, is_right = [], True
    for job in JOBS + MORE_JOBS:
        try:
            line, passed = _judged(job, fn(Model.find(job.model), job.gpus, job.batch, job.sequence))
        except TplabError as error:
            line, passed = str(error), False
        except Exception as error:
            line, passed = f"{type(error).__name__}: {error}", False
        is_right &= passed
        lines.append(f"{job}:\n   {line}")
    title = f" is right for all {len(lines)} jobs." if is_right else " is not right yet."
    return Verdict(is_right, "\n".join([title, *lines]))


def _judged(job: Job, plan: Any) -> tuple[str, bool]:
    if not isinstance(plan, Plan):
        return f"it returned {plan!r}; return a Plan", False
    if plan.ranks != job.gpus:
        return f"{plan} has {plan.ranks} ranks, and there are {job.gpus} GPUs", False
    one, best = job.forecast(plan), best_of(job)
    held = f"{one.peak.total / 1e9:.0f} GB"
    if one.peak.total > LIMIT:
        return f"{plan} does not fit into {LIMIT / 1e9:.0f} GB, which leaves a margin: it needs {held}", False
    ratio = one.seconds / best.seconds
    said = f"{plan}: {one.seconds:.2f} s, {ratio:.2f} times the best, {held}"
    if ratio <= ENOUGH:
        return said, True
    return f"{said}; {_loses(job, one, best)}", False


def _loses(job: Job, one: Forecast, best: Forecast) -> str:
    """In words, the part that loses most time against the best plan; for computing, whether equal stages would help."""
    mine, theirs = one.parts, best.parts
    worst = max(mine, key=lambda part: mine[part] - theirs.get(part, 0))
    text = f"beside the best, it loses most by {WORDS[worst]}"
    if worst == "computing" and one.plan.pp > 1:
        equal = job.forecast(replace(one.plan, balance="computing"))
        if mine[worst] - equal.parts[worst] > (mine[worst] - theirs[worst]) / 2:
            return f'{text} in its fullest stage: {equal.seconds:.2f} s with balance="computing"'
    return text
