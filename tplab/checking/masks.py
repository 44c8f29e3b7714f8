"""Dropout masks: the same where ranks hold the same tensor, other ones where they hold other pieces of one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

FEWEST = 32
"""Elements of a mask: fewer may be dropped alike by chance."""


_WAVE = np.cos(np.arange(1 << 16))


@dataclass(frozen=True)
class Drawn:
    """A mask: the line or the module, the input's `mark`, the mask's checksum, and how many elements it has; 0 for a
    DTensor, to whose masks torch itself sees."""

    where: str
    given: float
    mask: int
    size: int


def mark(x: np.ndarray) -> float:
    """A number by which an array is known, but for its rounding. A plain sum would not do: rows of attention weights
    all add up to 1."""
    return float(x.reshape(-1).astype(np.float64) @ np.resize(_WAVE, x.size))


def compared(a: Drawn, b: Drawn) -> Literal["", "two", "one"]:
    """What may be wrong with masks of two ranks: there are "two" for the same tensor, or "one" for different ones. That
    is right for terms of a sum, and wrong for pieces of a tensor: see `are_pieces`."""
    if np.isclose(a.given, b.given, rtol=1e-6, atol=0):
        return "two" if a.mask != b.mask else ""
    return "one" if (a.where, a.mask, a.size) == (b.where, b.mask, b.size) and a.size >= FEWEST else ""


def are_pieces(ours: Iterable[Drawn], theirs: Iterable[Drawn]) -> bool:
    """Whether ranks drop from pieces of what the reference drops from, and not from copies of it or terms of a sum."""
    return sum(a.size for a in set(ours)) <= sum(a.size for a in theirs)
