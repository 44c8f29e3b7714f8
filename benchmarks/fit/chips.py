"""Fits NCCL in a node and kernels of chips to the tables in tplab/cost/measured, and prints their errors.

    python -m benchmarks.fit.chips              fit, and print constants and errors
    python -m benchmarks.fit.chips --write      and write them to tplab/cost/measured/constants.json
    python -m benchmarks.fit.chips --hold-out   how far off the model is on rows that it has not seen: a third of the
                                                rows at a time, then whole numbers of GPUs, and every fifth size

What is fitted are logarithms of constants, to logarithms of times, with a loss that grows linearly for outliers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.fit import attention, matmuls
from benchmarks.fit.least import Array, least, print_errors, rounded, summary, third, write
from benchmarks.fit.tables import prompts
from tplab.cost.attention import Attention
from tplab.cost.fabric import Error
from tplab.cost.measured import CONSTANTS, Collective, collectives, kernels_of
from tplab.cost.nccl import Nccl, Ratios

MIB = 2.0**20
KINDS = ("a100", "b200", "h100")
_OWN = ("start", "hop", "middle", "wait", "ramp", "bandwidth", "in_switch", "peer_copy")
_RATIOS = tuple(name for name in Ratios._fields if name != "peer_ramp")
_SWITCHES = [MIB * size for size in (0.5, 0.7, 0.9, 1.1, 1.35, 1.6, 1.9, 2.2, 2.7, 3.2, 3.8, 4.5, 5.4, 6.4, 7.6, 9.0)]
_BEGIN = {
    "start": 7e-6, "hop": 1e-6, "middle": 2e-6, "wait": 5e-6, "ramp": 6e-6 / MIB**0.5, "bandwidth": 3e11,
    "in_switch": 3e11, "peer_copy": 0.35, "ll128": 2.0, "ll": 13.0, "copy": 0.35, "peer_hop": 0.35,
    "peer_ll": 150e-6 / MIB, "peer_large": 1.1, "peer": 1.2,
}  # fmt: skip


# --------------------------------------------------------------------------------------------------------------- NCCL


def fit_collectives(rows: Sequence[Collective], rounds: int = 3) -> dict[str, Nccl]:
    """The constants of every kind of GPU in `rows`, with the ratios that they share."""
    kinds = sorted({row.gpu for row in rows})
    of = {kind: [row for row in rows if row.gpu == kind] for kind in kinds}
    switch = dict.fromkeys(kinds, 2.2 * MIB)
    own = {kind: np.log([_BEGIN[name] for name in _OWN]) for kind in kinds}
    shared = np.log([_BEGIN.get(name, 1.25) for name in _RATIOS])
    width = len(_OWN)

    def together() -> None:
        nonlocal shared

        def all_residuals(theta: Array) -> Array:
            ratios = theta[len(kinds) * width :]
            parts = [theta[i * width : (i + 1) * width] for i in range(len(kinds))]
            made = zip(kinds, parts)
            return np.concatenate([_off(_nccl(kind, part, ratios, switch[kind]), of[kind]) for kind, part in made])

        _, theta = least(all_residuals, np.concatenate([*own.values(), shared]), 0.05)
        shared = theta[len(kinds) * width :]
        own.update({kind: theta[i * width : (i + 1) * width] for i, kind in enumerate(kinds)})

    for _ in range(rounds):
        together()
        for kind in kinds:
            trials: list[tuple[float, float, Array]] = []
            for size in _SWITCHES:

                def residuals(theta: Array, kind: str = kind, size: float = size) -> Array:
                    return _off(_nccl(kind, theta, shared, size), of[kind])

                found, theta = least(residuals, own[kind], 0.05, 12)
                trials.append((found, size, theta))
            _, switch[kind], own[kind] = min(trials, key=lambda trial: trial[0])
    together()
    return {kind: _nccl(kind, own[kind], shared, switch[kind]) for kind in kinds}


def _nccl(kind: str, own: Array, ratios: Array, switch: float) -> Nccl:
    values: dict[str, Any] = dict(zip(_OWN, np.exp(own).tolist()))
    if kind == "a100":
        values["in_switch"] = 0.0  # its switch does no reductions
    return Nccl(**values, switch=switch, ratios=Ratios(*np.exp(ratios).tolist()))


def _off(nccl: Nccl, rows: Sequence[Collective]) -> Array:
    return np.log([nccl.taken(row.op, row.bytes, row.gpus).seconds / row.seconds for row in rows])


# ------------------------------------------------------------------------------------------------------------- errors


def collective_errors(rows: Sequence[Collective], fitted: Mapping[str, Nccl]) -> list[float]:
    """predicted / measured - 1, for each row."""
    return [fitted[row.gpu].taken(row.op, row.bytes, row.gpus).seconds / row.seconds - 1 for row in rows]


def hold_out() -> dict[str, dict[str, dict[str, Error]]]:
    """way to hold rows out -> table -> kind of GPU -> the errors on rows that were held out"""
    found: dict[str, dict[str, dict[str, Error]]] = {}
    rows = collectives()
    ways = {
        "thirds": [[third(i, seed) == part for i in range(len(rows))] for seed in (0, 1) for part in range(3)],
        "numbers of GPUs": [[row.gpus == number for row in rows] for number in (2, 4, 8)],
        "sizes": [[round(np.log2(row.bytes)) % 5 == part for row in rows] for part in range(5)],
    }
    for name, masks in ways.items():
        off: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for out in masks:
            fitted = fit_collectives([row for row, left in zip(rows, out) if not left], 2)
            left_out = [row for row, left in zip(rows, out) if left]
            for row, error in zip(left_out, collective_errors(left_out, fitted)):
                off[row.gpu].append(error)
        found[name] = {"collectives": {kind: summary(errors) for kind, errors in off.items()}}
    found["thirds"] |= matmuls.hold_out()
    found["thirds"]["attention"] = attention.hold_out()
    return found


def fit_all() -> dict[str, Any]:
    """All constants for the file."""
    fitted = fit_collectives(collectives())
    ratios = next(iter(fitted.values())).ratios._asdict()
    del ratios["peer_ramp"]
    return {
        "nccl": {kind: {name: rounded(getattr(of, name)) for name in (*_OWN, "switch")} for kind, of in fitted.items()},
        "ratios": {name: rounded(value) for name, value in ratios.items()},
        **matmuls.found_all(),
        **attention.found_all(),
    }


def main(arguments: Sequence[str]) -> None:
    found = fit_all()
    if "--hold-out" in arguments or "--write" in arguments:
        held_out = hold_out()
        for way, tables in held_out.items():
            for table, errors in tables.items():
                print_errors(f"{table}, {way} left out", errors)
        found["errors"] = held_out["thirds"]
    if "--write" in arguments:
        write(CONSTANTS, found)
    print(json.dumps(found, indent=1))
    _print_seen(found)


def _print_seen(found: Mapping[str, Any]) -> None:
    """Print errors on the fitted rows themselves."""
    ratios = Ratios(**found["ratios"])
    fitted = {kind: Nccl(**values, ratios=ratios) for kind, values in found["nccl"].items()}
    off = dict(zip(collectives(), collective_errors(collectives(), fitted)))
    print_errors("collectives, fitted", {k: summary([e for row, e in off.items() if row.gpu == k]) for k in KINDS})
    for kind in matmuls.CHIPS:
        kernels = kernels_of(kind, found)
        print_errors("matmuls, fitted", {kind: summary(matmuls.matmul_errors(kind, kernels))})
        if kind in matmuls.IN_8_BIT:
            fitted = kernels, matmuls.Conversion(**found["converted"][kind])
            print_errors("matmuls in 8 bit, fitted", {kind: summary(matmuls.errors_in_8_bit(kind, fitted))})
    for kind, written in found["written"].items():
        fitted = Attention(**found["attention"][kind][-1]), written
        errors = attention.attention_errors(prompts(kind), fitted).tolist()
        print_errors("attention, fitted", {kind: summary(errors)})


if __name__ == "__main__":
    main(sys.argv[1:])
