"""AdamW over a rank's stages of a GPT, its states divided over the data-parallel ranks or not; and clipping."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from tplab.models.gpt import GPTConfig, gpt_layer_name, gpt_specs
from tplab.sharding import P
from tplab.torch.comm.collectives import axis_index
from tplab.torch.data.clipping import gradient_norm, scale_to
from tplab.torch.data.shard_optimizer import shard_optimizer
from tplab.torch.data.sharded_optimizer import ShardedOptimizer
from tplab.torch.pipeline.stages import Stages
from tplab.training.recipe import Recipe


class Piece(NamedTuple):
    """What the optimizer steps: a parameter, or with ZeRO this rank's part of it.

    name         in the state of the whole GPT
    is_counted   whether it is here that it counts: not where it is tied to another one, or on a second rank
    whole        the parameter        own   what is stepped: the parameter itself, or some of its numbers [n]
    held         which numbers, read row by row
    """

    name: str
    is_counted: bool
    whole: Tensor
    own: Tensor
    held: range


class Optimizer:
    """AdamW as a recipe has it."""

    def __init__(self, stages: Stages, config: GPTConfig, recipe: Recipe):
        self._stages, self._config, self._clip = stages, config, recipe.clip
        adamw = partial(torch.optim.AdamW, lr=0.0, betas=recipe.betas, weight_decay=recipe.weight_decay)
        parameters = stages.parameters()
        self.inner = shard_optimizer(adamw, parameters, "dp") if recipe.zero else adamw(parameters)
        self.pieces = list(self._pieces())
        specs = gpt_specs(config)
        cut_along = ("pp", "dp") if recipe.zero else ("pp",)
        self._counted = {piece.name: piece.own for piece in self.pieces if piece.is_counted}
        self._specs = {name: P((*cut_along, *specs[name].axis_names)) for name in specs}

    @property
    def is_zero(self) -> bool:
        """Whether each data-parallel rank has a part of the states."""
        return isinstance(self.inner, ShardedOptimizer)

    @torch.no_grad()
    def step(self, rate: float) -> float:
        """Clip the gradients and update the parameters; the norm that the gradients had."""
        for group in self.inner.param_groups:
            group["lr"] = rate
        if isinstance(self.inner, ShardedOptimizer):
            self.inner.reduce_gradients()
        norm = gradient_norm(self._counted, self._specs)
        if self._clip is not None:
            scale_to((piece.own for piece in self.pieces), norm, self._clip)
        self.inner.step()
        self.inner.zero_grad()
        return float(norm)

    def states(self, piece: Piece) -> dict[str, Tensor]:
        """What AdamW keeps of a piece; zeros before its first step."""
        state = self.inner.state[piece.own]
        if not state:
            zeros = torch.zeros_like(piece.own.detach())
            state.update(step=torch.tensor(0.0), exp_avg=zeros, exp_avg_sq=zeros.clone())
        return state

    def _pieces(self) -> Iterator[Piece]:
        about = {parameter: (name, is_counted) for name, is_counted, parameter in self._named()}
        if not isinstance(self.inner, ShardedOptimizer):
            for parameter, (name, is_counted) in about.items():
                yield Piece(name, is_counted, parameter, parameter, range(parameter.numel()))
            return
        for bucket in self.inner.buckets:
            for parameter, own, ranges in zip(bucket.parameters, bucket.shards, bucket.pieces.ranges):
                yield Piece(*about[parameter], parameter, own, ranges[bucket.index])

    def _named(self) -> Iterator[tuple[str, bool, Tensor]]:
        """(name, whether it counts here, parameter)."""
        stages, config = self._stages, self._config
        for layer, name, parameter in stages.by_layer():
            stage = stages.partition.stage_of(layer)
            first = next(place for place, held in enumerate(stages.placement) if stage in held)
            is_tied = layer == config.num_layers + 1 and name == "embedding.weight"
            is_counted = first == axis_index(stages.axis) and not is_tied
            yield gpt_layer_name(config, layer, name), is_counted, parameter
