"""AdamW over a rank's stages of a GPT, sharded by ZeRO over the ranks that have copies; and clipping."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tplab.mesh import Axis
from tplab.models.gpt import ROUTER_BIAS, GPTConfig, gpt_layer_name, gpt_parameters, gpt_specs
from tplab.sharding import P, cut
from tplab.torch.comm.collectives import axis_index, axis_size
from tplab.torch.data.average import copies_of
from tplab.torch.data.clipping import gradient_norm, scale_to
from tplab.torch.data.parallel import DataParallel
from tplab.torch.data.shard_gradients import shard_gradients
from tplab.torch.data.sharded_optimizer import ShardedOptimizer
from tplab.torch.pipeline.stages import Stages
from tplab.torch.ranks.rank import this_rank
from tplab.torch.training.gpt_stages import box_of
from tplab.training.recipe import Recipe, data_axes


class Piece(NamedTuple):
    """What the optimizer steps: a parameter, or with ZeRO this rank's elements of it.

    name         its name in the state of the whole GPT
    is_counted   whether it is counted here: not if it is tied to another one, or a second rank's copy
    whole        the parameter; None if no rank has it whole
    own          what is stepped: the parameter itself, or some of its elements [n]
    held         the indices of those elements, in row-major order
    """

    name: str
    is_counted: bool
    whole: Tensor | None
    own: Tensor
    held: range


class Optimizer:
    """AdamW as a recipe says. Gradients are sent during the last backward pass of a stage, with ZeRO 2 of each part.

    cut_along   the axes along which each rank has a part of the states, such as ("dp",) or ("dp", "cp"), or none.
                Experts, whose specs name "ep", have copies only along the others
    """

    def __init__(self, stages: Stages, config: GPTConfig, recipe: Recipe):
        self._stages, self._config, self._clip = stages, config, recipe.clip
        self._data = data = data_axes(this_rank().mesh)
        adamw = partial(torch.optim.AdamW, lr=0.0, betas=recipe.betas, weight_decay=recipe.weight_decay)
        parameters, copies = _as_they_leave(stages), copies_of(stages, data, are_averaged=False)
        biases = {parameter for _, name, parameter in stages.by_layer() if name.endswith(ROUTER_BIAS)}
        found: dict[tuple[Axis, bool], list[nn.Parameter]] = {}
        for parameter in sorted(parameters, key=lambda p: copies(p) == data):  # experts first: none of them is tied
            found.setdefault((copies(parameter), parameter in biases), []).append(parameter)
        groups = [{"params": group, "axis": axis} | (_by_sign(config) if is_bias else {})
                  for (axis, is_bias), group in found.items()]  # fmt: skip
        if recipe.zero in (1, 2):  # they differ in the number of last backward passes: `Recipe.num_parts`
            self.inner = shard_gradients(adamw, groups, data, bucket_bytes=recipe.bucket_bytes)
        else:
            self.inner = adamw(groups)
        if recipe.zero == 0:
            DataParallel(parameters, data, recipe.bucket_bytes, find_unused=False, from_first=False, copies=copies)
        self.pieces = list(self._pieces(is_cut=recipe.zero == 3))
        self.cut_along = data if recipe.zero else ()
        specs = gpt_specs(config)
        self._biases = [piece for piece in self.pieces if piece.name.endswith(ROUTER_BIAS)]
        self._whole_loads = recipe.whole_loads(this_rank().mesh)
        self._clipped = [piece for piece in self.pieces if not piece.name.endswith(ROUTER_BIAS)]
        self._counted = {piece.name: piece.own for piece in self._clipped if piece.is_counted}
        self._specs = {
            name: P(tuple(dict.fromkeys(("pp", *self.cut_along, *spec.axis_names)))) for name, spec in specs.items()
        }

    @torch.no_grad()
    def step(self, rate: float) -> float:
        """Clip the gradients and update the parameters. Returns the norm before clipping."""
        for group in self.inner.param_groups:
            group["lr"] = group.get("own_rate", rate)
        if isinstance(self.inner, ShardedOptimizer):
            self.inner.reduce_gradients()
        norm = gradient_norm(self._counted, self._specs)
        if self._clip is not None:
            scale_to((piece.own for piece in self._clipped), norm, self._clip)
        for piece in self._biases:
            if piece.own.grad is not None:
                piece.own.grad.mul_(self._whole_loads).round_()
        self.inner.step()
        self.inner.zero_grad()
        return float(norm)

    def states(self, piece: Piece) -> dict[str, Tensor]:
        """AdamW's state of a piece; zeros before its first step."""
        state = self.inner.state[piece.own]
        if not state:
            zeros = torch.zeros_like(piece.own.detach())
            state.update(step=torch.tensor(0.0, device="cpu"), exp_avg=zeros, exp_avg_sq=zeros.clone())
        return state

    def _pieces(self, is_cut: bool) -> Iterator[Piece]:
        wholes = gpt_parameters(self._config)
        about = {parameter: (name, is_counted) for name, is_counted, parameter in self._named()}
        if not isinstance(self.inner, ShardedOptimizer):
            for parameter, (name, is_counted) in about.items():
                size = math.prod(box_of(wholes[name])[1])
                if is_cut:
                    held = cut(size, axis_size(self._data), "ceil")[axis_index(self._data)]
                    yield Piece(name, is_counted, None, parameter, held)
                else:
                    yield Piece(name, is_counted, parameter, parameter, range(size))
            return
        for bucket in self.inner.buckets:
            for parameter, own, ranges in zip(bucket.parameters, bucket.shards, bucket.pieces.ranges):
                yield Piece(*about[parameter], parameter, own, ranges[bucket.index])

    def _named(self) -> Iterator[tuple[str, bool, Tensor]]:
        """(name, whether it is counted here, parameter)."""
        stages, config = self._stages, self._config
        for layer, name, parameter in stages.by_layer():
            stage = stages.partition.stage_of(layer)
            first = next(place for place, held in enumerate(stages.placement) if stage in held)
            is_tied = layer == config.num_layers + 1 and name == "embedding.weight"
            is_counted = first == axis_index(stages.axis) and not is_tied
            yield gpt_layer_name(config, layer, name), is_counted, parameter


def _by_sign(config: GPTConfig) -> dict[str, Any]:
    """Options of a group of router biases: AdamW without momentum or decay subtracts rate * g / (|g| + eps), where g is
    a whole number."""
    assert config.experts is not None
    return {"own_rate": config.experts.bias_rate, "betas": (0.0, 0.0), "weight_decay": 0.0, "eps": 1e-12}


def _as_they_leave(stages: Stages) -> list[nn.Parameter]:
    """The parameters, ordered so that buckets, filled from the last to the first, send copied parameters last: their
    gradients wait for those of other ranks at the end of the batch."""
    tied = {place for tie in stages.tied for place in tie}
    found: dict[nn.Parameter, bool] = {}
    for stage, module in stages.items():
        is_copied = sum(stage in held for held in stages.placement) > 1
        for name, parameter in module.named_parameters():
            found[parameter] = is_copied or (stage, name) in tied
    return sorted(found, key=lambda parameter: not found[parameter])
