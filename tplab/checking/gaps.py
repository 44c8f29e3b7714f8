"""Distances between numbers. A number that is not finite is infinitely far from everything but itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def gaps(a: Any, b: Any) -> np.ndarray:
    """Return |a - b| elementwise: infinite for NaN, and for an infinity that the other array does not have there."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    with np.errstate(invalid="ignore"):
        found = np.where(a == b, 0.0, np.abs(a - b))
    return np.where(np.isnan(found), np.inf, found)


def gap(a: Any, b: Any) -> float:
    """Return the largest of these distances: `gap(a, b) <= slack` is True if all are close, and False for NaN."""
    return float(gaps(a, b).max(initial=0))


def largest(x: np.ndarray) -> float:
    """Return the largest absolute value."""
    return float(np.abs(x).max(initial=0))


def filled(piece: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Return the piece with zeros at its end, so that it has this shape."""
    return np.pad(piece, [(0, size - has) for size, has in zip(shape, piece.shape)]) if piece.shape != shape else piece


def is_constant(x: np.ndarray) -> bool:
    """Return whether all elements are equal."""
    return x.size < 2 or bool((x == x.flat[0]).all())


def near(factor: float, other: float) -> bool:
    """Return whether two factors are equal up to the rounding of the numbers that they were measured from."""
    return abs(factor / other - 1) < 2e-3


def farthest(a: Any, b: Any) -> tuple[float, float]:
    """Return the two values at the index where they are farthest apart."""
    place = int(gaps(a, b).argmax())
    return float(np.asarray(a).flat[place]), float(np.asarray(b).flat[place])


def shown(got: Any, want: Any, rank: int) -> tuple[str, str]:
    """Return these two as text: the actual value on a rank and the expected one."""
    a, b = farthest(got, want)
    return f"{a:.6g} on rank {rank}", f"{b:.6g}"
