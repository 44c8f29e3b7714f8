"""Classes of measured steps, and the errors of their forecasts: an interval, or "outside what was measured".

Steps of a class share the properties that decide how well they are forecast: the stack; whether tensor parallelism
stays in a node; whether there is a pipeline; dense or experts; the chip, the dtype and the number of nodes. A class
with fewer than five rows is widened to rows of other dtypes, chips or numbers of nodes, in this order, and its name
says so. A plan that belongs to no class has no interval.

Errors are those of rows that were not in the fit (`benchmarks.fit.steps`). Split-conformal intervals: Vovk et al. 2005.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import NamedTuple

from tplab.cost import Cluster
from tplab.forecast.model import Model
from tplab.forecast.plan import ITEMSIZE, Plan, pairs_passes
from tplab.forecast.stacks import Stack, constants

SIZES = ((1, "one node"), (32, "2 to 32 nodes"), (1 << 30, "more than 32 nodes"))
ENOUGH = 5
"""The fewest rows of a class."""
ANY = "any"
Key = tuple[str, ...]


class Measured(NamedTuple):
    """The measured steps of a class.

    name       in words
    rows       how many steps
    low, high  nine of ten steps took between `low` and `high` times their forecasts
    median, most     the median and the 90th percentile of the errors, as shares of the measured time
    ranks      the most ranks of any of its steps
    """

    name: str
    rows: int
    low: float
    high: float
    median: float
    most: float
    ranks: int


def keys_of(stack: str, model: Model, plan: Plan, cluster: Cluster) -> Iterator[Key]:
    """The classes that a step belongs to: the narrowest first."""
    size = cluster.node_size or plan.ranks
    nodes = -(-plan.ranks // size)
    dtype, chip = f"{8 * min(4, ITEMSIZE[plan.dtype])} bit", cluster.chip.name.split()[0]
    many = next(name for most, name in SIZES if nodes <= most)
    kind = "experts" if model.experts else "dense"
    unlike = {"latent attention": model.kv_rank, "dense layers": model.dense_layers}  # no measured row has these
    unlike |= {"etp": plan.etp, "a dispatch": plan.dispatch, "skew": plan.skew}
    unlike |= {"passes in pairs": model.experts and plan.pp > 1 and pairs_passes(plan.rule_name)}
    kind = " with ".join([kind, *(name for name, has in unlike.items() if has)])
    fixed = (stack, kind, f"tp {'over nodes' if plan.tp > size else 'in a node'}", f"{'no ' * (plan.pp == 1)}pipeline")
    for free in ((chip, dtype, many), (chip, ANY, many), (ANY, ANY, many), (chip, ANY, ANY), (ANY, ANY, ANY)):
        yield (*fixed, *free)


def class_of(stack: Stack, model: Model, plan: Plan, cluster: Cluster) -> Measured | None:
    """The narrowest measured class of a step; None if it is outside what was measured. That includes plans with over
    twice as many ranks as any of the class, and everything on a data sheet."""
    if cluster.fitted is None:
        return None
    found = next((known()[key] for key in keys_of(stack.name, model, plan, cluster) if key in known()), None)
    return found if found and plan.ranks <= 2 * found.ranks else None


@cache
def known() -> Mapping[Key, Measured]:
    return {key_from(name): Measured(name, **of) for name, of in constants()["classes"].items()}


def name_of(key: Key) -> str:
    """A class in words: "megatron, dense, tp in a node, pipeline, H100, any dtype, one node"."""
    free = zip(key[-3:], ("chip", "dtype", "number of nodes"))
    return ", ".join((*key[:-3], *(f"any {what}" if part == ANY else part for part, what in free)))


def key_from(name: str) -> Key:
    return tuple(ANY if part.startswith("any ") else part for part in name.split(", "))
