"""Fits tiles and waves to measured matmuls: in 16 bit, and in 8 bit with the conversion of the left matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from benchmarks.fit.least import Array, least, rounded, summary, third
from benchmarks.fit.tables import Matmul, matmuls
from tplab.cost.data_sheets import A100, B200, H100
from tplab.cost.fabric import Error
from tplab.cost.kernels import Kernels, Tiles
from tplab.cost.measured import MULTIPROCESSORS, constants, kernels_of

CHIPS = {"a100": A100, "h100": H100, "b200": B200}
IN_8_BIT = ("h100", "b200")
"""The chips on which matmuls in 8 bit were measured."""
_BEGIN = {"flops": 0.85, "bandwidth": 0.8, "load": 1e11, "finish": 3e-6 / 32768, "start": 2.5e-6, "split": 2.5e-6}
_OWN = ("flops", "bandwidth", "load", "finish")
_RESIDENT = 0.5


class Conversion(NamedTuple):
    """Seconds to convert the left matrix [m, k] to 8 bit: start + m row + m k bytes / bandwidth.

    Training libraries convert elsewhere, together with other work, so this is not part of a forecast.
    """

    start: float
    row: float
    bytes: float


Fitted = tuple[Kernels, Conversion]


def fit_matmuls(rows: Mapping[str, Sequence[Matmul]]) -> dict[str, Kernels]:
    """The kernels in 16 bit. A100 and H100 share START, SPLIT and RESIDENT; a B200 has its own START and SPLIT."""
    kinds = sorted(set(rows) - {"b200"})
    begin = [*([_BEGIN[name] for name in _OWN] * len(kinds)), _BEGIN["start"], _BEGIN["split"], _RESIDENT]

    def made(theta: Array) -> dict[str, Kernels]:
        *own, start, split, resident = np.exp(theta).tolist()
        parts = {kind: dict(zip(_OWN, own[4 * i : 4 * i + 4])) for i, kind in enumerate(kinds)}
        return {
            kind: _kernels(kind, {**part, "start": start, "split": split}, resident) for kind, part in parts.items()
        }

    def residuals(theta: Array) -> Array:
        return np.concatenate([_off(rows[kind], kind, kernels) for kind, kernels in made(theta).items()])

    shares = [4 * i + j for i in range(len(kinds)) for j in (0, 1)]
    found = made(least(residuals, np.log(begin), 0.08, shares=shares)[1])
    if "b200" in rows:
        resident = found["h100"].resident if "h100" in found else constants()["resident"]

        def of_b200(theta: Array) -> Kernels:
            return _kernels("b200", dict(zip(_BEGIN, np.exp(theta).tolist())), resident)

        begin = np.log(list(_BEGIN.values()))
        _, theta = least(lambda theta: _off(rows["b200"], "b200", of_b200(theta)), begin, 0.08, shares=(0, 1))
        found["b200"] = of_b200(theta)
    return found


def fit_8_bit(kind: str, rows: Sequence[Matmul], kernels: Kernels) -> Fitted:
    """The kernels in 8 bit: they start as in 16 bit, and memory is equally fast."""
    names = ("flops", "load", "finish", "split")
    begin = np.log([*(_BEGIN[name] for name in names), 4e-6, 1e-9, 3.0])

    def made(theta: Array) -> Fitted:
        values = np.exp(theta).tolist()
        return replace(kernels, narrow=Tiles(**dict(zip(names, values)), start=kernels.wide.start)), Conversion(
            *values[4:]
        )

    return made(least(lambda theta: _off(rows, kind, *made(theta)), begin, 0.08, shares=(0,))[1])


def _kernels(kind: str, values: Mapping[str, float], resident: float) -> Kernels:
    tiles = Tiles(**{name: values[name] for name in Tiles._fields})
    return Kernels(tiles, None, values["bandwidth"], *MULTIPROCESSORS[kind], resident)


def _off(rows: Sequence[Matmul], kind: str, kernels: Kernels, conversion: Conversion | None = None) -> Array:
    """log(predicted / measured) of each row."""
    chip, (m, n, k, seconds) = CHIPS[kind], np.array(rows, float).T
    dtype, size = ("bfloat16", 2) if conversion is None else ("float8_e4m3fn", 1)
    found = kernels.matmul_seconds(m, n, k, size, chip.peak(dtype), chip.memory_bandwidth)
    if conversion is not None:
        found += conversion.start + m * conversion.row + m * k * conversion.bytes / chip.memory_bandwidth
    return np.log(found / seconds)


def matmul_errors(kind: str, kernels: Kernels, rows: Sequence[Matmul] | None = None) -> list[float]:
    """predicted / measured - 1, for each row in 16 bit."""
    return np.expm1(_off(matmuls(kind) if rows is None else rows, kind, kernels)).tolist()


def errors_in_8_bit(kind: str, fitted: Fitted, rows: Sequence[Matmul] | None = None) -> list[float]:
    return np.expm1(_off(matmuls(kind, 8) if rows is None else rows, kind, *fitted)).tolist()


def stored(kind: str) -> Fitted:
    """The constants in the package, with those in 8 bit."""
    return kernels_of(kind, constants()), Conversion(**constants()["converted"][kind])


def hold_out() -> dict[str, dict[str, Error]]:
    """The errors on rows that were held out, a third at a time."""
    off: dict[str, dict[str, list[float]]] = {name: {} for name in ("matmuls", "matmuls in 8 bit")}
    for part in range(3):
        kernels = fit_matmuls({kind: _part(matmuls(kind), part, False) for kind in CHIPS})
        for kind, of in kernels.items():
            off["matmuls"].setdefault(kind, []).extend(matmul_errors(kind, of, _part(matmuls(kind), part, True)))
        for kind in IN_8_BIT:
            fitted = fit_8_bit(kind, _part(matmuls(kind, 8), part, False), kernels[kind])
            errors = errors_in_8_bit(kind, fitted, _part(matmuls(kind, 8), part, True))
            off["matmuls in 8 bit"].setdefault(kind, []).extend(errors)
    return {name: {kind: summary(errors) for kind, errors in of.items()} for name, of in off.items()}


def _part(rows: Sequence[Matmul], part: int, is_out: bool) -> list[Matmul]:
    return [row for i, row in enumerate(rows) if (third(i, 0) == part) == is_out]


def found_all() -> dict[str, Any]:
    """All constants for the file."""
    kernels = fit_matmuls({kind: matmuls(kind) for kind in CHIPS})
    narrow = {kind: fit_8_bit(kind, matmuls(kind, 8), kernels[kind]) for kind in IN_8_BIT}
    return {
        "matmuls": {kind: _written(of.wide) for kind, of in kernels.items()},
        "matmuls in 8 bit": {kind: _written(of.narrow) for kind, (of, _) in narrow.items() if of.narrow},
        "converted": {kind: _written(conversion) for kind, (_, conversion) in narrow.items()},
        "bandwidth": {kind: rounded(of.bandwidth) for kind, of in kernels.items()},
        "resident": rounded(kernels["h100"].resident),
    }


def _written(values: Tiles | Conversion) -> dict[str, float]:
    return {name: rounded(value) for name, value in values._asdict().items()}
