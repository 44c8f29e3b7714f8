"""What a rank holds: stages and their parameters; and in bytes, what layers and the head keep for their backward."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from tplab.cost.activations import activation_tensors
from tplab.experts import expected_copies
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


class Kept(NamedTuple):
    """Bytes of one microbatch on one rank.

    layer, embedding, head   kept by a layer, by the embedding, by the final norm and the head
    layer_again, head_again  recomputed in their backward passes, the most of any layer
    layer_work, head_work    what their backward passes need in addition
    logits                   of this rank's entries, in all the copies that the loss makes of them
    keeps_logits             whether they are kept rather than recomputed
    dense                    kept by a dense first layer
    """

    layer: int
    embedding: int
    head: int
    layer_again: int
    head_again: int
    layer_work: int
    head_work: int
    logits: int
    keeps_logits: bool
    dense: int


def layer_tensors(model: Model, plan: Plan, sequence: int, stack: str | Stack = "megatron") -> dict[str, float]:
    """Tensors that one layer keeps for its backward pass, without recomputation: name -> bytes on each rank.

    The tensors of Korthikanti et al. 2022 (`tplab.cost.activation_tensors`); one number per row for each norm and for
    each head of fused attention; what plain layers keep in addition (Stack.plain); and for experts, the tokens in their
    order. Keeps.extra is what a stack was measured to keep beyond all these.
    """
    stack, size = find_stack(stack), plan.kept_size
    length, batch, tp = sequence // plan.cp, plan.microbatch, plan.tp
    rows, outside = length * batch, tp if plan.sequence_parallel else 1
    is_repeated = stack.plain and model.num_kv_heads < model.heads and plan.cp == 1  # keys, once per query head
    found = activation_tensors(
        length,
        batch,
        model.hidden,
        model.heads,
        tp,
        sequence_parallel=plan.sequence_parallel,
        itemsize=size,
        dropout=model.dropout,
        scores=not plan.flash and plan.recompute != "selective",
        kv_heads=model.heads if is_repeated else model.num_kv_heads,
        head_width=model.head_width,
        hidden=model.ffn_width * max(1, model.experts_per_token),
        gated=model.gated,
        gathered=stack.plain,
    )
    if model.kv_rank:
        found["value"] = found["input of the output projection"] = rows * model.heads * model.value_width * size // tp
        found["latents, and these normalised"] = 2 * rows * (model.q_rank + model.kv_rank) * size // outside
    statistics = 1 if model.norm == "rms" else 2
    found["statistics of the norms"] = 2 * statistics * 4 * rows // outside
    if plan.flash:
        found["sums of the scores"] = 4 * rows * model.heads // tp
    if stack.plain and model.norm == "rms":
        found["inputs of the norms, normalised"] = 2 * rows * model.hidden * size // outside
    if stack.plain and model.gated:
        found["silu"] = found["gate"]
    if model.experts:
        load = plan.load(model, sequence)
        for name in {"gate", "up", "silu", "input of gelu", "input of down"} & found.keys():
            found[name] *= load
        mine = rows if plan.tp > 1 and not plan.sequence_parallel else rows * plan.expert_tp / plan.tp
        routed = load * model.experts_per_token * mine
        found["input of the experts"] = routed * model.hidden * size
        found["router"] = 2 * 4 * rows * model.experts // outside
        if stack.plain:
            found |= _plain_experts(model, plan, rows // outside, routed)
    if model.shared_ffn:
        factors = (4 if model.gated else 2) if stack.plain else 3
        found["shared MLP"] = factors * rows * model.shared_ffn * size // tp
    if stack.keeps.extra:
        found["others"] = int(stack.keeps.extra * rows * model.hidden * size / outside)
    return found


def _plain_experts(model: Model, plan: Plan, tokens: int, routed: float) -> dict[str, float]:
    """What plain layers keep of a rank's own tokens, and of the rows that its experts receive besides their features.
    Indices take 8 B. Weights are normalized, and each sequence has its own balance loss."""
    k, experts, dispatch = model.experts_per_token, model.experts, plan.dispatch or "all_to_all"
    token, is_at_home = model.hidden * plan.kept_size, dispatch == "all_to_all"  # where results are weighted
    found: dict[str, float] = {"router": tokens * (4 * experts + 13 * k + 9) + 4 * experts * plan.microbatch}
    found["input of up"] = tokens * token
    if model.shared_ffn and plan.sequence_parallel and plan.tp > 1:
        found["input of the shared MLP"] = plan.tp * tokens * token  # gathered
    found["results of the experts"] = (k * tokens if is_at_home else routed) * (token + 4)
    copies: dict[str, float] = {"all_to_all": k, "gather": 0}
    if dispatch not in copies:
        copies[dispatch] = expected_copies(model.routing, plan.ep) * (1 + (dispatch == "two_levels"))
    found["places of rows"] = (
        copies[dispatch] * tokens * (16 + k * (not is_at_home)) + (8 if is_at_home else 16) * routed
    )
    return found


@lru_cache(maxsize=4096)
def kept(model: Model, plan: Plan, sequence: int, stack: str | Stack = "megatron") -> Kept:
    """What a rank keeps of one microbatch, and what its backward pass needs in addition."""
    found = _kept(model, plan, sequence, stack)
    if not model.dense_layers:
        return found
    first = _kept(model.dense, plan, sequence, stack)
    most = {name: max(getattr(found, name), getattr(first, name)) for name in ("layer_again", "layer_work")}
    return found._replace(dense=first.layer, **most)


def _kept(model: Model, plan: Plan, sequence: int, stack: str | Stack) -> Kept:
    stack, size = find_stack(stack), plan.kept_size
    rows = plan.microbatch * sequence // plan.cp
    outside = plan.tp if plan.sequence_parallel else 1
    token = rows * model.hidden * size
    tensors = layer_tensors(model, plan, sequence, stack)
    layer, layer_again = int(sum(tensors.values())), 0
    if plan.recompute == "full":
        layer, layer_again = int(tensors["input of norm 1"]), layer - int(tensors["input of norm 1"])

    mask = rows * model.hidden // outside if model.dropout else 0
    head = token // outside + 4 * rows * (1 if model.norm == "rms" else 2) // outside  # into the norm
    head += token // (1 if stack.plain else outside)  # into the head
    entries = model.vocab if stack.keeps.whole_ends else model.vocab_on_rank(plan.tp)
    logits = int(stack.keeps.logits * rows * entries * size)
    if not stack.plain:
        # Backward through an MLP: the gradients of its output, which are gathered, and between its two matmuls.
        features = (2 if model.gated else 1) * max(1, model.experts_per_token) * model.ffn_width // plan.tp
        head_work = token * (2 if plan.sequence_parallel and plan.tp > 1 else 1)
        return Kept(layer, mask, head, layer_again, 0, token + rows * features * size, head_work, logits, True, layer)

    head += token // outside if model.norm == "rms" else 0
    head += 18 * rows + 8  # of the loss: target indices, sums of exponentials, which targets count, how many
    embedding, head_again = 9 * rows + mask, 0  # the index of each id, and whether this rank has it
    if plan.cp > 1 and model.positions:
        embedding += 8 * rows // plan.microbatch  # and its position
    if plan.recompute == "full":
        embedding, head, head_again = 0, token // outside, head - token // outside
    return Kept(layer, embedding, head, layer_again, head_again, 0, 0, logits, plan.recompute != "full", layer)
