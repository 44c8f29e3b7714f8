"""Least squares that outliers do not rule, errors in brief, and the file that constants are written to."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tplab.cost.fabric import Error

Array = np.ndarray[Any, np.dtype[np.float64]]


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


def summary(errors: Sequence[float]) -> Error:
    off = np.abs(errors)
    return Error(round(float(np.median(off)), 3), round(float(np.quantile(off, 0.9)), 3))


def third(place: int, seed: int) -> int:
    """Which third of the rows a row is in, as if they had been shuffled."""
    return int(np.random.default_rng((seed, place)).integers(3))


def rounded(value: float) -> float:
    """With four digits, as constants are written."""
    return float(f"{value:.4g}") if value > 1e-13 else 0.0


def print_errors(title: str, errors: Mapping[str, Error]) -> None:
    for kind, error in errors.items():
        print(f"{title:40} {kind:6} median {100 * error.median:5.1f} %   nine of ten {100 * error.most:5.1f} %")


def write(file: Path, found: Mapping[str, Any]) -> None:
    """Put constants into a file of them: what is found replaces what has its name, and all else stays."""
    stored = json.loads(file.read_text(encoding="utf-8"))
    for name, value in found.items():
        stored[name] = stored[name] | value if name == "errors" else value
    file.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    print(f"written: {file.name}; import tplab anew to use it")
