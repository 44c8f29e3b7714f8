"""Clocks: what each machine's clock must be advanced by, so that all show the same time.

Nobody asks for the time while the program runs. What the ranks did anyway bounds it: a collective in which every rank
waits for every other ends, on each of them, after it has begun on the last one, and a message arrives after it was
sent. With a_i, what clock i must be advanced by, each of these says

    a_j - a_i <= end_i - begin_j

The tightest of all bounds each way leave an interval, of which we take the middle. Half its width is how far off that
can be: about the time of the quickest small collective between the two machines. Bounds add up along a chain of
machines (shortest paths, Floyd 1962).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tplab.errors import TraceError

Bounds = Mapping[tuple[int, int], float]
"""(j, i) -> the least end_i - begin_j that was seen."""


def advances(bounds: Bounds, hosts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """What each machine's clock must be advanced by to show the first one's time, and how far off that can be.

    hosts   the M machines' names, for errors
    Returns two arrays of seconds, [M] each. Raises TraceError where nothing was
    sent between two machines.
    """
    count = len(hosts)
    least = np.full((count, count), np.inf)
    np.fill_diagonal(least, 0.0)
    for (ahead, behind), bound in bounds.items():
        least[ahead, behind] = min(least[ahead, behind], bound)
    for via in range(count):
        least = np.minimum(least, least[:, via, None] + least[None, via, :])
    highest, lowest = least[:, 0], -least[0, :]
    for machine in range(count):
        if not (np.isfinite(highest[machine]) and np.isfinite(lowest[machine])):
            raise TraceError(
                f"the clocks of {hosts[0]} and {hosts[machine]} cannot be compared: no collective or message between "
                "them, in each direction, ended before the files do; record a run with at least one barrier"
            )
    return (highest + lowest) / 2, np.abs(highest - lowest) / 2
