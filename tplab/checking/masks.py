"""Dropout masks: equal where ranks hold the same tensor, different where they hold different pieces of one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

FEWEST = 32
"""The fewest elements of a mask that are compared: small masks may be equal by chance."""


_WAVE = np.cos(np.arange(1 << 16))


@dataclass(frozen=True)
class Drawn:
    """A mask: the line or the module, the input's `mark`, the mask's checksum, and its number of elements, which is 0
    for a DTensor because torch itself synchronises its masks."""

    where: str
    given: float
    mask: int
    size: int


def mark(x: np.ndarray) -> float:
    """Return a number that identifies an array up to rounding. A plain sum would not do: each row of attention weights
    sums to 1."""
    return float(x.reshape(-1).astype(np.float64) @ np.resize(_WAVE, x.size))


def compared(a: Drawn, b: Drawn) -> Literal["", "two", "one"]:
    """Return what may be wrong with masks of two ranks: "two" masks for the same tensor, or "one" for different ones.
    One mask is right for terms of a sum and wrong for pieces of a tensor: see `are_pieces`."""
    if np.isclose(a.given, b.given, rtol=1e-6, atol=0):
        return "two" if a.mask != b.mask else ""
    return "one" if (a.where, a.mask, a.size) == (b.where, b.mask, b.size) and a.size >= FEWEST else ""


def are_pieces(ours: Iterable[Drawn], theirs: Iterable[Drawn]) -> bool:
    """Return whether ranks drop from pieces of the reference's tensor, and not from copies of it or terms of a sum."""
    return sum(a.size for a in set(ours)) <= sum(a.size for a in theirs)
