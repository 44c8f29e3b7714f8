"""How far apart numbers are. What is not finite is infinitely far from everything but itself."""

from __future__ import annotations

from typing import Any

import numpy as np


def gaps(a: Any, b: Any) -> np.ndarray:
    """The distance of each element of `a` from that of `b`: infinite for NaN, and for an infinity that `b` has not."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    with np.errstate(invalid="ignore"):
        found = np.where(a == b, 0.0, np.abs(a - b))
    return np.where(np.isnan(found), np.inf, found)


def gap(a: Any, b: Any) -> float:
    """The largest of these distances: `gap(a, b) <= slack` says that all are close, and is False for NaN."""
    return float(gaps(a, b).max(initial=0))


def largest(x: np.ndarray) -> float:
    """How far the farthest element is from 0."""
    return float(np.abs(x).max(initial=0))


def is_constant(x: np.ndarray) -> bool:
    """Whether all elements are one number."""
    return x.size < 2 or bool((x == x.flat[0]).all())


def near(factor: float, other: float) -> bool:
    """Whether two factors are the same, up to the rounding of what they were measured from."""
    return abs(factor / other - 1) < 2e-3


def farthest(a: Any, b: Any) -> tuple[float, float]:
    """The two values at the place where they are farthest apart."""
    place = int(gaps(a, b).argmax())
    return float(np.asarray(a).flat[place]), float(np.asarray(b).flat[place])


def shown(got: Any, want: Any, rank: int) -> tuple[str, str]:
    """These two as text: what a rank has there, and what it should have."""
    a, b = farthest(got, want)
    return f"{a:.6g} on rank {rank}", f"{b:.6g}"
