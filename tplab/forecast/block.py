"""Plans in an array: shared quantities are computed once, and cached by the fields that they depend on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from tplab.cost import Cluster
from tplab.forecast.activations import Stage, kept, stages_on
from tplab.forecast.layers import ends_seconds, layer_seconds, local, once_seconds
from tplab.forecast.messages import send_seconds
from tplab.forecast.model import Model
from tplab.forecast.plan import Plan
from tplab.forecast.stacks import Stack

Array = np.ndarray[Any, np.dtype[np.float64]]
MICRO = ("tp", "cp", "ep", "etp", "sequence_parallel", "microbatch")
"""The fields of a plan that determine the time and the memory of a microbatch in a layer."""


class Way(NamedTuple):
    """How microbatches go through a pipeline: the fields of a plan."""

    schedule: str
    virtual: int

    def of(self, plan: Plan, **more: Any) -> Plan:
        return replace(plan, schedule=self.schedule, virtual=self.virtual, **more)


class Tables:
    """A cache of what is computed for plans that differ only in their axes and in the fields that a search varies.

    cluster   None: only bytes are needed
    """

    def __init__(self, model: Model, cluster: Cluster | None, sequence: int, stack: Stack):
        self.model, self.stack = model, stack.on(cluster) if cluster else stack
        self.given: tuple[Model, Any, int, Stack] = model, cluster, sequence, self.stack
        self.known: dict[Any, Any] = {}


tables = lru_cache(maxsize=16)(lambda base, *given: Tables(*given))
"""The tables shared by all plans that are like `base`, as filled by earlier searches."""


class Family(NamedTuple):
    """The schedules of a block with the same stages on each rank.

    ways    indices of the block's ways     ranks   the stages of each rank
    places  the ranks of each kind: their stages have equally many layers, and agree in having the embedding or head
    """

    ways: list[int]
    ranks: list[tuple[Stage, ...]]
    places: list[list[int]]

    @property
    def stages(self) -> tuple[tuple[int, int, bool, bool], ...]:
        """The contents of each stage of the model: see `Stage.counts`."""
        of = {stage.number: stage.counts for held in self.ranks for stage in held}
        return tuple(of[number] for number in range(len(of)))


@dataclass(frozen=True, eq=False)
class Block:
    """Plans in an array [pair, recompute, zero, way], with equally many pipeline ranks and the same cut into stages.

    layouts    plans that differ in their axes
    of, sizes  for each pair, the index of a layout and the size of a microbatch [pairs]
    recomputes, zeros, ways    the values of the other dims
    """

    layouts: Sequence[Plan]
    of: np.ndarray
    sizes: np.ndarray
    batch: int
    tables: Tables
    recomputes: Sequence[str]
    zeros: Sequence[int]
    ways: Sequence[Way]

    @classmethod
    def of_plan(cls, plan: Plan, batch: int, tables: Tables) -> Block:
        """A block of one plan."""
        pair = [plan], np.array([0]), np.array([plan.microbatch])
        return cls(*pair, batch, tables, [plan.recompute], [plan.zero], [Way(plan.schedule, plan.virtual)])

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return len(self.of), len(self.recomputes), len(self.zeros), len(self.ways)

    @property
    def pp(self) -> int:
        return self.layouts[0].pp

    def places(self, place: int) -> tuple[int, ...]:
        """(pair, recompute, zero, way) at an index of the flat array."""
        return tuple(int(at) for at in np.unravel_index(place, self.shape))

    def plan(self, place: int) -> Plan:
        """The plan at an index of the flat array."""
        pair, how, zero, way = self.places(place)
        about = {"microbatch": int(self.sizes[pair]), "recompute": self.recomputes[how], "zero": self.zeros[zero]}
        return self.ways[way].of(self.layouts[self.of[pair]], **about)

    def first(self, way: Way) -> Plan:
        """The first layout, with the stages that all layouts have."""
        return self.tables.stack.cut(way.of(self.layouts[0]))

    def part(self, pairs: Sequence[int], recompute: int, way: int) -> Block:
        """The block of some of its plans."""
        chosen = self.of[pairs], self.sizes[pairs], self.batch, self.tables
        return Block(self.layouts, *chosen, [self.recomputes[recompute]], self.zeros, [self.ways[way]])

    @cached_property
    def counts(self) -> np.ndarray:
        """Microbatches of each pipeline [pairs]."""
        return self.batch // (np.array([plan.dp for plan in self.layouts])[self.of] * self.sizes)

    @cached_property
    def is_possible(self) -> np.ndarray:
        """Whether a pipeline can have this many microbatches [pairs, ways]."""
        found = np.ones((len(self.of), len(self.ways)), bool)
        for way, one in enumerate(self.ways):
            plan = self.first(one)
            for count in set(self.counts.tolist()):
                if plan.pipeline_refusal(self.tables.model, count):
                    found[self.counts == count, way] = False
        return found

    @cached_property
    def families(self) -> list[Family]:
        found = dict[Any, list[int]]()
        for at, way in enumerate(self.ways):
            found.setdefault(way.of(self.layouts[0]).placement, []).append(at)
        return [self._family(ways) for ways in found.values()]

    def _family(self, ways: list[int]) -> Family:
        plan, kinds = self.first(self.ways[ways[0]]), dict[Any, list[int]]()
        ranks = [stages_on(self.tables.model, plan, place) for place in range(plan.pp)]
        for place, held in enumerate(ranks):
            kinds.setdefault(tuple(one.counts for one in held), []).append(place)
        return Family(ways, ranks, [*kinds.values()])

    # --- what is looked up -------------------------------------------------------------------------------------------

    @cached_property
    def micro(self) -> Array:
        """The fields of `Layer` for one microbatch: of a layer, a dense first layer, the embedding and the head [pairs,
        recomputes, 4, fields]."""
        model, cluster, sequence, stack = self.tables.given

        def seconds(plan: Plan) -> Any:
            again = plan.recompute != "none" and stack.plain  # plain ends are recomputed too
            ends = plan if again else replace(plan, recompute="none")
            of = (cluster, sequence, stack)
            return *(layer_seconds(kind, plan, *of) for kind in (model, model.dense)), *ends_seconds(model, ends, *of)

        return self._each("micro", seconds, [{"recompute": how} for how in self.recomputes], MICRO)

    @cached_property
    def kept(self) -> Array:
        """The fields of `Kept` [pairs, recomputes, fields]."""
        model, _, sequence, stack = self.tables.given
        choices = [{"recompute": how} for how in self.recomputes]
        return self._each("kept", lambda plan: kept(model, plan, sequence, stack), choices, MICRO)

    @cached_property
    def sends(self) -> Array:
        """Seconds of a message from one stage to the next [pairs]."""
        model, cluster, sequence, _ = self.tables.given
        return self._each(
            "send", lambda plan: send_seconds(model, plan, cluster, sequence), [{}], (*MICRO, "pp", "dp")
        )[:, 0]

    def once(self, family: Family, place: int) -> Array:
        """The fields of `Once` for the rank at a place of its pipeline [pairs, recomputes, zeros, fields]."""
        model, cluster, _, stack = self.tables.given
        # ZeRO 2 sends what ZeRO 1 does. Recomputation matters only with ZeRO 3 and late gathers.
        choices = [
            {"recompute": how if (zero, stack.gathers) == (3, 3) else "none", "zero": {2: 1}.get(zero, zero)}
            for how in self.recomputes
            for zero in self.zeros
        ]
        found = self.of_rank(
            "once", family, place, lambda plan: once_seconds(model, plan, place, cluster, stack), choices
        )
        return found.reshape(*self.shape[:3], -1)

    def of_rank(
        self, name: str, family: Family, place: int, make: Callable[[Plan], Any], choices: Sequence[dict[str, Any]]
    ) -> Array:
        """Quantities that depend on the parameters of the rank at a place of its pipeline, and on the number of their
        replicas [pairs, choices, ...]."""
        held, way = family.ranks[place], self.ways[family.ways[0]]._asdict()
        layers, dense, first, last = zip(*(one.counts for one in held))
        has = (sum(layers), sum(dense), any(first), any(last), held[0].share)
        return self._each((name, has), make, choices, ("pp", "tp", "copies", "ep", "etp", "sequence_parallel"), way)

    def _each(
        self,
        name: Any,
        make: Callable[[Plan], Any],
        choices: Sequence[dict[str, Any]],
        fields: tuple[str, ...],
        more: Mapping[str, Any] = MappingProxyType({}),
    ) -> Array:
        """The results of `make` for each pair with each choice of other fields [pairs, choices, ...]. Cached by
        `fields`, which are all that matters of a pair."""
        if fields not in self._alike:
            axes = [one for one in fields if one != "microbatch"]
            of_layout = [tuple(getattr(layout, one) for one in axes) for layout in self.layouts]
            sizes = self.sizes.tolist() if "microbatch" in fields else [1] * len(self.of)
            keys = [(of_layout[at], size) for at, size in zip(self.of.tolist(), sizes)]
            pairs = dict(zip(keys, range(len(keys))))
            at = {key: place for place, key in enumerate(pairs)}
            self._alike[fields] = pairs, np.array([at[key] for key in keys], np.intp)
        pairs, where = self._alike[fields]
        known, found = self.tables.known, list[Any]()
        for key, pair in pairs.items():
            for choice in choices:
                whole = (name, key, *choice.values())
                if whole not in known:
                    layout, size = self.layouts[self.of[pair]], int(self.sizes[pair])
                    layout = local(layout) if fields == MICRO else layout
                    known[whole] = make(replace(layout, microbatch=size, **choice, **more))
                found.append(known[whole])
        return np.array(found, float).reshape(len(pairs), len(choices), *np.shape(found[0]))[where]

    @cached_property
    def _alike(self) -> dict[tuple[str, ...], tuple[dict[Any, int], np.ndarray]]:
        return {}
