"""Lab 27's exercises: the bytes of each stage, and remedies; each wrong answer gets words that are true."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest

from labs.source import build
from tplab.exercises.will_it_fit import (
    JOBS,
    LIMIT,
    REMEDIES,
    check_remedies,
    check_stage_bytes,
    first_enough,
)
from tplab.schedules import one_f_one_b
from tplab.schedules.action import F
from tplab.schedules.simulation import peak_activations

FIRST = {"A": "ZeRO 1", "B": "full recomputation", "C": "ZeRO 3", "D": "sequence parallelism"}
RIGHT = {"A": ("ZeRO 1", 74), "B": ("full recomputation", 63), "C": ("ZeRO 3", 74), "D": ("sequence parallelism", 76)}
"""By hand. A: Adam's 48 GB are divided by 4. B: of the activations, 32 inputs of 0.4 GB are left. C: 16 bytes for each
of 70.6 billion parameters, on 16 ranks, and 3.8 GB. D: the activations are divided by 4."""


# --- the bytes of each stage ---------------------------------------------------------------------------------------


def kept_by(stage: int, stages: int, microbatches: int) -> int:
    return min(stages - stage, microbatches)


def stage_bytes(of_parameters: Any = None, in_flight: Callable[[int, int, int], float] = kept_by, states: int = 18):
    """The solution, or one with other parameters, other microbatches in flight, or other bytes per parameter."""

    def fn(cut, microbatches, layer, ends, kept):
        stages = len(cut)
        own = [n * layer + ends * (s == 0) + ends * (s == stages - 1) for s, n in enumerate(cut)]
        held = of_parameters(cut, layer, ends) if of_parameters else own
        return [states * held[s] + in_flight(s, stages, microbatches) * n * kept for s, n in enumerate(cut)]

    return fn


def counted(stage: int, stages: int, microbatches: int) -> int:
    """Another right way: forward passes less backward passes, along the stage's own row of the schedule."""
    schedule = one_f_one_b(stages, microbatches)
    row = schedule.kind[schedule.offsets[stage] : schedule.offsets[stage + 1]]
    return int(np.cumsum(np.where(row == F, 1, -1)).max())


def by_cases(stage: int, stages: int, microbatches: int) -> int:
    left = stages - stage
    if left > microbatches:
        return microbatches
    return left


def borrows(cut, microbatches, layer, ends, kept):
    return peak_activations(one_f_one_b(len(cut), microbatches))


def changes(cut, microbatches, layer, ends, kept):
    cut[0] += 1
    return stage_bytes()(cut, microbatches, layer, ends, kept)


def in_numpy(cut, microbatches, layer, ends, kept):
    return np.array(stage_bytes()(cut, microbatches, layer, ends, kept), float)


def as_a_tuple(cut, microbatches, layer, ends, kept):
    return tuple(stage_bytes()(cut, microbatches, layer, ends, kept))


@pytest.mark.parametrize(
    "right", [stage_bytes(), stage_bytes(in_flight=by_cases), stage_bytes(in_flight=counted), in_numpy, as_a_tuple]
)
def test_right(right: Callable[..., Any]):
    assert check_stage_bytes(right).passed


def first_or_last(cut, layer, ends):
    """With `elif` where a single stage is both."""
    last = len(cut) - 1
    return [n * layer + (ends if s == 0 else ends if s == last else 0) for s, n in enumerate(cut)]


def seeds(*case):
    random.seed(0)
    return stage_bytes()(*case)


