"""Clocks: how much each machine's clock must be advanced, so that all show the same time.

The clocks are never compared while the program runs, but the program's own communication bounds their differences: a
collective in which every rank waits for every other ends, on each of them, after it has begun on the last one, and a
message arrives after it was sent. If clock i must be advanced by a_i, each of these says

    a_j - a_i <= end_i - begin_j

The tightest bounds in both directions leave an interval, of which we take the middle. That can be off by half the
interval's width: about the time of the fastest small collective between the two machines. Bounds add up along a chain
of machines (shortest paths, Floyd 1962).

The clocks of two machines drift apart, by milliseconds within a few minutes. Then a_i changes during the run, and
bounds from its beginning contradict bounds from its end: along some cycle of machines, their sum is below 0. Such a run
is halved until the bounds of each part agree, and the interval is the one that contains those of all parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tplab.errors import TraceError

Bounds = Mapping[tuple[int, int], float]
"""(j, i) -> end_i - begin_j of one collective or message."""

_ROUNDING = 1e-9
"""Seconds. Clocks count nanoseconds, so bounds that contradict each other by less than this agree."""


def advances(bounds: Sequence[Bounds], hosts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """How much each machine's clock must be advanced to show the first one's time, and how far off that can be.

    bounds  of each collective and message, in the order in which they took place
    hosts   the M machines' names, for errors

    Returns two arrays of seconds, [M] each. Raises TraceError if nothing was sent between two machines.
    """
    lowest, highest = _interval(bounds, len(hosts))
    for machine, host in enumerate(hosts[1:], 1):
        if not (np.isfinite(highest[machine]) and np.isfinite(lowest[machine])):
            raise TraceError(
                f"the clocks of {hosts[0]} and {host} cannot be compared: no finished collective, or messages in both "
                "directions, connects them; add a barrier and record again"
            )
    return (highest + lowest) / 2, np.maximum(highest - lowest, 0.0) / 2


def _interval(bounds: Sequence[Bounds], count: int) -> tuple[np.ndarray, np.ndarray]:
    """The least and the most that each machine's clock may be advanced, [M] each; infinite if nothing bounds it."""
    least = np.full((count, count), np.inf)
    np.fill_diagonal(least, 0.0)
    for each in bounds:
        for pair, bound in each.items():
            least[pair] = min(least[pair], bound)
    for via in range(count):
        least = np.minimum(least, least[:, via, None] + least[None, via, :])
    if least.diagonal().min() >= -_ROUNDING:
        return -least[0, :], least[:, 0]
    if len(bounds) == 1:  # damaged: it cannot have ended before it began
        return np.full(count, -np.inf), np.full(count, np.inf)
    half = len(bounds) // 2
    (low, high), (lower, higher) = _interval(bounds[:half], count), _interval(bounds[half:], count)
    lowest = np.where(np.isinf(low), lower, np.where(np.isinf(lower), low, np.minimum(low, lower)))
    highest = np.where(np.isinf(high), higher, np.where(np.isinf(higher), high, np.maximum(high, higher)))
    return lowest, highest
