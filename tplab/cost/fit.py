"""Fits the constants of the forecasts to the tables in tplab/cost/measured, and prints their errors.

    python -m tplab.cost.fit            fit, and print constants and errors
    python -m tplab.cost.fit --write    and write them to tplab/cost/measured/constants.json
    python -m tplab.cost.fit --hold-out how far off the model is on rows that it has not seen: a third of the rows at a
                                        time, then whole numbers of GPUs, and every fifth size

What is fitted are logarithms of constants, to logarithms of times, with a loss that grows linearly for outliers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tplab.cost.chip import Chip
from tplab.cost.cluster import Cluster
from tplab.cost.data_sheets import A100, H100
from tplab.cost.fabric import Error, Fabric
from tplab.cost.kernels import Kernels, Shared
from tplab.cost.measured import (
    CONSTANTS,
    MULTIPROCESSORS,
    NETWORK_BYTES,
    Collective,
    Matmul,
    Network,
    collectives,
    matmuls,
    network,
)
from tplab.cost.named import H100_MEASURED
from tplab.cost.nccl import Nccl, Ratios

Array = np.ndarray[Any, np.dtype[np.float64]]
MIB = 2.0**20
CHIPS = {"a100": A100, "h100": H100}
KINDS = ("a100", "b200", "h100")
_OWN = ("start", "hop", "middle", "large", "ramp", "bandwidth", "in_switch")
_KERNELS = ("flops", "bandwidth", "load", "finish")
_RATIOS = tuple(name for name in Ratios._fields if name != "peer_ramp")
_SWITCHES = [MIB * size for size in (0.5, 0.75, 1.1, 1.6, 2.2, 3.2, 4.5, 6.4, 9.0)]
_BEGIN = {
    "start": 7e-6, "hop": 1e-6, "middle": 2e-6, "large": 7e-6, "ramp": 6e-6 / MIB**0.5, "bandwidth": 3e11,
    "in_switch": 3e11, "ll128": 2.0, "ll": 13.0, "copy": 0.35, "peer_hop": 0.35, "peer_ll": 150e-6 / MIB,
    "peer_large": 1.1, "peer": 1.2,
}  # fmt: skip


# ------------------------------------------------------------------------------------------------------ least squares


def least(
    residuals: Callable[[Array], Array], begin: Array, scale: float, steps: int = 40, shares: Sequence[int] = ()
) -> tuple[float, Array]:
    """Levenberg and Marquardt's method, on a loss of 2 (sqrt(1 + (r/scale)^2) - 1). Returns the loss and where it is.

    No parameter, which is a logarithm, moves by more than 6; those of `shares` stay at 1 or below.
    """
    theta, damping = begin.copy(), 1e-2
    most = begin + 6
    most[list(shares)] = 0

    def loss(r: Array) -> float:
        return float(2 * (np.sqrt(1 + (r / scale) ** 2) - 1).sum())

    r = residuals(theta)
    now = loss(r)
    for _ in range(steps):
        jacobian = np.empty((len(r), len(theta)))
        for place in range(len(theta)):
            moved = theta.copy()
            moved[place] += 1e-4
            jacobian[:, place] = (residuals(moved) - r) / 1e-4
        weight = 1 / np.sqrt(1 + (r / scale) ** 2)
        normal, gradient = (jacobian.T * weight) @ jacobian, (jacobian.T * weight) @ r
        before = now
        for _ in range(8):
            by = damping * (np.diag(normal) + 1e-6)
            tried = np.clip(theta - np.linalg.solve(normal + np.diag(by), gradient), begin - 6, most)
            other = residuals(tried)
            if loss(other) < now:
                theta, r, now, damping = tried, other, loss(other), damping / 4
                break
            damping *= 4
        if before - now < 1e-5 * before:
            break
    return now, theta


# --------------------------------------------------------------------------------------------------------------- NCCL


def fit_collectives(rows: Sequence[Collective], rounds: int = 3) -> dict[str, Nccl]:
    """The constants of every kind of GPU in `rows`, together with the ratios that they share."""
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
        values["in_switch"] = 0.0  # its switch does not add
    return Nccl(**values, switch=switch, ratios=Ratios(*np.exp(ratios).tolist()))


def _off(nccl: Nccl, rows: Sequence[Collective]) -> Array:
    return np.log([nccl.taken(row.op, row.bytes, row.gpus).seconds / row.seconds for row in rows])


# ------------------------------------------------------------------------------------------------------------ matmuls


def fit_matmuls(rows: Mapping[str, Sequence[Matmul]]) -> dict[str, Kernels]:
    kinds = sorted(rows)
    begin = np.log([*(0.85, 0.8, 1e11, 3e-6 / 32768) * len(kinds), 2.5e-6, 2.5e-6, 0.5])
    tables = {kind: np.array([row[:3] for row in rows[kind]], float).T for kind in kinds}
    taken = {kind: np.array([row.seconds for row in rows[kind]]) for kind in kinds}

    def made(theta: Array) -> dict[str, Kernels]:
        shared = Shared(*np.exp(theta[-3:]).tolist())
        parts = {kind: np.exp(theta[4 * i : 4 * i + 4]).tolist() for i, kind in enumerate(kinds)}
        return {kind: _kernels(kind, dict(zip(_KERNELS, parts[kind])), shared) for kind in kinds}

    def residuals(theta: Array) -> Array:
        off: list[Array] = []
        for kind, kernels in made(theta).items():
            m, n, k = tables[kind]
            chip = CHIPS[kind]
            off.append(np.log(kernels.matmul_seconds(m, n, k, 2, chip.peak("bfloat16"), chip.memory_bandwidth)))
            off[-1] -= np.log(taken[kind])
        return np.concatenate(off)

    return made(least(residuals, begin, 0.08, shares=[4 * i + j for i in range(len(kinds)) for j in (0, 1)])[1])


def _kernels(kind: str, values: Mapping[str, float], shared: Shared) -> Kernels:
    multiprocessors, cache = MULTIPROCESSORS[kind]
    return Kernels(**values, multiprocessors=multiprocessors, cache=cache, shared=shared)


# ------------------------------------------------------------------------------------------------------------ network


def fit_network(rows: Sequence[Network], node: Cluster) -> Fabric:
    """The fabric with the least sum of errors, of all on a grid."""
    grid = [
        Fabric(round(float(reached), 3), round(float(congestion), 2))
        for reached in np.arange(0.5, 1.001, 0.025)
        for congestion in np.arange(0.0, 1.201, 0.02)
    ]
    return min(grid, key=lambda fabric: sum(abs(np.log(1 + off)) for off in network_errors(rows, fabric, node)))


# ------------------------------------------------------------------------------------------------------------- errors


def collective_errors(rows: Sequence[Collective], fitted: Mapping[str, Nccl]) -> list[float]:
    """predicted / measured - 1, for each row."""
    return [fitted[row.gpu].taken(row.op, row.bytes, row.gpus).seconds / row.seconds - 1 for row in rows]


def matmul_errors(rows: Sequence[Matmul], kernels: Kernels, chip: Chip) -> list[float]:
    table = np.array(rows, float).T
    m, n, k = table[:3]
    seconds = kernels.matmul_seconds(m, n, k, 2, chip.peak("bfloat16"), chip.memory_bandwidth)
    return (seconds / table[3] - 1).tolist()


def network_errors(rows: Sequence[Network], fabric: Fabric | None, node: Cluster) -> list[float]:
    assert node.fitted is not None
    on = replace(node, forecast=replace(node.fitted, fabric=fabric))
    return [on.collective_seconds(row.op, NETWORK_BYTES, 8 * row.nodes) / row.seconds - 1 for row in rows]


def summary(errors: Sequence[float]) -> Error:
    off = np.abs(errors)
    return Error(round(float(np.median(off)), 3), round(float(np.quantile(off, 0.9)), 3))


def hold_out() -> dict[str, dict[str, dict[str, Error]]]:
    """For each way to leave rows out, and for each table: the errors on rows that were left out, by kind of GPU."""
    found: dict[str, dict[str, dict[str, Error]]] = {}
    rows = collectives()
    ways = {
        "thirds": [[_third(i, seed) == part for i in range(len(rows))] for seed in (0, 1) for part in range(3)],
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
    tables = {kind: matmuls(kind) for kind in CHIPS}
    off = {kind: [] for kind in CHIPS}
    for part in range(3):
        seen = {kind: [row for i, row in enumerate(table) if _third(i, 0) != part] for kind, table in tables.items()}
        kernels = fit_matmuls(seen)
        for kind, table in tables.items():
            left_out = [row for i, row in enumerate(table) if _third(i, 0) == part]
            off[kind] += matmul_errors(left_out, kernels[kind], CHIPS[kind])
    found["thirds"]["matmuls"] = {kind: summary(errors) for kind, errors in off.items()}
    off = {"h100": []}
    for nodes in sorted({row.nodes for row in network()}):
        fabric = fit_network([row for row in network() if row.nodes != nodes], H100_MEASURED)
        off["h100"] += network_errors([row for row in network() if row.nodes == nodes], fabric, H100_MEASURED)
    found["numbers of nodes"] = {"network": {kind: summary(errors) for kind, errors in off.items()}}
    return found


def _third(place: int, seed: int) -> int:
    """Which third of the rows a row is in, as if they had been shuffled."""
    return int(np.random.default_rng((seed, place)).integers(3))


def fit_all() -> dict[str, Any]:
    """All constants, as they are written."""
    fitted = fit_collectives(collectives())
    kernels = fit_matmuls({kind: matmuls(kind) for kind in CHIPS})
    assert H100_MEASURED.fitted is not None
    node = replace(H100_MEASURED, forecast=replace(H100_MEASURED.fitted, nccl=fitted["h100"]))
    fabric = fit_network(network(), node)
    ratios = next(iter(fitted.values())).ratios._asdict()
    del ratios["peer_ramp"]
    return {
        "nccl": {kind: {name: _round(getattr(of, name)) for name in (*_OWN, "switch")} for kind, of in fitted.items()},
        "ratios": {name: _round(value) for name, value in ratios.items()},
        "kernels": {kind: {name: _round(getattr(k, name)) for name in _KERNELS} for kind, k in kernels.items()},
        "shared": {name: _round(value) for name, value in kernels["h100"].shared._asdict().items()},
        "fabric": {"reached": fabric.reached, "congestion": fabric.congestion},
    }


def _round(value: float) -> float:
    return float(f"{value:.4g}") if value > 1e-13 else 0.0


def _print(title: str, errors: Mapping[str, Error]) -> None:
    for kind, error in errors.items():
        print(f"{title:40} {kind:6} median {100 * error.median:5.1f} %   nine of ten {100 * error.most:5.1f} %")


def main(arguments: Sequence[str]) -> None:
    found = fit_all()
    if "--hold-out" in arguments or "--write" in arguments:
        held_out = hold_out()
        for way, tables in held_out.items():
            for table, errors in tables.items():
                _print(f"{table}, {way} left out", errors)
        found["errors"] = {**held_out["thirds"], **held_out["numbers of nodes"]}
    if "--write" in arguments:
        CONSTANTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(f"written: {CONSTANTS.name}; import tplab anew to use it")
    print(json.dumps(found, indent=1))
    _print_seen(found)


def _print_seen(found: Mapping[str, Any]) -> None:
    """Errors on the very rows that were fitted."""
    ratios = Ratios(**found["ratios"])
    fitted = {kind: Nccl(**values, ratios=ratios) for kind, values in found["nccl"].items()}
    off = dict(zip(collectives(), collective_errors(collectives(), fitted)))
    _print("collectives, fitted", {k: summary([e for row, e in off.items() if row.gpu == k]) for k in KINDS})
    shared = Shared(**found["shared"])
    for kind, values in found["kernels"].items():
        kernels = _kernels(kind, values, shared)
        _print("matmuls, fitted", {kind: summary(matmul_errors(matmuls(kind), kernels, CHIPS[kind]))})
    assert H100_MEASURED.fitted is not None
    node = replace(H100_MEASURED, forecast=replace(H100_MEASURED.fitted, nccl=fitted["h100"]))
    _print("network, fitted", {"h100": summary(network_errors(network(), Fabric(**found["fabric"]), node))})


if __name__ == "__main__":
    main(sys.argv[1:])
