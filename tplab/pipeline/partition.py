"""Layers that are not built yet; and partition: layers cut into stages, so that the busiest rank has as little to do as
possible."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from tplab.errors import ScheduleError, ShapeError
from tplab.pipeline.balance import Balance, Number
from tplab.schedules.placement import Placement, linear
from tplab.units import counted


class LayerSpec:
    """A layer to be built later: LayerSpec(cls, *args, **kwargs).build() is cls(*args, **kwargs).

        layers = [LayerSpec(Embedding, 65, 768), *[LayerSpec(Block, 768)] * 12, LayerSpec(Linear, 768, 65)]

    A list of specs is a model that takes no memory. Each rank builds only the layers of its own stages, so construction
    needs less memory with more stages. The idea and the name are DeepSpeed's.
    """

    key: str | None = None
    """The name that ties this layer's weight to other layers, if it is shared with any."""

    def __init__(self, cls: Callable[..., Any], *args: Any, **kwargs: Any):
        if not callable(cls):
            raise TypeError(f"LayerSpec takes what makes the layer, and its arguments; {cls!r} cannot be called")
        self.cls, self.args, self.kwargs = cls, args, kwargs

    @property
    def name(self) -> str:
        """The name of the class."""
        return _name_of(self.cls)

    def build(self) -> Any:
        """Build the layer; each call builds a new one."""
        return self.cls(*self.args, **self.kwargs)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    def __hash__(self) -> int:
        return hash((self.cls, len(self.args), *sorted(self.kwargs)))

    def __repr__(self) -> str:
        given = [*map(repr, self.args), *(f"{name}={value!r}" for name, value in self.kwargs.items())]
        return f"LayerSpec({', '.join([self.name, *given])})"


class TiedSpec(LayerSpec):
    """A layer that shares its weight with every other layer of the same key.

        TiedSpec("embedding", Embedding, 65, 768)
        TiedSpec("embedding", Embedding, 65, 768, forward=lambda layer, x: x @ layer.weight.T)

    All of them start with the same values, whichever ranks they are on, and `train_batch` adds up their gradients.

    weight    the name of the tied parameter
    forward   what to call instead of the layer, with the layer as its first argument, before the inputs
    """

    def __init__(
        self,
        key: str,
        cls: Callable[..., Any],
        *args: Any,
        weight: str = "weight",
        forward: Callable[..., Any] | None = None,
        **kwargs: Any,
    ):
        super().__init__(cls, *args, **kwargs)
        self.key, self.weight, self.forward = key, weight, forward

    __hash__ = LayerSpec.__hash__


def layer_names(layers: Sequence[Any]) -> list[str]:
    """The name of each layer, for "type:regex" partitions and for printing.

    Raises TypeError for anything that is not a layer.
    """
    for place, layer in enumerate(layers):
        if not isinstance(layer, LayerSpec) and not callable(layer):
            raise TypeError(
                f"layer {place} is {layer!r}, which cannot be called; a layer is a LayerSpec, a layer that is there "
                "already, or a function"
            )
    names = (layer.name if isinstance(layer, LayerSpec) else _name_of(layer) for layer in layers)
    return [name.replace("<lambda>", "lambda") for name in names]


def ties(layers: Sequence[Any]) -> Mapping[str, list[int]]:
    """Key -> the layers that have it."""
    found: dict[str, list[int]] = {}
    for place, layer in enumerate(layers):
        if isinstance(layer, LayerSpec) and layer.key is not None:
            found.setdefault(layer.key, []).append(place)
    return found


def _name_of(x: Any) -> str:
    return getattr(x, "__name__", type(x).__name__)


