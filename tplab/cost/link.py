"""A link between two ranks, and which figures of links and chips are possible."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real

from tplab.errors import ClusterError


def check(what: str, name: str, value: object, *, zero: bool = False, infinite: bool = False) -> None:
    """Raise ClusterError unless a figure is a number in the allowed range."""
    number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    enough = number >= 0 if zero else number > 0  # False for nan
    if not enough or (number == math.inf and not infinite):
        least = "0 or more" if zero else "more than 0"
        units = "plain units: s, B, B/s, FLOP/s"
        raise ClusterError(f"{what}: {name} is {value!r}; it must be a number, {least}, in {units}")


def si(value: float, unit: str) -> str:
    """3.35e12, 'B/s' -> '3.35 TB/s'."""
    for exponent, prefix in zip(range(15, -12, -3), ("P", "T", "G", "M", "k", "", "m", "u", "n")):
        if value >= 10.0**exponent:
            return f"{value / 10.0**exponent:.4g} {prefix}{unit}"
    return f"{value:.4g} {unit}"


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
