"""The plans to compare for one choice of model, cluster and sizes: estimates of about a hundred, and the best one's
forecast. A forecast simulates a plan's pipeline, an estimate uses paths that were found earlier; see
`tplab.forecast.pipelines.makespans`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from tplab.cost import Cluster
from tplab.forecast import Forecast, Model, Plan, forecast, plans
from tplab.forecast.ranking import Estimate

MANY = 100
"""The most plans that are shown, apart from the best and those that are added."""
EXACT = 5
"""How many of the fastest plans are simulated to find the best. Nineteen of twenty estimates equal the forecast, the
others are up to 1 % off."""


@dataclass(frozen=True)
class Survey:
    """The result of a search.

    shown       the plans that are worth comparing, the fastest first
    best        the fastest plan that fits; if none fits, the one that needs the least memory
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