@dataclass(frozen=True)
class Partition:
    """Consecutive layers in each stage.

    bounds      stage s has the layers bounds[s] to bounds[s + 1] - 1
    costs       what was balanced, one figure per layer
    weights     parameters of each layer
    placement   the stages of each rank
    method      what `costs` are
    names       of the layers, if they have any
    """

    bounds: tuple[int, ...]
    costs: tuple[Number, ...] = field(repr=False)
    weights: tuple[Number, ...] = field(repr=False)
    placement: Placement = field(repr=False)
    method: str = "parameters"
    names: tuple[str, ...] = field(default=(), repr=False)

    @property
    def num_stages(self) -> int:
        return len(self.bounds) - 1

    @property
    def stages(self) -> list[range]:
        """The layers of each stage."""
        return [range(a, b) for a, b in zip(self.bounds, self.bounds[1:])]

    @property
    def stage_costs(self) -> list[Number]:
        return [sum(self.costs[a:b]) for a, b in zip(self.bounds, self.bounds[1:])]

    @property
    def stage_weights(self) -> list[Number]:
        """Parameters of each stage."""
        return [sum(self.weights[a:b]) for a, b in zip(self.bounds, self.bounds[1:])]

    @property
    def rank_costs(self) -> list[Number]:
        """The cost of each rank: the sum over its stages."""
        costs = self.stage_costs
        return [sum(costs[stage] for stage in held) for held in self.placement]

    @property
    def largest(self) -> Number:
        """The cost of the busiest rank, which `partition` makes as small as it can."""
        return max(self.rank_costs)

    def stage_of(self, layer: int) -> int:
        return bisect_right(self.bounds, layer) - 1

    def __str__(self) -> str:
        """One line per stage: its rank, its layers, its parameters, and its cost if that is something else."""
        home = {stage: rank for rank, held in enumerate(self.placement) for stage in held}
        wide = max(len(f"{weight:,}") for weight in self.stage_weights)
        lines = []
        for stage, (a, b) in enumerate(pairwise(self.bounds)):
            line = f"stage {stage}  rank {home[stage]}  layers {f'[{a}, {b})' if a < b else 'none':<10}"
            line += f"  {self.stage_weights[stage]:>{wide},} parameters"
            if self.method != "parameters":
                line += f"  {self.method} {self.stage_costs[stage]:g}"
            if self.names and a < b:
                line += f"  {self.names[a]} to {self.names[b - 1]}"
            lines.append(line)
        return "\n".join(lines)


def partition(
    weights: Sequence[Number],
    parts: int,
    method: str | Sequence[Number] = "parameters",
    *,
    names: Sequence[str] = (),
    placement: Placement | None = None,
    memory: Sequence[Number] | Sequence[Sequence[Number]] | None = None,
    memory_limit: Number | Sequence[Number] | None = None,
) -> Partition:
    """Cut layers into `parts` stages of at least one layer each. The cut is optimal: the busiest rank has the least.

    weights     parameters of each layer
    method      what is balanced: "parameters"; "uniform", the number of layers; "type:regex", the number of layers
                whose name matches (ignoring case); or one figure per layer, such as measured seconds
    names       of the layers, for "type:regex" and for printing
    placement   the stages of each rank, from `tplab.schedules.placement`: wrapped, V or wave; by default one stage per
                rank. A rank's cost is the sum over its stages
    memory      what each layer needs [layers], or needs on each rank [ranks, layers] (an early rank keeps more
                activations); by default its weights
    memory_limit  what a rank has (one figure, or one per rank); by default there is no limit

    For a hundred layers this takes milliseconds with one stage per rank, under a second with two (with memory limits, a
    minute), and much longer with three or more, unless layers are very similar. With one stage per rank, the result is
    the most even of all best partitions.
    DeepSpeed's partition_balanced minimises largest - smallest instead, so cutting [1, 4, 2, 2, 2] into 4 parts gives a
    largest of 5.
    """
    costs, label = _costs(weights, method, names)
    held = linear(parts) if placement is None else placement
    if sum(map(len, held)) != parts:
        raise ShapeError(f"the placement has {sum(map(len, held))} stages and parts is {parts}; they must agree")
    if parts > len(costs):
        raise ShapeError(
            f"{counted(len(costs), 'layer')} cannot make {parts} stages of a layer each; use at most "
            f"{counted(len(costs), 'stage')}"
        )
    balance = Balance(costs, held, *_memory(weights, len(held), memory, memory_limit))
    return Partition(tuple(balance.bounds()), tuple(costs), tuple(weights), held, label, tuple(names))


