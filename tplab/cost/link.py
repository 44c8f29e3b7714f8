"""A link between two ranks, and how long a message over it takes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tplab.cost.figures import check


@dataclass(frozen=True)
class Link:
    """The connection between two ranks. Both directions send at the same time.

    latency     s until the first byte arrives
    bandwidth   B/s in one direction
    source      where the figures come from
    """

    name: str
    latency: float
    bandwidth: float
    source: str = ""

    def __post_init__(self):
        what = f"link {self.name!r}"
        check(what, "latency", self.latency, zero=True)
        check(what, "bandwidth", self.bandwidth, infinite=True)

    def seconds(self, bytes: float) -> float:
        """One message: latency + bytes / bandwidth."""
        return self.latency + bytes / self.bandwidth


NO_LINK = Link("the rank itself", latency=0.0, bandwidth=math.inf, source="nothing is sent")
ONE_HOP = Link("one hop", latency=1.0, bandwidth=math.inf, source="unit times: a message takes 1, whatever its size")
