"""The peak memory of each rank: parameters, gradients, optimizer, activations, logits, ..."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from tplab.cost.chip import Chip
from tplab.forecast.activations import Kept, held_parameters
from tplab.forecast.block import Array, Block, Family, Tables
from tplab.forecast.model import Model
from tplab.forecast.pipelines import Shape, in_flight, largest
from tplab.forecast.plan import ITEMSIZE, ROUNDS, Plan, few, round_of
from tplab.forecast.stacks import Stack, find_stack


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes of one rank at its peak.

    parameters    its own, or its pieces of them (ZeRO 3)     gradients    sums, in grad_dtype, and those being reduced
    optimizer     Adam's two moments, and float32 copies of 16-bit parameters
    gathered      whole parameters of the layers that run (ZeRO 3)
    activations   of the microbatches in flight, and those recomputed
    logits        of the last stage, and the loss's copies of them
    buffers       what the backward pass needs in addition, and workspaces of libraries; nothing of tplab's is counted
    in_flight     how many microbatches are in flight, over all of the rank's layers
    """

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    activations: int
    logits: int
    buffers: int
    in_flight: float

    @property
    def total(self) -> int:
        return sum(self.by_kind.values())

    @property
    def by_kind(self) -> dict[str, int]:
        """By the kinds of tplab.trace.memory."""
        return {
            "parameters": self.parameters,
            "optimizer": self.optimizer,
            "gradients": self.gradients,
            "gathered": self.gathered,
            "activations": self.activations + self.logits,
            "other": self.buffers,
        }


def memory(model: Model, plan: Plan, batch: int, sequence: int, stack: str | Stack = "megatron") -> tuple[Held, ...]:
    """The memory of the ranks at each place of a pipeline. Ranks at the same place hold the same."""
    block = Block.of_plan(plan, batch, Tables(model, None, sequence, find_stack(stack, plan)))
    (family,), found = block.families, list[Held]()
    (peaks,) = _peaks(block, family._replace(places=[[place] for place in range(plan.pp)]), 0)
    for place, held in enumerate(family.ranks):
        here = np.flatnonzero(peaks.kinds == place)
        at = here[np.argmax(peaks.bytes[:, here, 0, 0].sum(axis=0))]
        activations, logits, work = (int(of) for of in peaks.bytes[:, at, 0, 0])
        own, gradients, optimizer, gathered, beside = (int(of) for of in _states(block, family, place)[0, 0])
        flying = float(peaks.layers[at, 0, 0]) / (sum(stage.layers for stage in held) or 1)
        found.append(Held(own, gradients, optimizer, gathered, activations, logits, work + beside, flying))
    return tuple(found)


def peak_bytes(model: Model, plan: Plan, batch: int, sequence: int, stack: str | Stack = "megatron") -> int:
    """The peak of the rank that holds most."""
    return max(held.total for held in memory(model, plan, batch, sequence, stack))


def bytes_of(block: Block) -> Array:
    """The peak of the rank that holds most [pairs, recomputes, zeros, ways]; 0 for an impossible plan."""
    found = np.zeros(block.shape)
    for family in block.families:
        states = np.stack([_states(block, family, places[0]).sum(axis=-1) for places in family.places])
        for way in family.ways:
            for peaks in _peaks(block, family, way):
                held = states[peaks.kinds][:, peaks.pairs, None] + peaks.bytes.sum(axis=0)[..., None]
                found[..., way][peaks.pairs] = held.max(axis=0)
    return found


def _states(block: Block, family: Family, place: int) -> Array:
    """Parameters, gradients, optimizer, gathered parameters, and workspaces of libraries [pairs, zeros, 5]."""
    model, stack = block.tables.model, block.tables.stack

    def of(plan: Plan) -> tuple[int, ...]:
        beside = stack.keeps.workspace + wasted_bytes(model, plan, stack)
        whole = held_parameters(model, plan, place, stack).total * ITEMSIZE[plan.grad_dtype]
        return (*state_bytes(model, plan, place, stack), beside, whole)

    found = block.of_rank("states", family, place, of, [{"zero": zero} for zero in block.zeros])
    if stack.keeps.whole_sums:  # from one microbatch to the next
        is_whole = (block.counts > 1)[:, None] & (np.array(block.zeros) == 3)
        found[..., 1] = np.where(is_whole, found[..., 5], found[..., 1])
    return found[..., :5]


@lru_cache(maxsize=4096)
def state_bytes(model: Model, plan: Plan, place: int, stack: Stack) -> tuple[int, int, int, int]:
    """(parameters, gradients, optimizer, gathered) of a rank at this place of its pipeline.

    Per parameter, with ZeRO over R = dp x cp ranks (for experts, R tp / ep):

        ZeRO   parameters   gradients   optimizer, 16 bit   optimizer, 32 bit
        0      size         grad        12                  8
        1      size         grad        12 / R              8 / R
        2      size         grad / R    12 / R              8 / R
        3      4 / R        grad / R    8 / R               8 / R      the pieces are float32 and have no other copy

    With states in bfloat16 the parameters have no other copy, and 4 replaces 12 and 8. Rajbhandari et al. 2020,
    section 3. With ZeRO 3 the layer that runs and the next one are gathered.
    """
    size, grad = plan.kept_size, ITEMSIZE[plan.grad_dtype]
    held = held_parameters(model, plan, place, stack)
    state = ITEMSIZE[plan.state_dtype or "float32"]
    moments = 2 * state + (state if size < state and plan.zero < 3 else 0)
    repeated = held.embedding * (plan.tp - 1) if stack.keeps.whole_ends else 0
    parameters = gradients = optimizer = 0.0
    for numbers, ranks in ((held.dense + repeated, plan.copies), (held.experts, plan.expert_copies)):
        divided = [ranks if plan.zero >= stage else 1 for stage in (3, 2, 1)]
        parameters += numbers * (max(size, state) if plan.zero == 3 else size) / divided[0]
        gradients += numbers * grad / divided[1] + numbers * stack.keeps.spare
        optimizer += numbers * moments / divided[2]
    gathered = 2 * held.unit * size if plan.zero == 3 else 0
    return round(parameters), round(gradients), round(optimizer), gathered


