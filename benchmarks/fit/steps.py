"""Fits the constants that forecasts of a training step need beyond the clock, and their errors, class by class.

    python -m benchmarks.fit.steps            fit, and print constants and errors
    python -m benchmarks.fit.steps --write    and write the constants to tplab/forecast/measured/constants.json

The constants are: of nanotron, a factor and the host; of Megatron, a factor, another one on a B200 in 16 bit, and the
extra time of a layer of experts on each chip; of torch FSDP, a factor, the host and its share of attention's speed; of
compiled FSDP, a factor.
Logarithms of constants are fitted to logarithms of times, with a loss that grows linearly for outliers.

Errors are of rows that were held out: for each of five folds, the constants are fitted to the other four only. For each
class (`tplab.forecast.classes`) they give an interval that contains nine of ten steps: from quantiles if there are 20
rows or more, and from Student's t if there are fewer.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from math import ceil, floor
from typing import Any, NamedTuple

import numpy as np

from benchmarks.fit.least import least, rounded, write
from tplab.cost import Cluster
from tplab.forecast import layers
from tplab.forecast.block import Block, Tables
from tplab.forecast.classes import ENOUGH, Key, Measured, keys_of, name_of
from tplab.forecast.measured import Run, foundry, playbook, runs
from tplab.forecast.stacks import COMPILED, CONSTANTS, Stack, constants, find_stack
from tplab.forecast.step import Step, seconds_of, step

FOLDS = 5
MANY = 20
HOST = 1e-3
"""Seconds per layer if no run determines them: about two hundred kernels, each launched in 5 us."""
T95 = (0, 6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782, 1.771, 1.761, 1.753,
       1.746, 1.740, 1.734, 1.729, 1.725)  # fmt: skip
"""The 95 % quantile of Student's t, by degrees of freedom."""


@cache
def every() -> tuple[Run, ...]:
    """All published steps."""
    return (*playbook(), *runs(), *foundry())


def forecast_of(run: Run, stack: Stack | None = None) -> Step:
    return step(run.model, run.plan, run.on, run.batch, run.sequence, stack or run.stack)


def ratios(rows: Iterable[Run], stack: Stack | None = None, on: Cluster | None = None) -> np.ndarray:
    """measured / forecast of each run, with this stack and cluster instead of its own, if given. Forecasting all
    together takes half the time of one after the other."""
    rows = list(rows)
    blocks = [
        Block.of_plan(
            run.plan, run.batch, Tables(run.model, on or run.on, run.sequence, find_stack(stack or run.stack, run.plan))
        )
        for run in rows
    ]
    forecast = [sum(part.item() for part in parts.values()) for parts in seconds_of(blocks)]
    return np.array([run.seconds for run in rows]) / forecast


def regret(rows: Iterable[Run]) -> list[float]:
    """For every model and number of GPUs, how much slower than the fastest run the one with the fastest forecast was,
    as a share."""
    cells: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for run in rows:
        cells[run.model.name, run.plan.ranks].append((forecast_of(run).seconds, run.seconds))
    return [min(cell)[1] / min(measured for _, measured in cell) - 1 for cell in cells.values()]


# ------------------------------------------------------------------------------------------------------------- fitting


def fit_stack(rows: Sequence[Run], stack: Stack, begin: Mapping[str, float], scale: float) -> dict[str, float]:
    """The constants of a stack, named by `begin`, with which the forecasts come nearest to the runs.

    scale   the error from which a run counts as an outlier, whose loss grows linearly
    """
    names = list(begin)

    def residuals(theta: np.ndarray) -> np.ndarray:
        return -np.log(ratios(rows, replace(stack, **dict(zip(names, np.exp(theta).tolist())))))

    _, theta = least(residuals, np.log(list(begin.values())), scale)
    return dict(zip(names, (rounded(value) for value in np.exp(theta).tolist())))


class Fit(NamedTuple):
    """The runs that a stack's constants are fitted to, and how."""

    name: str
    chosen: Callable[[Run], bool]
    begin: Mapping[str, float]
    scale: float
    more: Mapping[str, float] = {}


def _is_dense(run: Run) -> bool:
    return run.stack == "megatron" and run.is_fitted and not run.model.experts


FITS = (
    Fit("nanotron", lambda run: run.stack == "nanotron" and run.is_fitted, {"factor": 1.2, "host": 4e-3}, 0.03),
    Fit("megatron", lambda run: _is_dense(run) and "b200" not in run.cluster, {"factor": 1.1}, 0.3, {"host": HOST}),
    Fit(
        "fsdp",
        lambda run: run.stack == "fsdp" and not run.plan.compiled,
        {"factor": 1.2, "host": 1e-3, "attention_share": 0.7},
        0.05,
    ),
    Fit(COMPILED, lambda run: run.stack == "fsdp" and bool(run.plan.compiled), {"factor": 1.1}, 0.3, {"host": HOST}),
)


