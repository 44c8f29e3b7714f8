"""How a value differs from the right one, in words."""

from __future__ import annotations

import numpy as np

from tplab.checking.gaps import largest
from tplab.checking.observed import factor_between
from tplab.units import plain

MOST_ROWS = 512


def difference(got: np.ndarray, want: np.ndarray) -> str:
    """Return how a value differs from the right one: "2 times the reference's", or else the first elements; "" if it
    does not."""
    got, want, size = got.astype(np.float64), want.astype(np.float64), largest(want)
    factor = factor_between([(got, want)], 1e-4 * size)
    if factor is not None and abs(factor - 1) > 1e-3:
        return f"{plain(factor)} times the reference's"
    apart = np.flatnonzero(np.abs(got - want).reshape(-1) > 1e-5 * size)
    if not apart.size:
        return ""
    some = slice(int(apart[0]), int(apart[0]) + 4)
    first, second = (", ".join(f"{float(x):.5g}" for x in values.reshape(-1)[some]) for values in (got, want))
    if not got.any():
        return f"all zeros, where the reference has {second}, ... from element {some.start} on"
    if got.ndim > 1 and (rows := rows_in(got, want, 1e-5 * size)):
        moved = next(place for place, row in enumerate(rows) if row != place)
        return f"the reference's rows in another order: its row {moved} is the reference's row {rows[moved]}"
    if apart.size > 1 and np.ptp(more := (got - want).reshape(-1)[apart]) == 0:
        by = f"{plain(abs(more[0]))} {'more' if more[0] > 0 else 'less'}"
        return f"{by} than the reference's in {apart.size} of {got.size} places"
    return f"{first}, ... from element {some.start} on, where the reference has {second}, ..."


def rows_in(got: np.ndarray, want: np.ndarray, slack: float) -> list[int]:
    """Return the number of each row of a tensor among the expected rows; [] if one of them is not there."""
    if not got.size or got.size != want.size:
        return []
    got, want = (x.reshape(-1, x.shape[-1]) for x in (got, want))
    if got.shape != want.shape or len(got) > MOST_ROWS:
        return []
    found, is_free = list[int](), np.ones(len(want), bool)
    for row in got:
        begins_alike = (np.abs(want[:, :16] - row[:16]) <= slack).all(-1)
        there = np.flatnonzero(is_free & begins_alike)  # each of several equal rows counts once
        far = np.abs(want[there] - row).max(-1)
        if not far.size or not far.min() <= slack:
            return []
        found.append(int(there[far.argmin()]))
        is_free[found[-1]] = False
    return found
