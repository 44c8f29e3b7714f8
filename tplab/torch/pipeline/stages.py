"""A model as a list of layers, cut into stages. Each rank makes its own stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tplab.mesh import Axis
from tplab.pipeline.checks import Tied, tied_in
from tplab.pipeline.partition import LayerSpec, Partition, TiedSpec, cut_layers, layer_names, ties
from tplab.schedules import Schedule
from tplab.schedules.check import require_ranks
from tplab.schedules.placement import Placement, one_way
from tplab.torch.pipeline.redraw import Redraw
from tplab.torch.pipeline.stage import InTurn
from tplab.torch.ranks.rank import current_rank_or_none, prepares, this_rank

Layer = LayerSpec | nn.Module | Callable[..., Any]


class Stages(dict[int, nn.Module]):
    """This rank's stages: number -> module, as `train_batch` takes them.

    partition   which layers each stage has
    tied        which parameters are tied, by stage and name
    placement   which stages each position of `axis` holds
    """

    def __init__(
        self, modules: Mapping[int, nn.Module], partition: Partition, tied: Tied, placement: Placement, axis: Axis
    ):
        super().__init__(modules)
        self.partition, self.tied, self.placement, self.axis = partition, tied, placement, axis

    def parameters(self) -> list[nn.Parameter]:
        """The parameters of all its stages, each once, for an optimizer."""
        return list(dict.fromkeys(p for module in self.values() for p in module.parameters()))

    def by_layer(self) -> Iterator[tuple[int, str, nn.Parameter]]:
        """Every parameter, with the number of its layer in the model and its name in that layer."""
        for stage, module in self.items():
            for name, parameter in module.named_parameters():
                place, _, rest = name.partition(".")
                yield self.partition.bounds[stage] + int(place), rest, parameter


@prepares
def stages_of(
    layers: Sequence[Layer],
    schedule: Schedule,
    method: str | Sequence[float] = "parameters",
    *,
    axis: Axis = "pp",
    bounds: Sequence[int] | None = None,
) -> Stages:
    """Cut a model into the stages of `schedule`, and make this rank's stages. Call it inside a rank's program.

    layers    LayerSpecs, existing modules, and functions (which have no parameters). Parameters that modules in several
              stages share are tied; modules must then be the same on every rank, like arguments of `run`
    method    what is balanced over the ranks: see `tplab.pipeline.partition`
    bounds    the cuts, if they are known: stage s has the layers bounds[s] to bounds[s + 1] - 1

    A layer's initial weights depend only on the seed of the run and the layer's position in the list. So the model is
    the same with any number of ranks and stages, and data-parallel copies agree.
    """
    rank = this_rank()
    index = rank.place(axis).index
    require_ranks(schedule, len(rank.place(axis).group), rank.place(axis).label)
    made = cut(layers, schedule.num_stages, method, one_way(schedule.placement, schedule.num_stages), bounds)
    first = {place: tied[0] for tied in ties(layers).values() for place in tied}
    modules = {}
    for stage in dict.fromkeys(schedule.placement[index]):
        modules[stage] = InTurn([_made(layers[place], first.get(place, place)) for place in made.stages[stage]])
    tied = (
        *tied_in(layers, made, lambda layer: f"{'' if layer.forward is None else 'layer.'}{layer.weight}"),
        *_shared(layers, made),
    )
    return Stages(modules, made, tied, schedule.placement, axis)


def cut(
    layers: Sequence[Layer],
    parts: int,
    method: str | Sequence[float] = "parameters",
    placement: Any = None,
    bounds: Sequence[int] | None = None,
) -> Partition:
    """The partition of a model that need not exist: no memory is allocated."""
    names = layer_names(layers)
    return cut_layers(num_parameters(layers), parts, method, names=names, placement=placement, bounds=bounds)


def num_parameters(layers: Sequence[Layer]) -> list[int]:
    """The number of parameters of each layer. Specs are made on torch's "meta" device, which allocates no memory.

    A function has none: an embedding inside a lambda is neither counted nor trained.
    """
    counts: dict[LayerSpec, int] = {}
    return [_count(layer, counts) for layer in layers]


def _count(layer: Layer, counts: dict[LayerSpec, int]) -> int:
    if not isinstance(layer, LayerSpec):
        return sum(p.numel() for p in layer.parameters()) if isinstance(layer, nn.Module) else 0
    if layer not in counts:
        with torch.device("meta"):
            counts[layer] = _count(_drawn(layer, 0), counts)
    return counts[layer]


def _drawn(spec: LayerSpec, place: int) -> Any:
    """The layer, with random numbers drawn for its position in the model."""
    rank = current_rank_or_none()
    if rank is None:
        return spec.build()
    with Redraw(rank, (place,), rank.mesh.axis_names, torch.empty(0).device):
        return spec.build()


def _made(layer: Layer, place: int) -> nn.Module:
    made = _drawn(layer, place) if isinstance(layer, LayerSpec) else layer
    if not isinstance(made, nn.Module):
        return _Called(made)
    forward = layer.forward if isinstance(layer, TiedSpec) else None
    return made if forward is None else _Called(forward, made)


class _Called(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[..., Any], layer: nn.Module | None = None):
        super().__init__()
        self._function, self.layer = function, layer

    def forward(self, *inputs: Any) -> Any:
        return self._function(*inputs) if self.layer is None else self._function(self.layer, *inputs)


def _shared(layers: Sequence[Layer], made: Partition) -> Tied:
    """The (stage, name) of every parameter that modules in several stages share."""
    found: dict[nn.Parameter, dict[int, str]] = {}
    for place, layer in enumerate(layers):
        stage = made.stage_of(place)
        for name, parameter in layer.named_parameters() if isinstance(layer, nn.Module) else ():
            if parameter.requires_grad:
                found.setdefault(parameter, {}).setdefault(stage, f"{place - made.bounds[stage]}.{name}")
    return tuple(tuple(places.items()) for places in found.values() if len(places) > 1)
