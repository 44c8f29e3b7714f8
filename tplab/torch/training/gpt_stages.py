"""The parameters of a GPT, by their names in the whole model, on a rank that holds some of its stages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tplab.mesh import Axis
from tplab.models.gpt import GPTConfig, Parameter, gpt_layer_name, gpt_specs
from tplab.sharding import held_by
from tplab.torch.data.shard_parameters import gather_state
from tplab.torch.layers.parameters import piece_of
from tplab.torch.pipeline.stages import Stages
from tplab.torch.ranks.rank import this_rank


def held_of(stages: Stages, config: GPTConfig) -> dict[str, list[nn.Parameter]]:
    """The parameters in stages of gpt_layers(config), by their names in the state of a GPT. A rank with both the first
    and the last layer has two for the embedding."""
    found: dict[str, list[nn.Parameter]] = {}
    for layer, name, parameter in stages.by_layer():
        found.setdefault(gpt_layer_name(config, layer, name), []).append(parameter)
    return found


@torch.no_grad()
def load_whole(stages: Stages, config: GPTConfig, state: Mapping[str, Any], axis: Axis = "tp") -> None:
    """Load into this rank's stages their piece of the state of a whole GPT."""
    specs = gpt_specs(config, axis)
    for name, parameters in held_of(stages, config).items():
        for parameter in parameters:
            parameter.copy_(piece_of(torch.as_tensor(state[name], device=parameter.device), specs[name]))


def whole_of(stages: Stages, config: GPTConfig, is_cut: bool) -> dict[str, Tensor]:
    """The parameters of this rank's stages by name, each as the rank's whole tensor-parallel piece.

    is_cut   whether `shard_parameters` has cut them: then all ranks must call this, to gather them
    """
    if not is_cut:
        return {name: parameters[0].detach() for name, parameters in held_of(stages, config).items()}
    wholes = {stage: gather_state(module) for stage, module in stages.items()}
    return {
        gpt_layer_name(config, layer, name): wholes[stage][f"{layer - stages.partition.bounds[stage]}.{name}"]
        for layer, name, _ in stages.by_layer()
        for stage in [stages.partition.stage_of(layer)]
    }


def box_of(about: Parameter) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """This rank's tensor-parallel piece of a parameter: its first index and its size in each dim."""
    rank = this_rank()
    held = held_by(about.shape, about.spec, rank.mesh, rank.rank)
    return tuple(one.start for one in held), tuple(map(len, held))
