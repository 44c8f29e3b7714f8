"""Which stages and parameters each rank of a pipeline holds."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from tplab.forecast.model import Model
from tplab.forecast.plan import Plan
from tplab.forecast.stacks import Stack, find_stack


class Stage(NamedTuple):
    """A stage that a rank holds.

    layers      how many of the model's layers it has      dense    how many of these are dense first layers
    is_first    whether it has the embedding       is_last   whether it has the final norm, the head and the loss
    sends       whether the next stage and the previous one are on other ranks
    share       the share of microbatches that it runs here: half of them if the schedule has two directions
    """

    number: int
    layers: int
    dense: int
    is_first: bool
    is_last: bool
    sends: tuple[bool, bool]
    share: float

    @property
    def counts(self) -> tuple[int, int, bool, bool]:
        """The numbers of its ordinary layers, dense first layers, embeddings and heads."""
        return self.layers - self.dense, self.dense, self.is_first, self.is_last


class Parameters(NamedTuple):
    """The numbers of parameters of a rank, before ZeRO divides them.

    dense      outside the experts        experts    of its experts
    embedding  of the embedding and the learned positions, if it has them
    words      of one embedding: its part of the vocabulary times h
    copied     replicated on every tensor-parallel rank
    unit       of the largest layer, or the embedding or head: what ZeRO 3 gathers at once
    is_tied    whether another pipeline rank has the same embedding
    """

    dense: int
    experts: int
    embedding: int
    words: int
    copied: int
    unit: int
    is_tied: bool

    @property
    def total(self) -> int:
        return self.dense + self.experts


@lru_cache(maxsize=4096)
def stages_on(model: Model, plan: Plan, pipeline_rank: int) -> tuple[Stage, ...]:
    """The stages that a rank at this place of its pipeline holds."""
    partition, placement = plan.partition(model), plan.placement
    last, held = partition.num_stages - 1, placement[pipeline_rank]
    has_two_ways = sum(map(len, placement)) > partition.num_stages
    found = []
    for number in held:
        here = partition.stages[number]
        layers, dense = (sum(1 <= layer <= most for layer in here) for most in (model.layers, model.dense_layers))
        up, down = (0 <= other <= last and (has_two_ways or other not in held) for other in (number + 1, number - 1))
        found.append(
            Stage(number, layers, dense, number == 0, number == last, (up, down), 0.5 if has_two_ways else 1.0)
        )
    return tuple(found)


@lru_cache(maxsize=4096)
def held_parameters(model: Model, plan: Plan, pipeline_rank: int, stack: str | Stack = "megatron") -> Parameters:
    """The parameters of a rank at this place of its pipeline.

    If one rank has both a tied embedding and the head, they are one; in tplab's own pipelines they stay two, and their
    gradients are summed.
    """
    stack = find_stack(stack)
    stages = stages_on(model, stack.cut(plan), pipeline_rank)
    ends, copied, split, experts, unit = model.end_parts, 0, 0, 0, 0
    for kind, layers in zip((model, model.dense), map(sum, zip(*(stage.counts[:2] for stage in stages)))):
        for part in kind.layer_parts.values():
            copied += layers * part.copied
            split += layers * part.split
            experts += layers * part.experts
        unit = max(unit, kind.layer_on_rank(plan.tp, plan.ep, plan.etp) if layers else 0)
    dense, experts = copied + split // plan.tp, experts // (plan.ep * plan.expert_tp)
    words, embedding = model.vocab_on_rank(plan.tp) * model.hidden, 0
    has_first, has_last = (any(getattr(stage, name) for stage in stages) for name in ("is_first", "is_last"))
    if has_first:
        embedding = words + ends["positions"]
        copied += ends["positions"]
    if has_last:
        copied += ends["final norm"]
        dense += ends["final norm"]
        if not (model.tied and has_first and not stack.plain):
            dense += words
    unit = max(unit, words if has_first or has_last else 0)
    is_tied = model.tied and has_first != has_last
    return Parameters(dense + embedding, experts, embedding, words, copied, unit, is_tied)