def mean(cut, layer, ends):
    return len(cut) * [(sum(cut) * layer + 2 * ends) / len(cut)]


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        (stage_bytes(mean), "are the mean of all stages"),
        (stage_bytes(lambda cut, layer, ends: [n * layer for n in cut]), "leave out the embedding"),
        (stage_bytes(lambda cut, layer, ends: [n * layer + 2 * ends for n in cut]), "Only the first stage has"),
        (
            stage_bytes(
                lambda cut, layer, ends: [
                    sum(cut) / len(cut) * layer + ends * (s in (0, len(cut) - 1)) for s, n in enumerate(cut)
                ]
            ),
            "In stage_bytes(cut=(1, 2, 2, 3)",
        ),
        (stage_bytes(lambda cut, layer, ends: [n * layer + ends for n in cut]), "Others have neither"),
        (stage_bytes(lambda cut, layer, ends: [n * layer + ends * (s == 0) for s, n in enumerate(cut)]), "on the last"),
        (
            stage_bytes(lambda cut, layer, ends: [n * layer + ends * (s == len(cut) - 1) for s, n in enumerate(cut)]),
            "leave out the embedding, on the first stage",
        ),
        (
            stage_bytes(lambda cut, layer, ends: [n * layer + 2 * ends * (s == 0) for s, n in enumerate(cut)]),
            "on the last",
        ),
        (
            lambda cut, m, layer, ends, kept: [
                18 * (n * layer + ends * (s == 0) + ends * (s == len(cut) - 1)) + kept_by(s, len(cut), m) * kept
                for s, n in enumerate(cut)
            ],
            "activations of one layer",
        ),
        (
            stage_bytes(in_flight=lambda s, n, m: sum(kept_by(one, n, m) for one in range(n)) / n),
            "the mean of all stages",
        ),
        (stage_bytes(first_or_last), "it has both the embedding and the output matrix"),
        (stage_bytes(in_flight=lambda s, n, m: min(n - s, m) + 1), "one microbatch too many"),
        (lambda *case: np.array(stage_bytes()(*case)) / 1e9, "yours are 0.0001372.\nThese are GB. Return bytes."),
        (lambda *case: [float("nan")] * len(case[0]), "yours are nan"),
        (
            seeds,
            "in stage_bytes(cut=(4, 4, 4, 4), microbatches=8, layer=1000, ends=3000, kept=700), it leaves Python's",
        ),
        (seeds, "it leaves Python's global generator in another state"),
        (stage_bytes(states=16), "with gradients in float32"),
        (stage_bytes(in_flight=lambda s, n, m: n), "How many forward passes does a later stage run"),
        (stage_bytes(in_flight=lambda s, n, m: min(n, m)), "stage 1 takes"),
        (stage_bytes(in_flight=lambda s, n, m: m), "as in GPipe"),
        (stage_bytes(in_flight=lambda s, n, m: n - s), "more microbatches than there are"),
        (stage_bytes(in_flight=lambda s, n, m: min(n - 1 - s, m)), "kept too"),
        (stage_bytes(in_flight=lambda s, n, m: min(s + 1, m)), "wrong direction"),
        (stage_bytes(in_flight=lambda s, n, m: 1), "How many does a stage keep at once?"),
        (stage_bytes(in_flight=lambda s, n, m: [4, 3, 2, 1][s]), "In stage_bytes(cut=(3, 1, 2)"),
        (stage_bytes(mean, lambda s, n, m: n), "are the mean of all stages"),
        (stage_bytes(mean, lambda s, n, m: n), "How many forward passes does a later stage run"),
        (lambda *case: stage_bytes()(*case).clear(), "is a `return` missing?"),
        (lambda *case: max(stage_bytes()(*case)), "return one number for each of 4 stages"),
        (lambda *case: 1 // 0, "ZeroDivisionError in stage_bytes(cut=(4, 4, 4, 4)"),
        (changes, "it changes the list"),
        (borrows, "`peak_activations` does the work"),
        ([4, 3, 2, 1], "type list"),
        (partial(min, 4), "type partial"),
    ],
)
def test_wrong(wrong: Callable[..., Any], hint: str):
    verdict = check_stage_bytes(wrong)
    assert verdict.passed is False and hint in verdict.text, verdict


def test_numbers_end_with_their_last_digit():
    for number, text in ((0, "0"), (0.5, "0.5"), (1200, "1,200"), (-1e-5, "-0.00001")):
        said = check_stage_bytes(lambda *case: [number] * len(case[0])).text  # noqa: B023 - called at once
        assert said.endswith(f"stage 0 takes 137,200 B, and yours are {text}.")


def test_a_stub_is_not_started():
    def stage_bytes(cut, microbatches, layer, ends, kept) -> Any: ...

    assert check_stage_bytes(stage_bytes).passed is None


def test_the_labs_version_is_the_mean_of_the_stages_and_stage_0s_microbatches():
    cells = (cell.source for cell in build.read_source("27_will_it_fit").cells if cell.cell_type == "code")
    names: dict[str, Any] = {}
    exec(next(source for source in cells if source.startswith("def stage_bytes(")).partition("said = ")[0], names)
    test_wrong(names["stage_bytes"], "are the mean of all stages")
    test_wrong(names["stage_bytes"], "How many forward passes does a later stage run")


# --- remedies ------------------------------------------------------------------------------------------------------


def test_no_job_fits_and_each_has_a_first_remedy():
    assert all(job.peak(job.plan)[0] > LIMIT for job in JOBS.values())
    assert {name: first_enough(job) for name, job in JOBS.items()} == FIRST


def test_each_remedy_is_possible():
    for job, remedy in product(JOBS.values(), REMEDIES.values()):
        assert remedy(job.plan).refusal(job.model, job.batch, job.sequence) is None


