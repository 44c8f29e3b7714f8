"""Lab 28's exercises: a guess beside measured runs, useful FLOPs, and a rule that chooses layouts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from tplab.exercises import which_layout
from tplab.exercises.which_layout import Job, check_choose, check_guess, check_mfu, measured_runs
from tplab.forecast import Forecast, Model, Plan, plans
from tplab.forecast.memory import peak_bytes
from tplab.forecast.rows import forecast_rows

# --- a guess -------------------------------------------------------------------------------------------------------


def test_guesses():
    cell: dict[str, Any] = {"model": "playbook-3b", "gpus": 16}
    assert check_guess(None, None, None, **cell).passed is None
    assert check_guess(16, 1, 2, **cell).passed
    slow = check_guess(2, 8, 1, **cell)
    assert slow.passed is False and "times as long" in slow.text
    assert "32 ranks" in check_guess(8, 4, 1, **cell).text
    assert "Runs with tp " in check_guess(1, 16, 2, **cell).text
    unknown = check_guess(16, 1, 7, **cell)
    sizes = {run.plan.microbatch for run in measured_runs("playbook-3b", 16) if run.plan.tp == 1}
    assert all(str(size) in unknown.text for size in sizes) and "dp 16" not in unknown.text
    assert "may not fit" in check_guess(16, 1, 4, **cell).text and "does not fit" in check_guess(16, 1, 16, **cell).text
    assert "does not divide" in unknown.text and "Forecast: 4.12 s: computing" in check_guess(16, 1, 2, **cell).text
    assert "No run of llama3-8b" in check_guess(16, 1, 2, "llama3-8b", 16).text


@pytest.mark.parametrize("bad", ["16", 0, -16, True, 1.5, float("nan")])
def test_a_guess_is_three_whole_numbers(bad: Any):
    verdict = check_guess(bad, 1, 2, "playbook-3b", 16)
    assert verdict.passed is False and f"dp is {bad!r}" in verdict.text


def test_every_measured_layout_can_be_guessed():
    runs = measured_runs("playbook-3b", 16)
    verdicts = [check_guess(r.plan.dp, r.plan.tp, r.plan.microbatch, "playbook-3b", 16) for r in runs]
    assert all("Measured" in one.text for one in verdicts) and verdicts[0].passed and not verdicts[-1].passed


# --- useful FLOPs --------------------------------------------------------------------------------------------------

PEAK = 989e12


def useful(one: Forecast) -> float:
    flops = one.model.flops_per_token(one.sequence) * one.batch * one.sequence
    return flops / (one.seconds * one.plan.ranks * PEAK)


@pytest.mark.parametrize("right", [useful, lambda one: useful(one) * 989 / 989.4, lambda one: np.float64(useful(one))])
def test_right(right: Callable[[Forecast], float]):
    assert check_mfu(right).passed


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        (lambda one: useful(one) * (4 / 3 if one.plan.recompute == "full" else 1), "a second time"),
        (lambda one: useful(one) * 4 / 3, "no layer is computed a second time here"),
        (lambda one: useful(one) * (4 / 3 if one.plan.recompute != "none" else 1), "no layer is computed a second"),
        (lambda one: useful(one) * 6 * one.model.parameters / one.model.flops_per_token(one.sequence), "of attention"),
        (lambda one: one.mfu, "`one` has model, plan, batch, sequence, seconds"),
        (lambda one: useful(one) * one.plan.ranks / (one.plan.dp * one.plan.tp), "with selective recomputation"),
        (
            lambda one: useful(one) * one.model.flops_per_token(4096) / one.model.flops_per_token(one.sequence),
            "depend on",
        ),
        (lambda one: float("nan"), "Divide"),
        (partial(useful), "type partial"),
        (lambda one: useful(one) * one.plan.ranks, "all 8 GPUs"),
        (lambda one: useful(one) / 3, "forward pass alone"),
        (lambda one: useful(one) * (3 / 4 if one.plan.recompute == "full" else 1), "a quarter is taken off"),
        (lambda one: 100 * useful(one), "percentage"),
        (lambda one: one.seconds, "Divide"),
        (lambda one: 0.4, "Divide"),
        (lambda one: useful(one) / one.plan.dp, "Divide"),
        (lambda one: 1 / 0, "ZeroDivisionError"),
        (lambda one: "fast", "ValueError"),
        (lambda one: round(useful(one), 2), "Do not round"),
        (lambda one: print(end="") if one.seconds else 1, "is a `return` missing?"),
    ],
)
def test_wrong(wrong: Callable[[Forecast], Any], hint: str):
    verdict = check_mfu(wrong)
    assert verdict.passed is False and hint in verdict.text, verdict


# --- a rule --------------------------------------------------------------------------------------------------------


def rule(
    tps: tuple[int, ...] = (1, 2, 4, 8),
    pps: tuple[int, ...] = (1, 2, 4, 8),
    microbatches: tuple[int, ...] = (2, 1),
    limit: float = 78e9,
    **fields: Any,
) -> Callable[[Model, int, int, int], Plan]:
    """The first plan that fits, with few stages first, then little tensor parallelism."""

    def choose(model: Model, gpus: int, batch: int, sequence: int) -> Plan:
        for pp in pps:
            for tp in tps:
                for microbatch in microbatches:
                    how = {"zero": 1, "sequence_parallel": tp > 1, **fields}
                    plan = Plan(dp=max(1, gpus // tp // pp), tp=tp, pp=pp, microbatch=microbatch, **how)
                    if plan.ranks != gpus or plan.refusal(model, batch, sequence):
                        continue
                    if peak_bytes(model, plan, batch, sequence) <= limit:
                        return plan
        raise LookupError("nothing fits")

    return choose


def by_size(model: Model, gpus: int, batch: int, sequence: int) -> Plan:
    """Another right way: ZeRO 3 for what is small, and a fixed layout for what is large."""
    if model.parameters < 20e9:
        return Plan(dp=gpus, zero=3)
    return Plan(dp=gpus // 32, tp=4, pp=8, zero=1, sequence_parallel=True)


def by_table(model: Model, gpus: int, batch: int, sequence: int) -> Plan:
    """As the lab's table says: ZeRO 3 alone, or else little tensor parallelism, then stages."""
    alone = Plan(dp=gpus, zero=3)
    if alone.refusal(model, batch, sequence) or peak_bytes(model, alone, batch, sequence) > 80e9:
        return rule(tps=(2, 4), microbatches=(1,), limit=80e9)(model, gpus, batch, sequence)
    return alone