class Peaks(NamedTuple):
    """What ranks hold at candidate moments for their peak, for pairs whose schedules are alike.

    pairs    of the block                kinds    of rank, at each of these moments: an index of `Family.places`
    layers   how many layers are kept, over all microbatches [moments, pairs, 1]
    bytes    activations, logits and work [3, moments, pairs, recomputes]
    """

    pairs: np.ndarray
    kinds: np.ndarray
    layers: Array
    bytes: Array


def _peaks(block: Block, family: Family, way: int) -> Iterator[Peaks]:
    plan, possible = block.ways[way].of(block.layouts[0]), block.is_possible[:, way]
    seen = few(plan.rule_name, plan.pp, block.counts)
    places = tuple(map(tuple, family.places))
    for microbatches in np.unique(seen[possible]).tolist():
        pairs = np.flatnonzero((seen == microbatches) & possible)
        shape = Shape(plan.rule_name, plan.pp, plan.virtual, microbatches, family.stages)
        kinds, is_head, *columns = _moments(shape, places)[..., None, None]
        now, more = columns[:5], (block.counts[pairs] - microbatches)[:, None]
        layers, dense, first, last, ends = (of + more * grows for of, grows in zip(now, columns[5:]))
        kept = Kept(*np.moveaxis(block.kept[pairs], -1, 0))
        whole = layers * kept.layer + dense * kept.dense + first * kept.embedding + last * kept.head
        whole = whole + np.where(is_head, kept.head_again, kept.layer_again)
        last = last * kept.keeps_logits
        logits = np.where(is_head, np.maximum(1, last), np.maximum(0, last - ends)) * kept.logits
        work = np.where(is_head, kept.head_work, kept.layer_work)
        yield Peaks(pairs, kinds[:, 0, 0], layers + dense, np.stack(np.broadcast_arrays(whole, logits, work)))


@lru_cache(maxsize=4096)
def _moments(shape: Shape, places: tuple[tuple[int, ...], ...]) -> np.ndarray:
    """The moments at which ranks may hold most [12, moments].

    These are the beginnings of backward passes: in the head, or in the layers, after that microbatch's logits are
    freed. Rows: the kind of rank; whether the pass begins in the head; how many layers, dense layers, embeddings and
    heads are kept over all microbatches; how many of these heads end; how many of the five each further one adds.
    """
    rule, ranks, virtual, microbatches, stages = shape
    placement, found = Plan(pp=ranks, virtual=virtual, schedule=rule).placement, list[tuple[int, ...]]()
    moments, repeats = (
        in_flight(rule, ranks, virtual, microbatches),
        microbatches >= ROUNDS.get(rule, 4) * round_of(rule, ranks),
    )
    for kind, place in ((kind, place) for kind, of_kind in enumerate(places) for place in of_kind):
        held = np.array([stages[number] for number in placement[place]], np.intp)
        for active, counts in moments[place]:
            ends, grows = held[active, 3], (np.array(counts) == microbatches) & repeats
            found += [(kind, head, *counts @ held, -ends, *grows @ held, 0) for head in range(1 + ends)]
    rows = largest(np.array(found, np.intp), 2).T
    rows[6] = -rows[6]
    return rows


def wasted_bytes(model: Model, plan: Plan, stack: Stack) -> int:
    """One gradient of each kind of weight in a layer, if the stack allocates them."""
    if not stack.keeps.wasted:
        return 0
    matrices = (*model.projections.values(), ((3 if model.gated else 2) * model.hidden, model.ffn_width, True))
    return sum(a * b // (plan.tp if is_split else 1) for a, b, is_split in matrices) * plan.kept_size


def usable_bytes(chip: Chip) -> float:
    """The part of a chip's memory that programs can use: data sheets call 2^30 bytes a GB, and the driver takes 1 %.

    A run on H100s of "80 GB" had 77.4 GiB allocated (the ultra-scale playbook).
    """
    return 0.99 * chip.memory / 1e9 * 2**30


class Room(NamedTuple):
    """What fits on a chip: a plan with a forecast of up to `sure` bytes fits, and one above `most` does not. In between
    it may fit, because forecasts for this stack have been too high by that much."""

    sure: float
    most: float


def room(chip: Chip, stack: str | Stack = "megatron") -> Room:
    """The limits for a forecast of bytes for this stack. Every statement that a plan fits, or does not, uses them."""
    usable = usable_bytes(chip)
    return Room(usable, usable / (1 - find_stack(stack).keeps.too_high))