def fit_constants(rows: Sequence[Run], near: Mapping[str, Mapping[str, float]] | None = None) -> dict[str, Any]:
    """The constants of all stacks, fitted to the runs among these that FITS chooses.

    near    constants of stacks with which the search begins; it takes fewer steps if they are near
    """
    found: dict[str, Any] = {}
    for name, chosen, begin, scale, more in FITS:
        some = [run for run in rows if chosen(run)]
        begin = {key: near[name][key] for key in begin} if near else begin
        found[name] = {**fit_stack(some, replace(find_stack(name), **more), begin, scale), **more}
    found["deepspeed"] = found["megatron"]
    megatron = replace(find_stack("megatron"), **found["megatron"])
    known = constants()["chips"]["B200"]
    b200 = [run for run in rows if _is_dense(run) and "b200" in run.cluster]
    chips = {"B200": rounded(known * fit_stack(b200, megatron, {"factor": 1.1}, 0.3)["factor"] / megatron.factor)}
    routing = {chip: _routing(megatron, [run for run in rows if _has_experts(run, chip)]) for chip in ("H100", "B200")}
    return {"stacks": found, "chips": chips, "routing": routing}


def _has_experts(run: Run, chip: str) -> bool:
    return run.stack == "megatron" and run.is_fitted and bool(run.model.experts) and chip.lower() in run.cluster


def _routing(megatron: Stack, rows: Sequence[Run]) -> float:
    """The median of the seconds per layer of experts and microbatch that forecasts without routing lack."""
    lacking = []
    for run in rows:
        count = run.plan.microbatches(run.batch)
        plain = replace(megatron, name="no routing")  # with another name, it has no constant of experts
        without = step(run.model, run.plan, run.on, run.batch, run.sequence, plain)
        lacking.append((run.seconds - without.seconds) / (run.model.layers / run.plan.pp * count))
    return rounded(float(np.median(lacking)))


# -------------------------------------------------------------------------------------------------------------- errors


def off_fold(near: Mapping[str, Mapping[str, float]]) -> dict[Run, float]:
    """log(measured / forecast) of every run, with constants fitted to the runs of other folds, starting from `near`."""
    fold = {id(run): int(np.random.default_rng((1, place)).integers(FOLDS)) for place, run in enumerate(every())}
    found = dict[int, float]()
    for number in range(FOLDS):
        rest = [run for run in every() if fold[id(run)] != number]
        held = [run for run in every() if fold[id(run)] == number]
        with using(fit_constants(rest, near)):
            found |= zip(map(id, held), np.log(ratios(held)).tolist())
    return {run: found[id(run)] for run in every()}


class using:
    """A context in which forecasts use other constants."""

    def __init__(self, found: Mapping[str, Any]):
        self.found = found

    def __enter__(self) -> None:
        from tplab.forecast import stacks

        self.before = dict(stacks.STACKS), dict(constants())
        stacks.STACKS = {  # type: ignore[misc]
            name: replace(stack, **self.found["stacks"].get(name, {})) for name, stack in stacks.STACKS.items()
        }
        constants().update({name: self.found[name] for name in ("chips", "routing")})  # type: ignore[attr-defined]
        _forget()

    def __exit__(self, *_: object) -> None:
        from tplab.forecast import stacks

        stacks.STACKS, known = self.before  # type: ignore[misc]
        constants().update(known)  # type: ignore[attr-defined]
        _forget()


def _forget() -> None:
    for function in (layers.layer_seconds, layers.ends_seconds):
        function.cache_clear()


def classes(off: Mapping[Run, float]) -> dict[str, dict[str, Any]]:
    """The entry of each class with enough rows, for the file."""
    rows: dict[Key, list[tuple[float, int]]] = defaultdict(list)
    for run, log in off.items():
        stack = find_stack(run.stack, run.plan).name
        for key in dict.fromkeys(keys_of(stack, run.model, run.plan, run.on)):
            rows[key].append((log, run.plan.ranks))
    found = {key: measured_of(name_of(key), some) for key, some in sorted(rows.items()) if len(some) >= ENOUGH}
    return {
        one.name: {name: value for name, value in one._asdict().items() if name != "name"} for one in found.values()
    }


def measured_of(name: str, rows: Sequence[tuple[float, int]]) -> Measured:
    logs = np.sort([log for log, _ in rows])
    n, off = len(logs), np.abs(np.exp(-logs) - 1)
    if n >= MANY:
        low, high = logs[max(0, floor((n + 1) * 0.05) - 1)], logs[min(n, ceil((n + 1) * 0.95)) - 1]
    else:
        width = T95[n - 1] * logs.std(ddof=1) * (1 + 1 / n) ** 0.5
        low, high = logs.mean() - width, logs.mean() + width
    median, most = np.median(off), np.quantile(off, 0.9)
    low, high, median, most = (rounded(float(value)) for value in (np.exp(low), np.exp(high), median, most))
    return Measured(name, n, low, high, median, most, max(ranks for _, ranks in rows))


def fit_all() -> dict[str, Any]:
    """All constants for the file."""
    found = fit_constants(every())
    for name in ("chips", "routing"):
        constants().setdefault(name, found[name])  # type: ignore[attr-defined]
    return {**found, "classes": classes(off_fold(found["stacks"]))}


def main(arguments: Sequence[str]) -> None:
    found = fit_all()
    print(json.dumps({name: found[name] for name in ("stacks", "chips", "routing")}, indent=1))
    for name, of in found["classes"].items():
        shares = f"median {of['median']:6.1%}   nine of ten {of['most']:6.1%}   {of['low']:.2f} to {of['high']:.2f}"
        print(f"{name:90} {of['rows']:4} rows   {shares}   up to {of['ranks']} ranks")
    if "--write" in arguments:
        write(CONSTANTS, found)
    clean = [run for run in playbook() if run.is_fitted]
    print("chosen plan slower than the best: " + ", ".join(f"{lost:.1%}" for lost in sorted(regret(clean))))


if __name__ == "__main__":
    main(sys.argv[1:])
