"""The search: every plan that is possible on so many GPUs, the best first, and why the others lost.

All plans are timed and weighed together, in arrays (`tplab.forecast.grid`); then the best are forecast one by one,
which simulates their pipelines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, overload

from tplab.cost import Cluster, find
from tplab.errors import PlanError
from tplab.forecast.clusters import USUAL
from tplab.forecast.forecast import Forecast, forecast
from tplab.forecast.grid import grids
from tplab.forecast.memory import peak_bytes, room
from tplab.forecast.model import Model
from tplab.forecast.plan import Plan, divisors
from tplab.forecast.ranking import Estimate, Ranking
from tplab.forecast.stacks import Stack, find_stack
from tplab.forecast.step import step

SCHEDULES = ("1f1b", "gpipe", "zb_h1")
CHOICES = ("attention", "compiled", "state_dtype", "dtype", "grad_dtype")
SEQUENCE = 4096
"""Tokens of a sequence where nothing is said."""
EXACT = 100
"""How many of the best are forecast one by one."""


class Plans(Sequence[Forecast]):
    """The plans that surely fit, the fastest first: `found[0]` is the forecast of the best.

    considered   how many plans were possible
    lost         reason -> how many plans: what does not divide (counted by layouts of ranks), what does not fit, and of
                 those that fit, which part of a step costs them most beside the best
    """

    def __init__(self, best: Sequence[Plan], ranking: Ranking, refused: Counter[str], given: Any):
        self._best, self._ranking, self._refused, self._given = best, ranking, refused, given
        self.considered = ranking.considered

    @cached_property
    def lost(self) -> Mapping[str, int]:
        return MappingProxyType(dict(self._refused + self._ranking.lost()))

    def __len__(self) -> int:
        return len(self._ranking)

    @overload
    def __getitem__(self, place: int) -> Forecast: ...
    @overload
    def __getitem__(self, place: slice) -> list[Forecast]: ...
    def __getitem__(self, place: int | slice) -> Forecast | list[Forecast]:
        if isinstance(place, slice):
            return [self[one] for one in range(len(self))[place]]
        place, exact = range(len(self))[place], len(self._best)
        plan = self._best[place] if place < exact else self._ranking[place]
        model, cluster, batch, sequence, stack = self._given
        return forecast(model, plan, cluster, batch=batch, sequence=sequence, stack=stack)

    @property
    def smallest(self) -> float:
        """Bytes per GPU of the plan that needs least, whether it fits or not."""
        return float(self._ranking.held.min())

    def notable(self, most: int = 150) -> list[Estimate]:
        """The plans to compare: the fastest, the fastest of each layout of ranks, and those for which no other is both
        faster and smaller, also beyond what a GPU has.

        Those that take over three times as long as the fastest that fits, or twice what a GPU has, are left out, if
        there are others. Nothing is simulated for them: these are estimates.
        """
        return self._ranking.notable(most)

    def __str__(self) -> str:
        lines = [f"{len(self):,} of {self.considered:,} plans fit"]
        for one in self[:5]:
            held = f"{one.peak.total / 2**30:.0f} GiB"
            lines.append(
                f"{one.seconds:9.3g} s  {one.tokens_per_second_per_gpu:9,.0f} tokens/s per GPU  {held:>8}  {one.plan}"
            )
        lines += [f"{count:9,} {reason}" for reason, count in sorted(self.lost.items(), key=lambda pair: -pair[1])]
        return "\n".join(lines)

    __repr__ = __str__


def plans(
    model: str | Model,
    cluster: str | Cluster = USUAL,
    *,
    gpus: int,
    batch: int,
    sequence: int = SEQUENCE,
    stack: str | Stack = "megatron",
    schedules: Sequence[str] = SCHEDULES,
    exact: int = EXACT,
    **chosen: Any,
) -> Plans:
    """All plans on `gpus` ranks: every divisor for dp, tp, pp, cp and ep, every microbatch, schedule, number of virtual
    stages, recomputation and stage of ZeRO. Everything else is as the stack does it.

        found = plans("llama3-70b", "h100-measured", gpus=256, batch=1024, sequence=8192, attention="flash3")
        found[0].plan, found[0].seconds, found.lost

    schedules   of SCHEDULES; interleaved ones belong to "1f1b"
    exact       how many of the best are forecast one by one, and so are in their true order
    chosen      fields of `CHOICES`, which every plan has instead of what the stack does
    Raises PlanError if there is no plan that could train the model, with the reasons.
    """
    model, cluster, stack = Model.find(model), find(cluster), find_stack(stack)
    if set(schedules) - set(SCHEDULES):
        raise PlanError(f"schedules are {', '.join(schedules)}; search over {', '.join(SCHEDULES)}")
    if set(chosen) - set(CHOICES):
        raise PlanError(f"a search cannot be given {', '.join(sorted(chosen))}; it takes {', '.join(CHOICES)}")
    for name, number in {"gpus": gpus, "batch": batch, "sequence": sequence}.items():
        if number < 1:
            raise PlanError(f"{name} is {number}; it must be 1 or more")
    if stack.defaults.get("balance") == "parameters" and gpus > 1:
        raise PlanError(
            f"{stack.name} gives stages equally many parameters; finding such stages takes too long for every plan of "
            "a search: forecast the plans that you mean one by one, or search with megatron"
        )
    refused = Counter[str]()
    base = replace(Plan(), **_fields(stack, cluster) | chosen)
    layouts = [*_layouts(model, base, gpus, batch, sequence, refused)]
    if not layouts:
        reasons = "; ".join(reason for reason, _ in refused.most_common(5))
        raise PlanError(
            f"no plan trains this model on {gpus} GPUs in batches of {batch} x {sequence} tokens: {reasons}"
        )
    every = grids(model, layouts, cluster, batch, sequence, stack, schedules)
    ranking, given = Ranking(every, room(cluster.chip, stack)), (model, cluster, batch, sequence, stack)
    best = _exactly(ranking, exact, given)
    return Plans(best, ranking, refused, given)


def _exactly(ranking: Ranking, exact: int, given: Any) -> list[Plan]:
    """Of the first `exact` plans those that really fit, the fastest first. Those that do not leave the ranking."""
    model, cluster, batch, sequence, stack = given
    found, too_large = list[tuple[float, Plan]](), list[int]()
    for place in range(min(exact, len(ranking))):
        plan = ranking[place]
        if peak_bytes(model, plan, batch, sequence, stack) <= ranking.room.sure:
            found.append((step(model, plan, cluster, batch, sequence, stack).seconds, plan))
        else:
            too_large.append(place)
    ranking.remove(too_large)
    return [plan for _, plan in sorted(found, key=lambda pair: pair[0])]


def _fields(stack: Stack, cluster: Cluster) -> dict[str, Any]:
    """What a stack does where nothing is said, without what is searched."""
    searched = ("zero", "recompute", "schedule")
    return {name: value for name, value in stack.defaults_on(cluster).items() if name not in searched}


def _layouts(model: Model, base: Plan, gpus: int, batch: int, sequence: int, lost: Counter[str]) -> Iterator[Plan]:
    """The plans that differ in their axes; counts in `lost` those that are impossible."""
    for tp in divisors(gpus):
        for pp in divisors(gpus // tp):
            if pp > model.layers:
                lost[f"pp={pp} is more than {model.layers} layers"] += 1
                continue
            for cp in divisors(gpus // tp // pp):
                dp = gpus // tp // pp // cp
                for ep in divisors(dp * cp * tp) if model.experts else (1,):
                    is_shared = base.sequence_parallel and tp > 1
                    plan = replace(base, dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, sequence_parallel=is_shared)
                    why = plan.refusal(model, batch, sequence)
                    if why is None:
                        yield plan
                    else:
                        lost[why] += 1
