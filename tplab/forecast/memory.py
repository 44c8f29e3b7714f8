"""What each rank holds at the moment when it holds most: parameters, gradients, optimizer, activations, logits, ..."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from tplab.cost.chip import Chip
from tplab.forecast.activations import kept
from tplab.forecast.model import Model
from tplab.forecast.plan import ITEMSIZE, Plan
from tplab.forecast.stacks import Stack, find_stack
from tplab.forecast.stages import held_parameters, stages_on
from tplab.schedules.action import B, F, I, W


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes of one rank at its peak.

    parameters    its own, or its pieces of them (ZeRO 3)     gradients    sums, in grad_dtype; what is being reduced
    optimizer     Adam's two moments, and float32 copies of 16-bit parameters
    gathered      whole parameters of the layers that run (ZeRO 3)
    activations   kept of the microbatches in flight, and what is computed again
    logits        of the last stage, and what the loss makes of them
    buffers       what the backward pass needs besides, and libraries' workspaces; nothing of tplab's own is counted
    in_flight     how many microbatches are, of all of the rank's layers
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
        states = self.parameters + self.gradients + self.optimizer + self.gathered
        return states + self.activations + self.logits + self.buffers

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
    """What the ranks at each place of a pipeline hold. Ranks at the same place hold the same."""
    return tuple(_held(model, plan, batch, sequence, place, find_stack(stack)) for place in range(plan.pp))


def peak_bytes(model: Model, plan: Plan, batch: int, sequence: int, stack: str | Stack = "megatron") -> int:
    """What the rank holds that holds most."""
    return max(held.total for held in memory(model, plan, batch, sequence, stack))


def _held(model: Model, plan: Plan, batch: int, sequence: int, place: int, stack: Stack) -> Held:
    states = state_bytes(model, plan, place, stack)
    peak = _peak(model, plan, plan.microbatches(batch), sequence, place, stack)
    return Held(*states, *peak)


@lru_cache(maxsize=4096)
def state_bytes(model: Model, plan: Plan, place: int, stack: Stack) -> tuple[int, int, int, int]:
    """(parameters, gradients, optimizer, gathered) of a rank at this place of its pipeline.

    Per parameter, with R = dp x cp ranks that ZeRO divides over (of experts: R tp / ep):

        ZeRO   parameters   gradients   optimizer, 16 bit   optimizer, 32 bit
        0      size         grad        12                  8
        1      size         grad        12 / R              8 / R
        2      size         grad / R    12 / R              8 / R
        3      4 / R        grad / R    8 / R               8 / R      the pieces are float32 and have no other copy

    Rajbhandari et al. 2020, section 3. With ZeRO 3 the layer that runs and the next one are gathered.
    """
    size, grad = plan.kept_size, ITEMSIZE[plan.grad_dtype]
    held = held_parameters(model, plan, place, stack)
    moments = 8 if size >= 4 or plan.zero == 3 else 12
    parameters = gradients = optimizer = 0.0
    for numbers, ranks in ((held.dense, plan.copies), (held.experts, plan.expert_copies)):
        divided = [ranks if plan.zero >= stage else 1 for stage in (3, 2, 1)]
        parameters += numbers * (max(size, 4) if plan.zero == 3 else size) / divided[0]
        gradients += numbers * grad / divided[1] + numbers * stack.keeps.spare
        optimizer += numbers * moments / divided[2]
    gathered = 2 * held.unit * size if plan.zero == 3 else 0
    return round(parameters), round(gradients), round(optimizer), gathered


@lru_cache(maxsize=4096)
def _peak(
    model: Model, plan: Plan, microbatches: int, sequence: int, place: int, stack: Stack
) -> tuple[int, int, int, float]:
    """(activations, logits, buffers, microbatches in flight) at the moment when they are most.

    That is when a backward pass begins: in the head, or in the layers, when that microbatch's logits are gone.
    """
    stages, each, most = stages_on(model, plan, place), kept(model, plan, sequence, stack), (-1, (0, 0, 0, 0.0))
    layers = sum(stage.layers for stage in stages) or 1
    own = [stage.layers * each.layer + each.embedding * stage.is_first + each.head * stage.is_last for stage in stages]
    for active, counts in in_flight(plan.rule_name, plan.pp, plan.virtual, microbatches)[place]:
        flying = sum(count * stage.layers for count, stage in zip(counts, stages)) / layers
        whole = sum(count * bytes for count, bytes in zip(counts, own))
        last = sum(count for count, stage in zip(counts, stages) if stage.is_last) if each.keeps_logits else 0
        in_layers = (whole + each.layer_again, max(0, last - stages[active].is_last) * each.logits, each.layer_work)
        moments = [in_layers]
        if stages[active].is_last:
            moments.append((whole + each.head_again, max(1, last) * each.logits, each.head_work))
        for moment in moments:
            if sum(moment) > most[0]:
                most = sum(moment), (*moment, flying)
    activations, logits, work, flying = most[1]
    return activations, logits, work + stack.keeps.workspace + wasted_bytes(model, plan, stack), flying


def wasted_bytes(model: Model, plan: Plan, stack: Stack) -> int:
    """One gradient of each kind of weight in a layer, if the stack allocates them."""
    if not stack.keeps.wasted:
        return 0
    up = 2 if model.gated else 1
    qkv = model.hidden * (model.attention_width + 2 * model.kv_width)
    weights = qkv + model.attention_width * model.hidden + (up + 1) * model.hidden * model.ffn_width
    return weights // plan.tp * plan.kept_size


Moment = tuple[int, tuple[int, ...]]
"""A backward pass begins: of which of the rank's stages, and how many microbatches of each of them are in memory."""


