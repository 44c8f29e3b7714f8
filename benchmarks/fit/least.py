"""Common parts of all fits: summaries of errors, and writing constants to a file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tplab.cost.fabric import Error
from tplab.cost.own.fit import Array, least

__all__ = ["Array", "least", "print_errors", "rounded", "summary", "third", "write"]


def summary(errors: Sequence[float]) -> Error:
    off = np.abs(errors)
    return Error(round(float(np.median(off)), 3), round(float(np.quantile(off, 0.9)), 3))


def third(place: int, seed: int) -> int:
    """The random third of the rows that a row is in."""
    return int(np.random.default_rng((seed, place)).integers(3))


def rounded(value: float) -> float:
    """The value with four digits, as constants are written."""
    return float(f"{value:.4g}") if value > 1e-13 else 0.0


def print_errors(title: str, errors: Mapping[str, Error]) -> None:
    for kind, error in errors.items():
        print(f"{title:40} {kind:6} median {100 * error.median:5.1f} %   nine of ten {100 * error.most:5.1f} %")


def write(file: Path, found: Mapping[str, Any]) -> None:
    """Write constants into a file, where they replace those of the same names. All others stay."""
    stored = json.loads(file.read_text(encoding="utf-8"))
    for name, value in found.items():
        stored[name] = stored[name] | value if name == "errors" else value
    file.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    print(f"written: {file.name}; import tplab anew to use it")