def cut_layers(
    sizes: Sequence[Number],
    parts: int,
    method: str | Sequence[Number] = "parameters",
    *,
    names: Sequence[str] = (),
    placement: Placement | None = None,
    bounds: Sequence[int] | None = None,
) -> Partition:
    """The partition of layers with these numbers of parameters: the best, or the one with these `bounds`."""
    if bounds is None:
        return partition(sizes, parts, method, names=names, placement=placement)
    given = tuple(map(int, bounds))
    rises = all(a <= b for a, b in pairwise(given))
    if len(given) != parts + 1 or given[0] != 0 or given[-1] != len(sizes) or not rises:
        raise ScheduleError(
            f"bounds {list(given)} do not cut {len(sizes)} layers into {parts} stages; give {parts + 1} rising "
            f"numbers, the first 0 and the last {len(sizes)}"
        )
    return Partition(given, tuple(sizes), tuple(sizes), placement or linear(parts), "parameters", tuple(names))


def _costs(
    weights: Sequence[Number], method: str | Sequence[Number], names: Sequence[str]
) -> tuple[Sequence[Number], str]:
    """(what is balanced, its name)."""
    costs: Sequence[Number]
    if names and len(names) != len(weights):
        raise ShapeError(f"{len(names)} names for {len(weights)} layers; give one per layer")
    if not isinstance(method, str):
        costs, label = [_plain(cost) for cost in method], "cost"
        if len(costs) != len(weights):
            raise ShapeError(f"{len(costs)} measured costs for {len(weights)} layers; give one per layer")
    elif method == "parameters":
        costs, label = [_plain(weight) for weight in weights], method
    elif method == "uniform":
        costs, label = [1] * len(weights), "layers"
    elif method.startswith("type:"):
        if not names:
            raise ShapeError(f"method {method!r} looks at the layers' names; pass names=[...], one per layer")
        pattern = re.compile(method[len("type:") :], re.IGNORECASE)
        costs, label = [int(bool(pattern.search(name))) for name in names], method[len("type:") :]
        if not any(costs):
            raise ShapeError(
                f"no layer's name matches {pattern.pattern!r}; the names are {', '.join(sorted(set(names)))}"
            )
    else:
        raise ShapeError(f"method is 'parameters', 'uniform', 'type:regex' or a figure per layer, not {method!r}")
    if any(cost < 0 or not math.isfinite(cost) for cost in costs):
        raise ShapeError(f"the cost of a layer is {min(costs)}; it must be finite, 0 or more")
    return costs, label


def _memory(
    weights: Sequence[Number],
    ranks: int,
    memory: Sequence[Number] | Sequence[Sequence[Number]] | None,
    limit: Number | Sequence[Number] | None,
) -> tuple[list[list[Number]] | None, list[Number]]:
    """(what the layers need on each rank, what each rank has), or (None, [])."""
    if limit is None:
        return None, []
    table = np.asarray(weights if memory is None else memory)
    if table.shape not in ((len(weights),), (ranks, len(weights))):
        raise ShapeError(
            f"memory has shape {table.shape}; give [layers] = [{len(weights)}], "
            f"or [ranks, layers] = [{ranks}, {len(weights)}]"
        )
    return np.broadcast_to(table, (ranks, len(weights))).tolist(), np.broadcast_to(limit, ranks).tolist()


def _plain(value: Number) -> Number:
    return value.item() if isinstance(value, np.generic) else value