@lru_cache(maxsize=4096)
def in_flight(rule: str, ranks: int, virtual: int, microbatches: int) -> tuple[tuple[Moment, ...], ...]:
    """For each pipeline rank, the moments of its schedule at which no other has as many microbatches of every stage.

    A forward pass adds one to its stage, and the end of a backward pass takes one away. Where that repeats itself, a
    few rounds of the pipeline are looked at, and not all microbatches.
    """
    grows = rule in ("gpipe", "looped_bfs")
    enough = microbatches if grows else min(microbatches, ranks * (2 * virtual + 4))
    schedule = Plan(pp=ranks, virtual=virtual, schedule=rule).rule(enough)
    change = np.zeros(len(schedule), np.intp)
    change[schedule.kind == F] = 1
    change[(schedule.kind == B) | (schedule.kind == W)] = -1
    found = []
    for rank, held in enumerate(schedule.placement):
        row = slice(schedule.offsets[rank], schedule.offsets[rank + 1])
        slot, kind, steps = schedule.slot[row], schedule.kind[row], change[row]
        counts = np.cumsum(np.where(slot[:, None] == np.arange(len(held)), steps[:, None], 0), axis=0)
        begins = np.flatnonzero((kind == B) | (kind == I))
        before = counts[begins] - np.where(slot[begins, None] == np.arange(len(held)), steps[begins, None], 0)
        rows = {(int(slot[at]), tuple(map(int, held))) for at, held in zip(begins, before)}
        found.append(tuple(one for one in sorted(rows) if not any(_exceeds(other, one) for other in rows)))
    return tuple(found)


def _exceeds(other: Moment, one: Moment) -> bool:
    return other != one and other[0] == one[0] and all(a >= b for a, b in zip(other[1], one[1]))


def usable_bytes(chip: Chip) -> float:
    """What programs can have of a chip's memory: data sheets call 2^30 bytes a GB, and the driver takes a hundredth.

    A run on H100s of "80 GB" had 77.4 GiB allocated (the ultra-scale playbook).
    """
    return 0.99 * chip.memory / 1e9 * 2**30


class Room(NamedTuple):
    """What fits on a chip: a plan whose forecast is up to `sure` bytes fits, and one beyond `most` does not. Between
    them it may, because forecasts of this stack have been too high by that much."""

    sure: float
    most: float


def room(chip: Chip, stack: str | Stack = "megatron") -> Room:
    """How many bytes a forecast for this stack may say. Every statement that a plan fits, or does not, rests on it."""
    usable = usable_bytes(chip)
    return Room(usable, usable / (1 - find_stack(stack).keeps.too_high))
