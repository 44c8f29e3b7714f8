"""Fits what forecasts of a training step need beyond the clock, and prints how far off they are.

    python -m benchmarks.fit.steps            fit, and print constants and errors
    python -m benchmarks.fit.steps --write    and write the constants to tplab/forecast/measured/constants.json

Fitted are two numbers of nanotron (factor and host), one of Megatron, one of FSDP, and one of a B200 in 16 bit. A third
of nanotron's and Megatron's runs, always the same, is left out, and its errors are printed apart. Logarithms of
constants are fitted to logarithms of times, with a loss that grows linearly for outliers.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from benchmarks.fit.least import least, write
from tplab.forecast.measured import Run, playbook, runs, split
from tplab.forecast.stacks import CONSTANTS, Stack, constants, find_stack
from tplab.forecast.step import Step, step

COVERED = 0.9
"""The share of the fitted runs that lie between `low` and `high`."""
FEW = 40
"""Of so many runs or fewer, quantiles say little."""
HOST = 1e-3
"""s per layer where no run tells: about two hundred kernels, each started in 5 us."""


class Errors(NamedTuple):
    """Shares of the measured time, over so many runs: half are nearer than `median`, nine of ten than `most`, and all
    than `worst`. covered: the share of the runs between low and high."""

    rows: int
    median: float
    most: float
    worst: float
    covered: float


def ratios(rows: Iterable[Run], stacks: Mapping[str, Stack] | None = None) -> np.ndarray:
    """measured / forecast of each run."""
    return np.array([run.seconds / forecast_of(run, (stacks or {}).get(run.stack)).seconds for run in rows])


def forecast_of(run: Run, stack: Stack | None = None) -> Step:
    return step(run.model, run.plan, run.on, run.batch, run.sequence, stack or run.stack)


def errors(rows: Sequence[Run], stacks: Mapping[str, Stack] | None = None) -> Errors:
    found = [forecast_of(run, (stacks or {}).get(run.stack)) for run in rows]
    inside = [step.low <= run.seconds <= step.high for run, step in zip(rows, found)]
    off = np.array([abs(step.seconds / run.seconds - 1) for run, step in zip(rows, found)])
    numbers = (np.median(off), np.quantile(off, 0.9), off.max(), np.mean(inside))
    return Errors(len(rows), *(round(float(number), 3) for number in numbers))


def regret(rows: Iterable[Run], stacks: Mapping[str, Stack] | None = None) -> list[float]:
    """For every model and number of GPUs: by which share the run that the forecast takes for the fastest was slower
    than the fastest one."""
    cells: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for run in rows:
        seconds = forecast_of(run, (stacks or {}).get(run.stack)).seconds
        cells[run.model.name, run.plan.ranks].append((seconds, run.seconds))
    return [min(cell)[1] / min(measured for _, measured in cell) - 1 for cell in cells.values()]


# ------------------------------------------------------------------------------------------------------------- fitting


def fit_stack(rows: Sequence[Run], begin: Mapping[str, float], scale: float = 0.03) -> dict[str, float]:
    """The constants of a stack that `begin` names, with which the runs come nearest to their forecasts.

    scale   from which error on a run counts as an outlier: its loss grows linearly
    """
    stack, names = find_stack(rows[0].stack), list(begin)

    def residuals(theta: np.ndarray) -> np.ndarray:
        tried = replace(stack, **dict(zip(names, np.exp(theta).tolist())))
        return -np.log(ratios(rows, {stack.name: tried}))

    _, theta = least(residuals, np.log(list(begin.values())), scale)
    return dict(zip(names, np.exp(theta).tolist()))


def fit_all() -> dict[str, Any]:
    """All constants, as they are written."""
    nanotron, others = split(playbook())[0], split(runs())[0]
    megatron = [run for run in others if run.stack == "megatron"]
    plain = [run for run in megatron if run.cluster != "b200-measured"]
    chip = [run for run in runs() if run.cluster == "b200-measured"]  # four: none is left out
    found = {
        "nanotron": fit_stack(nanotron, {"factor": 1.3, "host": 4e-3}),
        "megatron": {**fit_stack(plain, {"factor": 1.1}, 0.3), "host": HOST},  # papers' tables have no outliers
        "fsdp": {**fit_stack([run for run in runs() if run.stack == "fsdp"], {"factor": 1.1}), "host": HOST},
    }
    b200 = constants()["chips"]["B200"] * fit_stack(chip, {"factor": 1.1})["factor"] / found["megatron"]["factor"]
    for name, rows in (("nanotron", nanotron), ("megatron", plain)):
        found[name] |= interval(ratios(rows, {name: replace(find_stack(name), **found[name])}))
    widest = {"low": min(of["low"] for of in found.values() if "low" in of)}
    widest["high"] = max(of["high"] for of in found.values() if "high" in of)
    found["fsdp"] |= widest
    found["deepspeed"] = {**found["megatron"], **widest}
    megatron = {"megatron": replace(find_stack("megatron"), **found["megatron"])}
    experts = interval(ratios([run for run in runs() if run.model.experts], megatron))
    written = {"stacks": found, "chips": {"B200": b200}, "experts": experts}
    return json.loads(json.dumps(written), parse_float=lambda text: float(f"{float(text):.4g}"))


def interval(by: np.ndarray) -> dict[str, float]:
    """Between which shares of the forecast COVERED of the measured times lie. If there are few, two standard deviations
    around their mean stand in."""
    if len(by) > FEW:
        low, high = np.quantile(by, ((1 - COVERED) / 2, (1 + COVERED) / 2))
    else:
        mean, width = np.log(by).mean(), 2 * np.log(by).std(ddof=1)
        low, high = np.exp((mean - width, mean + width))
    return {"low": float(low), "high": float(high)}


TABLES = (
    ("nanotron on H100, playbook", "nanotron", "h100-measured"),
    ("Megatron on A100, papers", "megatron", "a100-measured"),
    ("Megatron on H100, FP8", "megatron", "h100-measured"),
    ("Megatron on B200", "megatron", "b200-measured"),
)
"""What a table of errors has a line for: its name, the stack, the cluster."""


def table(stacks: Mapping[str, Stack] | None = None) -> list[tuple[str, Errors | None, Errors | None]]:
    """(what, errors on the runs that were fitted, on those left out) for each of TABLES."""
    found = []
    for name, stack, cluster in TABLES:
        parts = split(playbook() if stack == "nanotron" else runs())
        if cluster == "b200-measured":
            parts = parts[0] + parts[1], []
        chosen = [[run for run in part if (run.stack, run.cluster) == (stack, cluster)] for part in parts]
        found.append((name, *(errors(rows, stacks) if rows else None for rows in chosen)))
    return found


UNSEEN = {
    "Megatron on A100, table 1, never fitted": ("narayanan2021",),
    "Megatron on A100, table 2, never fitted": ("narayanan2021-ptd",),
    "Llama 3 on H100, never fitted": ("llama3",),
    "DeepSpeed ZeRO 3 on A100, rules chosen": ("narayanan2021-zero3",),
    "mixtures of experts on H100, interval fitted": ("bridge-25.11", "bridge-25.09", "modelzoo"),
}
"""Rows that no constant of their seconds was fitted to: a name, and their sources. How DeepSpeed sends was chosen when
its rows were known; the interval of mixtures of experts is that of their rows."""


def unseen(stacks: Mapping[str, Stack] | None = None) -> list[tuple[str, Errors]]:
    """(what, errors) for each of UNSEEN."""
    found = []
    for name, sources in UNSEEN.items():
        rows = [run for run in runs() if run.source in sources and not run.is_fitted]
        found.append((name, errors(rows, stacks)))
    return found


def main(arguments: Sequence[str]) -> None:
    found = fit_all()
    if "--write" in arguments:
        write(CONSTANTS, found)
    print(json.dumps(found, indent=1))
    stacks = {name: replace(find_stack(name), **of) for name, of in found["stacks"].items()}
    lines = [(name, which, of) for name, *pair in table(stacks) for which, of in zip(("fitted", "left out"), pair)]
    for name, of in [(f"{name}, {which}", of) for name, which, of in lines] + unseen(stacks):
        if of:
            median, most, worst, covered = (100 * share for share in of[1:])
            text = f"median {median:4.1f} %   nine of ten {most:4.1f} %   worst {worst:4.0f} %"
            print(f"{name:39} {of.rows:3} runs   {text}   covered {covered:3.0f} %")
    for which, rows in zip(("fitted", "left out"), split(playbook())):
        mean, worst = (100 * of(regret(rows, stacks)) for of in (np.mean, max))
        print(f"chosen plan slower than the best, {which}: mean {mean:.1f} %, worst {worst:.1f} %")


if __name__ == "__main__":
    main(sys.argv[1:])
