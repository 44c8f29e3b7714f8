"""Lab 25's exercises: microbatches in flight, and remedies; each wrong answer gets words that are true."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest

from tplab.exercises.will_it_fit import JOBS, LIMIT, REMEDIES, check_in_flight, check_remedies, first_enough
from tplab.schedules import one_f_one_b
from tplab.schedules.action import F
from tplab.schedules.simulation import peak_activations

RIGHT = {"A": "ZeRO 1", "B": "full recomputation", "C": "ZeRO 3", "D": "sequence parallelism"}


# --- microbatches in flight ----------------------------------------------------------------------------------------


def counted(stage: int, stages: int, microbatches: int) -> int:
    """Another right way: forward passes less backward passes, along the stage's own row of the schedule."""
    schedule = one_f_one_b(stages, microbatches)
    row = schedule.kind[schedule.offsets[stage] : schedule.offsets[stage + 1]]
    return int(np.cumsum(np.where(row == F, 1, -1)).max())


def borrows(stage: int, stages: int, microbatches: int) -> int:
    return int(peak_activations(one_f_one_b(stages, microbatches))[stage])


def by_cases(stage: int, stages: int, microbatches: int) -> int:
    left = stages - stage
    if left > microbatches:
        return microbatches
    return left


@pytest.mark.parametrize("right", [lambda s, n, m: min(n - s, m), by_cases, counted])
def test_right(right: Callable[[int, int, int], Any]):
    assert check_in_flight(right).passed


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        (lambda s, n, m: n, "Stage 0 is right"),
        (lambda s, n, m: min(n, m), "stage 1 keeps"),
        (lambda s, n, m: m, "as in GPipe"),
        (lambda s, n, m: n - s, "more microbatches than there are"),
        (lambda s, n, m: min(n - 1 - s, m), "kept too"),
        (lambda s, n, m: min(s + 1, m), "wrong direction"),
        (lambda s, n, m: max(n - s, m), "stage 0 keeps"),
        (lambda s, n, m: min(n - s, m) + 1, "stage 0 keeps"),
        (lambda s, n, m: [4, 3, 2, 1][s], "3 stages"),
        (lambda s, n, m: str(min(n - s, m)), "says '4'"),
        (lambda s, n, m: print(end="") if s else n, "Is a `return` missing?"),
        (lambda s, n, m: min(n - s, m) if m > 1 else 0, "With 2 stages and 1 microbatch, stage 0"),
        (lambda s, n, m: 1 // (s - 1), "ZeroDivisionError for stage 1 of 4"),
        (lambda s, n, m: [4, 3, 2, 1] if (n, m) == (4, 8) else 0, "says [4, 3, 2, 1]"),
        (lambda s, n, m: np.ones(2), "ValueError"),
        (lambda s, n, m: min(n - s, m, 16), "24 stages"),
        (borrows, "`peak_activations` does the work"),
        ([4, 3, 2, 1], "type list"),
        (partial(min, 4), "type partial"),
    ],
)
def test_wrong(wrong: Callable[[int, int, int], Any], hint: str):
    verdict = check_in_flight(wrong)
    assert verdict.passed is False and hint in verdict.text, verdict


def test_a_stub_is_not_started():
    def in_flight(stage: int, stages: int, microbatches: int) -> Any: ...

    assert check_in_flight(in_flight).passed is None


# --- remedies ------------------------------------------------------------------------------------------------------


def test_no_job_fits_and_each_has_a_first_remedy():
    assert all(job.peak(job.plan)[0] > LIMIT for job in JOBS.values())
    assert {name: first_enough(job) for name, job in JOBS.items()} == RIGHT


def test_each_remedy_is_possible():
    for job, remedy in product(JOBS.values(), REMEDIES.values()):
        assert remedy(job.plan).refusal(job.model, job.batch, job.sequence) is None


def test_the_right_remedies_pass():
    assert check_remedies(RIGHT).passed


def test_every_forecast_is_clearly_on_one_side_of_the_limit():
    for job, remedy in product(JOBS.values(), REMEDIES.values()):
        assert all(abs(job.peak(plan)[0] - LIMIT) >= 3e9 for plan in (job.plan, remedy(job.plan))), job


def test_every_other_choice_is_refused_with_what_happens():
    for name, choice in product(JOBS, REMEDIES):
        if RIGHT[name] == choice:
            continue
        verdict = check_remedies(RIGHT | {name: choice})
        (line,) = [line for line in verdict.text.splitlines() if line.startswith(f"{name}:")]
        plan = REMEDIES[choice](JOBS[name].plan)
        if plan == JOBS[name].plan:
            said = ("is on already", "cannot be halved", "tp is 1")
        else:
            said = ("limit is 85.0 GB",) if JOBS[name].peak(plan)[0] > LIMIT else ("an earlier remedy is enough",)
        assert verdict.passed is False and any(words in line for words in said), line


def test_a_remedy_is_known_by_its_name_however_it_is_written():
    assert check_remedies({name: f" {choice.upper()} " for name, choice in RIGHT.items()}).passed


def test_what_is_missing_or_not_in_the_list_is_said():
    assert check_remedies(dict.fromkeys(JOBS, "")).passed is None
    assert "B: no remedy yet" in check_remedies(RIGHT | {"B": ""}).text
    assert "'zero one' is not in the list" in check_remedies(RIGHT | {"A": "zero one"}).text
    assert "type list" in check_remedies([*RIGHT.values()]).text  # pyright: ignore[reportArgumentType]
    assert "A: tp is 1" in check_remedies(RIGHT | {"A": "sequence parallelism"}).text
    assert "B: ZeRO 1 is on already" in check_remedies(RIGHT | {"B": "ZeRO 1"}).text
    assert "C: a microbatch of 1 cannot be halved" in check_remedies(RIGHT | {"C": "half the microbatch"}).text
    assert "ZeRO 1 brings 109.9 GB down to 73.7 GB" in check_remedies(RIGHT).text
