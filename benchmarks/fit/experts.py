"""Fits times of fused kernels of experts, and of DeepEP's messages inside a node: `tplab.forecast.experts`.

    python -m benchmarks.fit.experts            fit, and print errors of rows that were held out
    python -m benchmarks.fit.experts --write    and write constants and errors to tplab/forecast/measured/experts.json

Errors are of thirds of the models (hidden features, experts, choices), each by constants fitted to the other two.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from benchmarks.fit.least import Array, least, rounded, summary
from benchmarks.fit.tables import ROWS
from tplab.cost import find
from tplab.cost.measured import read, source_of
from tplab.experts import Routing
from tplab.forecast.experts import CONSTANTS, Fused, Messages, Work, sent, work_of

SCALE = 0.1
STARTS = 8
"""The number of starting points of a fit, of which the best result is kept."""
BEGIN = {
    "fused": Fused(3e-5, 1e12, 4e14, 2.0, 1e-12, 1e-12, 1e-7),
    "messages": Messages(2e-5, 1e-12, 3e-12, 1e-7, 1e-11),
}
DTYPES = {"bfloat16": "bfloat16", "fp8": "float8_e4m3fn", "fp8_block": "float8_e4m3fn"}
"""The clock's names of dtypes."""


class Row(NamedTuple):
    """One measurement: chip, dtype or kernel, name of the kernel or direction, inputs, and seconds."""

    chip: str
    kind: str
    name: str
    given: tuple[Any, ...]
    seconds: float


@cache
def fused() -> tuple[Row, ...]:
    found = []
    for chip in ("H100", "B200"):
        for r in read(ROWS / f"experts_{chip.lower()}.csv"):
            tokens, hidden, ffn, k, experts, ep = (
                int(r[n]) for n in ("tokens", "hidden", "ffn", "top_k", "experts", "ep")
            )
            given = tokens, hidden, ffn, Routing(experts, k), ep, float(r["skew"])
            found.append(Row(chip, r["dtype"], r["kernel"], given, float(r["us"]) / 1e6))
    return tuple(found)


@cache
def messages() -> tuple[Row, ...]:
    found = []
    for r in read(ROWS / "deepep.csv"):
        tokens, hidden, k, experts = (int(r[n]) for n in ("tokens", "hidden", "top_k", "experts"))
        given = tokens, hidden, *sent(f"{r['gpu'].lower()}-measured", Routing(experts, k), r["kernel"])
        found += [Row(r["gpu"], r["kernel"], way, given, float(r[way]) / 1e6) for way in ("dispatch", "combine")]
    return tuple(found)


def _seconds(kind: type[Any], rows: Sequence[Row]) -> Callable[[Any], Array]:
    """Constants -> seconds of these rows."""
    if kind is Fused:
        work = Work(*np.array([work_of(*row.given) for row in rows], float).T)
        return lambda constants: constants.seconds(work)
    sizes = np.array([row.given for row in rows], float).T
    return lambda constants: constants.seconds(*sizes)


def fit(kind: type[Any], rows: Sequence[Row]) -> Any:
    of, measured = _seconds(kind, rows), np.array([row.seconds for row in rows])
    begin = np.log(BEGIN["fused" if kind is Fused else "messages"])
    found = [begin, *(begin + np.random.default_rng(start).normal(size=len(begin)) for start in range(1, STARTS))]
    tried = (least(lambda t: np.log(of(kind(*np.exp(t))) / measured), one, SCALE, steps=200) for one in found)
    return kind(*map(rounded, np.exp(min(tried, key=lambda pair: pair[0])[1]).tolist()))


def off(kind: type[Any], constants: Any, rows: Sequence[Row]) -> Array:
    """forecast / measured - 1"""
    return _seconds(kind, rows)(constants) / np.array([row.seconds for row in rows]) - 1


def parts(rows: Sequence[Row]) -> Array:
    """The third that each row is in. All rows of one model are in the same third."""
    models = [row.given[1:2] + row.given[3:4] if len(row.given) > 4 else row.given[1:] for row in rows]
    known = list(dict.fromkeys(models))
    shuffled = np.random.default_rng(33).permutation(len(known)) % 3
    return np.array([shuffled[known.index(model)] for model in models])


def by_matmuls(row: Row) -> float:
    """Seconds of the clock's matmuls, as in a training step: equal loads, with the weights of every expert."""
    tokens, hidden, ffn, routing, ep, _ = row.given
    of, each = find(f"{row.chip.lower()}-measured").chip.matmul_seconds, -(-tokens * routing.top_k // routing.experts)
    how = DTYPES[row.kind], routing.experts // ep
    return of(each, 2 * ffn, hidden, *how) + of(each, hidden, ffn, *how)


def source() -> str:
    return source_of(ROWS / "experts_h100.csv")


def fit_all() -> dict[str, Any]:
    """Constants of each kernel by chip and kind, and the errors of rows that were left out."""
    found: dict[str, Any] = {"fused": {}, "messages": {}, "errors": []}
    for what, kind, every in (("fused", Fused, fused()), ("messages", Messages, messages())):
        of_chips: dict[str, list[float]] = {}
        for key in dict.fromkeys((row.chip, row.kind, row.name) for row in every):
            rows = [row for row in every if (row.chip, row.kind, row.name) == key]
            chip, of, name = key
            found[what].setdefault(chip, {}).setdefault(of, {})[name] = list(fit(kind, rows))
            errors, third = list[float](), parts(rows)
            for part in range(3):
                made = fit(kind, [row for row, where in zip(rows, third) if where != part])
                errors += off(kind, made, [row for row, where in zip(rows, third) if where == part]).tolist()
            found["errors"].append([what, *key, len(rows), *summary(errors)])
            of_chips.setdefault(chip, []).extend(errors)
        found["errors"] += [[what, chip, "all", "", len(all), *summary(all)] for chip, all in of_chips.items()]
    for what, chip, of, name, count, half, most in found["errors"]:
        print(f"{what:9} {chip} {of:11} {name:22} {count:4} {half:6.1%} {most:6.1%}")
    return found


def main(arguments: Sequence[str]) -> None:
    found = fit_all()
    if "--write" in arguments:
        CONSTANTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(f"written: {CONSTANTS.name}; import tplab anew to use it")


if __name__ == "__main__":
    main(sys.argv[1:])
