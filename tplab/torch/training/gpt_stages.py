"""The parameters of a GPT, by the names of the whole model, on a rank that holds some of its stages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tplab.mesh import Axis
from tplab.models.gpt import GPTConfig, gpt_layer_name, gpt_specs
from tplab.torch.layers.parameters import piece_of
from tplab.torch.pipeline.stages import Stages


def held_of(stages: Stages, config: GPTConfig) -> dict[str, list[nn.Parameter]]:
    """What stages of gpt_layers(config) hold: name in the state of a GPT -> parameters. There are two of the embedding
    where one rank has both the first and the last layer."""
    found: dict[str, list[nn.Parameter]] = {}
    for layer, name, parameter in stages.by_layer():
        found.setdefault(gpt_layer_name(config, layer, name), []).append(parameter)
    return found


@torch.no_grad()
def load_whole(stages: Stages, config: GPTConfig, state: Mapping[str, Any], axis: Axis = "tp") -> None:
    """Give the stages of this rank their piece of the state of a whole GPT."""
    specs = gpt_specs(config, axis)
    for name, parameters in held_of(stages, config).items():
        for parameter in parameters:
            parameter.copy_(piece_of(torch.as_tensor(state[name]), specs[name]))