def test_the_right_remedies_pass():
    assert check_remedies(RIGHT).passed
    for share in (0.91, 2**-30 * 1e9, 1.09):  # within a tenth
        roughly = {name: (choice, share * JOBS[name].peak(REMEDIES[choice](JOBS[name].plan))[0] / 1e9)
                   for name, choice in FIRST.items()}  # fmt: skip
        assert check_remedies(roughly).passed


def test_a_number_of_gib_is_accepted_and_named():
    peaks = {name: JOBS[name].peak(REMEDIES[choice](JOBS[name].plan))[0] for name, choice in FIRST.items()}
    verdict = check_remedies({name: (choice, peaks[name] / 2**30) for name, choice in FIRST.items()})
    assert verdict.passed and "right: ZeRO 1 brings 109.9 GB down to 73.7 GB (68.7 GiB), in stage 0" in verdict.text


def test_every_forecast_is_clearly_on_one_side_of_the_limit():
    for job in JOBS.values():
        tried = [*REMEDIES][: 1 + [*REMEDIES].index(first_enough(job))]  # of later ones, none is the answer
        plans = job.plan, *(REMEDIES[name](job.plan) for name in tried)
        assert all(abs(job.peak(plan)[0] - LIMIT) >= 1.5e9 for plan in plans), job


def test_every_other_choice_is_refused_with_what_happens():
    for name, choice in product(JOBS, REMEDIES):
        if FIRST[name] == choice:
            continue
        plan = REMEDIES[choice](JOBS[name].plan)
        verdict = check_remedies(RIGHT | {name: (choice, JOBS[name].peak(plan)[0] / 1e9)})
        (line,) = [line for line in verdict.text.splitlines() if line.startswith(f"{name}:")]
        if plan == JOBS[name].plan:
            said = ("is on already", "cannot be halved", "tp is 1")
        else:
            said = ("limit is 80 GB",) if JOBS[name].peak(plan)[0] > LIMIT else ("an earlier remedy is enough",)
        assert verdict.passed is False and any(words in line for words in said), line


def test_trying_every_remedy_tells_nothing_without_the_gigabytes():
    for name, gb in product(REMEDIES, (None, 0, "70", True, 10.0, 300, math.nan, math.inf)):
        verdict = check_remedies(dict.fromkeys(JOBS, (name, gb)))  # type: ignore[arg-type]
        assert verdict.passed is False and "fits" not in verdict.text and "right:" not in verdict.text, verdict
        assert " down to " not in verdict.text, verdict


def test_a_remedy_is_known_by_its_name_however_it_is_written():
    assert check_remedies({name: (f" {choice.upper()} ", gb) for name, (choice, gb) in RIGHT.items()}).passed
    assert check_remedies({name: [choice, np.float64(gb)] for name, (choice, gb) in RIGHT.items()}).passed  # type: ignore[arg-type]


def test_what_is_missing_or_not_in_the_list_is_said():
    assert check_remedies(dict.fromkeys(JOBS, ("", 0))).passed is None
    assert check_remedies(dict.fromkeys(JOBS, "")).passed is None  # type: ignore[arg-type]
    assert "B: no remedy yet" in check_remedies(RIGHT | {"B": ("", 70)}).text
    assert "'zero one' is not in the list" in check_remedies(RIGHT | {"A": ("zero one", 74)}).text
    assert "B: how many GB" in check_remedies(RIGHT | {"B": "full recomputation"}).text  # type: ignore[dict-item]
    assert "A: with ZeRO 1, the forecast is not nan GB" in check_remedies(RIGHT | {"A": ("ZeRO 1", math.nan)}).text
    assert "A: with ZeRO 1, the forecast is not 61 GB" in check_remedies(RIGHT | {"A": ("ZeRO 1", 61)}).text
    assert "C: with ZeRO 3, the forecast is not 82 GB" in check_remedies(RIGHT | {"C": ("ZeRO 3", 82)}).text
    assert "(A rank keeps no bfloat16 parameters.)" in check_remedies(RIGHT | {"C": ("ZeRO-3", 82)}).text
    assert "A: 7.4e+10 is not a number of GB" in check_remedies(RIGHT | {"A": ("ZeRO 1", 74e9)}).text
    assert "type list" in check_remedies([*RIGHT.values()]).text  # pyright: ignore[reportArgumentType]
    assert "A: tp is 1" in check_remedies(RIGHT | {"A": ("sequence parallelism", 74)}).text
    assert "B: ZeRO 1 is on already" in check_remedies(RIGHT | {"B": ("ZeRO 1", 63)}).text
    assert "C: a microbatch of 1 cannot be halved" in check_remedies(RIGHT | {"C": ("half the microbatch", 79)}).text
    assert "ZeRO 1 brings 109.9 GB down to 73.7 GB" in check_remedies(RIGHT).text
