"""The plans to compare for one choice of model, cluster and sizes: estimates of about a hundred, and the best one's
forecast. A forecast simulates a plan's pipeline, an estimate does not; see `tplab.forecast.block`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from tplab.cost import Cluster
from tplab.forecast import Forecast, Model, Plan, forecast, plans
from tplab.forecast.ranking import Estimate

MANY = 100
"""How many plans are shown, at most; the best, and those that are asked for, may come on top."""
EXACT = 5
"""How many of the fastest are forecast to find the best. Most estimates are within 1 % of the forecast; of some plans
with ZeRO 3 or ZB-H1 they are up to a tenth off."""


@dataclass(frozen=True)
class Survey:
    """What a search found.

    shown       the plans that are worth comparing, the fastest first
    best        the fastest of those that fit; the one that holds least, if none does
    considered  how many plans are possible     fitting   how many of them fit
    """

    shown: tuple[Estimate, ...]
    best: Forecast
    considered: int
    fitting: int


@lru_cache(maxsize=64)
def survey(model: Model, cluster: Cluster, gpus: int, batch: int, sequence: int, stack: str) -> Survey:
    """The plans to show. Raises PlanError if none is possible."""
    found = plans(model, cluster, gpus=gpus, batch=batch, sequence=sequence, stack=stack, exact=EXACT)
    listed = {one.plan: one for one in found.notable(MANY)}
    smallest = min(listed.values(), key=lambda one: one.bytes).plan
    best = found[0] if len(found) else exactly(model, smallest, cluster, batch, sequence, stack)
    listed.setdefault(best.plan, Estimate(best.plan, best.seconds, best.peak.total))
    shown = sorted(listed.values(), key=lambda one: (one.seconds, one.bytes))
    return Survey(tuple(shown), best, found.considered, len(found))


@lru_cache(maxsize=1024)
def exactly(model: Model, plan: Plan, cluster: Cluster, batch: int, sequence: int, stack: str) -> Forecast:
    """The forecast of one plan."""
    return forecast(model, plan, cluster, batch=batch, sequence=sequence, stack=stack)
