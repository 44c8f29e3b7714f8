"""What many layouts of ranks share, computed once and looked up by what it depends on."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from tplab.cost import Cluster
from tplab.forecast.activations import Kept, kept
from tplab.forecast.layers import Layer, ends_seconds, layer_seconds, local
from tplab.forecast.memory import state_bytes, wasted_bytes
from tplab.forecast.messages import send_seconds
from tplab.forecast.model import Model
from tplab.forecast.once import once_seconds
from tplab.forecast.plan import Plan
from tplab.forecast.stacks import Stack

Array = np.ndarray[Any, np.dtype[np.float64]]
TIMES, BYTES = len(Layer._fields), len(Kept._fields)


class Tables:
    """Seconds and bytes of a model on a cluster. Of a `layout` only the axes matter."""

    def __init__(self, model: Model, cluster: Cluster, sequence: int, stack: Stack, recomputes: tuple[str, ...]):
        self.model, self.cluster, self.sequence, self.stack = model, cluster, sequence, stack
        self.recomputes = recomputes
        self.nothing = np.zeros((TIMES + BYTES) * len(recomputes) + 2 * TIMES)
        self._found: dict[Any, Any] = {}

    def microbatch(self, layout: Plan, size: int) -> Array:
        """One microbatch of `size` sequences: of a layer the fields of `Layer` and of `Kept`, for each recomputation;
        then the `Layer` of the embedding, and that of the head."""
        key = (layout.tp, layout.cp, layout.ep, size)
        if key not in self._found:
            of = local(layout)
            plans = [replace(of, microbatch=size, recompute=how) for how in self.recomputes]
            first, last = ends_seconds(self.model, plans[0], self.cluster, self.sequence, self.stack)
            numbers = list[float]()
            for plan in plans:
                numbers += layer_seconds(self.model, plan, self.cluster, self.sequence, self.stack)
                numbers += kept(self.model, plan, self.sequence, self.stack)
            self._found[key] = np.array([*numbers, *first, *last], float)
        return self._found[key]

    def send(self, layout: Plan) -> tuple[float, float]:
        """(seconds of any message between stages, and more of them per sequence of a microbatch)."""
        key = ("send", layout.pp > 1, layout.tp, layout.cp, layout.dp)
        if key not in self._found:
            plans = [replace(layout, microbatch=size) for size in (1, 2)]
            one, two = (send_seconds(self.model, plan, self.cluster, self.sequence) for plan in plans)
            self._found[key] = 2 * one - two, two - one
        return self._found[key]

    def once(self, layout: Plan, zero: int) -> tuple[float, ...]:
        """The fields of `Once`: of the first rank of a pipeline or the last, whichever takes longer."""
        key = ("once", layout.tp, layout.pp, layout.copies, layout.ep, zero)
        if key not in self._found:
            plan = replace(layout, zero=zero)
            ends = [once_seconds(self.model, plan, at, self.cluster, self.stack) for at in {0, plan.pp - 1}]
            self._found[key] = max(ends, key=lambda end: end.gradients + end.optimizer)
        return self._found[key]

    def states(self, layout: Plan, zero: int, place: int) -> int:
        """Bytes of parameters, gradients and optimizer of a rank, and what libraries keep beside them."""
        key = ("states", layout.tp, layout.pp, layout.copies, layout.ep, zero, place)
        if key not in self._found:
            plan = replace(layout, zero=zero)
            beside = self.stack.keeps.workspace + wasted_bytes(self.model, plan, self.stack)
            self._found[key] = sum(state_bytes(self.model, plan, place, self.stack)) + beside
        return self._found[key]


@lru_cache(maxsize=16)
def tables(
    model: Model, base: Plan, cluster: Cluster, sequence: int, stack: Stack, recomputes: tuple[str, ...]
) -> Tables:
    """The tables for all plans that are like `base` in everything but their axes and what a search varies."""
    return Tables(model, cluster, sequence, stack, recomputes)