@pytest.mark.parametrize("right", [rule(), rule(tps=(1, 2, 4)), by_size, by_table])
def test_right_rules(right: Callable[..., Plan]):
    verdict = check_choose(right)
    assert verdict.passed, verdict


def searches(model: Model, gpus: int, batch: int, sequence: int) -> Plan:
    return plans(model, which_layout.CLUSTER, gpus=gpus, batch=batch, sequence=sequence)[0].plan


def by_rows(model: Model, gpus: int, batch: int, sequence: int) -> Any:
    return next(forecast_rows([{"model": model.name, "gpus": gpus, "batch": batch, "sequence": sequence}]))


def by_job(model: Model, gpus: int, batch: int, sequence: int) -> Plan:
    job = Job(model.name, gpus, batch, sequence)
    return min((Plan(dp=gpus // 8, tp=8), Plan(dp=gpus, zero=3)), key=lambda plan: job.forecast(plan).seconds)


def by_list(model: Model, gpus: int, batch: int, sequence: int) -> Plan:
    """Right for every job that the lab prints, and for no other."""
    listed = {(one.model, one.gpus): one for one in which_layout.JOBS}
    job = listed[model.name, gpus]
    return by_size(Model.find(job.model), job.gpus, job.batch, job.sequence)


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        (lambda model, gpus, batch, sequence: Plan(dp=gpus // 8, pp=8, zero=1), "in its fullest stage"),
        (
            lambda model, gpus, batch, sequence: Plan(dp=gpus // 8, tp=8, zero=1),
            "does not fit into 80 GB, which leaves",
        ),
        (rule(tps=(8,)), "loses most by messages of tensor parallelism"),
        (rule(limit=200e9), "does not fit"),
        (rule(recompute="full"), "loses most by recomputation"),
        (rule(pps=(8,)), "times the best"),
        (rule(tps=(4,)), "loses most by messages of tensor parallelism"),
        (rule(sequence_parallel=False), "nothing fits"),
        (lambda model, gpus, batch, sequence: Plan(dp=gpus), "does not fit"),
        (lambda model, gpus, batch, sequence: Plan(tp=gpus), "does not divide"),
        (lambda model, gpus, batch, sequence: Plan(dp=2, tp=4, zero=3), "has 8 ranks"),
        (lambda model, gpus, batch, sequence: print() if gpus < 0 else None, "return a Plan"),
        (lambda model, gpus, batch, sequence: (gpus, 1, 1), "return a Plan"),
        (lambda model, gpus, batch, sequence: Plan(dp=gpus, zero=3, recompute="full"), "loses most by recomputation"),
        (lambda model, gpus, batch, sequence: Plan(dp=gpus // 8, tp=8, zero=1, sequence_parallel=True), "8 GPUs"),
        (lambda model, gpus, batch, sequence: Plan(dp=gpus // 0), "ZeroDivisionError"),
        (searches, "`plans` does the work"),
        (by_rows, "`forecast_rows` does the work"),
        (by_job, "`Job` does the work"),
        (by_list, "llama3-8b on 32 GPUs"),
        ([Plan(dp=8)], "type list"),
    ],
)
def test_wrong_rules(wrong: Callable[..., Any], hint: str):
    verdict = check_choose(wrong)
    assert verdict.passed is False and hint in verdict.text, verdict


def test_stubs_are_not_started():
    def choose(model: Model, gpus: int, batch: int, sequence: int) -> Any: ...

    assert check_choose(choose).passed is None
    assert len(which_layout.JOBS) == 5
