"""Least squares that outliers do not rule: how constants are fitted to measured times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

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
