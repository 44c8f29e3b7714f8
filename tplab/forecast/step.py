"""How long a training step takes, from its parts.

    layer      `tplab.forecast.layers`
    pipeline   the makespan of the plan's own schedule, simulated with each stage's times. The first stage also has the
               embedding, and the last one the final norm, the logits and the loss
    step       pipeline + gradients and parameters that are not hidden + optimizer + the host's time once per step

The layers' `factor` and `host` belong to a stack, and were fitted to published runs (`benchmarks.fit.steps`) on the
measured clock. With a data sheet they are left out, and the result is a time at peak rates. Five more rules hold for
all stacks and plans:

    overlap    two fifths of the messages of tensor, context and expert parallelism are hidden. Gradients are sent
               during the last microbatch's backward pass, and at most two fifths of their time are hidden
    pairs      if a forward and a backward pass run as one action, as in DualPipe, the computation of each hides the
               messages of experts in the other: see `tplab.forecast.pipelines`
    ZeRO 1, 2  parameters are gathered after the optimizer, and nothing hides that
    ZeRO 3     parameters and gradients travel while layers compute, and the longer of both counts; but for each
               microbatch nothing hides the first parameters and the last gradients
    once       a step costs the host as much as half a microbatch
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tplab.cost import Cluster
from tplab.forecast.block import Array, Block, Family, Tables
from tplab.forecast.classes import Measured, class_of
from tplab.forecast.layers import AXES, Layer, Once, at_end
from tplab.forecast.model import Model
from tplab.forecast.pipelines import TERMS, Shape, makespans
from tplab.forecast.plan import Plan, few, pairs_passes
from tplab.forecast.stacks import Stack, find_stack

FORWARD, BACKWARD, RECOMPUTE = (Layer._fields.index(name) for name in ("forward", "backward", "recompute"))
UNDER = Layer._fields.index("ep_forward")
OUTSIDE = "outside what was measured"
ONCE = 0.5
"""The host's time once per step, as a part of its time for one microbatch."""


@dataclass(frozen=True)
class Step:
    """A training step.

    seconds       from the first microbatch to the updated parameters
    parts         seconds by reason; they add up to `seconds`. "computing", "recompute", "tp", "cp", "ep" and "host" are
                  those of the busiest pipeline rank. "bubble" is its waiting, apart from waiting for messages, which is
                  "pp"; "dp" is gradients and parameters that are not hidden
    measured      the measured steps of its class; None: it is outside what was measured
    """

    seconds: float
    parts: Mapping[str, float]
    measured: Measured | None

    @property
    def low(self) -> float | None:
        """Scaled to this forecast, nine of ten measured steps of its class took between `low` and `high` seconds; None
        outside what was measured."""
        return self.seconds * self.measured.low if self.measured else None

    @property
    def high(self) -> float | None:
        return self.seconds * self.measured.high if self.measured else None

    @property
    def between(self) -> str:
        """ "0.91 to 1.08" seconds, or a note that no such steps were measured."""
        return f"{self.low:.3g} to {self.high:.3g}" if self.measured else OUTSIDE


def step(
    model: Model, plan: Plan, cluster: Cluster, batch: int, sequence: int, stack: str | Stack = "megatron"
) -> Step:
    """How long a step on `batch` sequences takes. Raises PlanError if the plan cannot train the model."""
    stack = find_stack(stack, plan)
    stack.cut(plan).check(model, batch, sequence)
    (found,) = seconds_of([Block.of_plan(plan, batch, Tables(model, cluster, sequence, stack))])
    parts = {name: float(of.item()) for name, of in found.items()}
    return Step(sum(parts.values()), parts, class_of(stack, model, plan, cluster))


def seconds_of(blocks: Sequence[Block], exact: bool = True) -> list[dict[str, Array]]:
    """The `parts` of steps, for each block arrays that broadcast to [pairs, recomputes, zeros, ways].

    exact   see `makespans`
    """
    waits = _waits(blocks, exact)
    return [_parts(block, *spans) for block, spans in zip(blocks, waits)]


def _parts(block: Block, alone: Array, together: Array, apart: Array) -> dict[str, Array]:
    """alone, together   makespans without and with messages [pairs, recomputes, 1, ways]
    apart             without messages, if paired passes hid nothing of each other"""
    count, stack = block.counts[:, None, None, None], block.tables.stack
    parts = {name: np.zeros(alone.shape) for name in ("computing", "recompute", *AXES, "bubble", "pp", "host")}
    parts |= {name: np.zeros(block.shape) for name in ("dp", "optimizer")}
    for family in block.families:
        totals = [np.sum([one.share * np.array(one.counts, float) for one in held], axis=0) for held in family.ranks]
        ranks = np.tensordot(np.unique(totals, axis=0), block.micro, axes=(1, 2))  # [kinds, pairs, recomputes, fields]
        at = np.argmax(ranks[..., 0] + ranks[..., 1], axis=0)
        busy = _layer(np.take_along_axis(ranks, at[None, ..., None], axis=0)[0])
        most = max(sum(stage.layers for stage in held) for held in family.ranks)
        for name in ("computing", "recompute", *AXES, "host"):
            parts[name][..., family.ways] = count * getattr(busy, name)
        parts["host"][..., family.ways] += ONCE * stack.host * most
        saved = np.minimum(apart[..., family.ways] - alone[..., family.ways], parts["ep"][..., family.ways])
        parts["ep"][..., family.ways] -= saved
        parts["bubble"][..., family.ways] = alone[..., family.ways] + saved - count * (busy.forward + busy.backward)
        late = np.stack(
            [_after(block, family, totals[place], place) for place in sorted({0, block.pp // 2, block.pp - 1})]
        )
        at = np.argmax(late.sum(axis=-1), axis=0)
        latest = np.take_along_axis(late, at[None, ..., None], axis=0)[0]  # [pairs, recomputes, zeros, 2]
        parts["dp"][..., family.ways], parts["optimizer"][..., family.ways] = latest[..., :1], latest[..., 1:]
    parts["bubble"] = np.maximum(0.0, parts["bubble"])
    return parts | {"pp": together - alone}


def _layer(fields: Array) -> Layer:
    """[pairs, recomputes, fields] as a `Layer` of arrays [pairs, recomputes, 1, 1]."""
    return Layer(*np.moveaxis(fields, -1, 0)[..., None, None])


def _after(block: Block, family: Family, total: Array, place: int) -> Array:
    """Seconds of a rank's unhidden gradients and parameters, and of its optimizer [pairs, recomputes, zeros, 2]."""
    own, once = _layer(np.tensordot(block.micro, total, axes=(2, 0))), block.once(family, place)
    found = []
    for at, zero in enumerate(block.zeros):
        fields = Once(*np.moveaxis(once[:, :, at], -1, 0)[..., None, None])
        late, optimizer = at_end(replace(block.layouts[0], zero=zero), own, fields, block.counts[:, None, None, None])
        found.append(np.stack(np.broadcast_arrays(late, optimizer), axis=-1)[:, :, 0, 0])
    return np.stack(found, axis=2)


def _waits(blocks: Sequence[Block], exact: bool) -> list[Array]:
    """For each block, the makespans of its pipelines without messages between stages, with them, and without them if
    paired passes hid nothing of each other [3, pairs, recomputes, 1, ways]."""
    found = [np.zeros((3, *block.shape[:2], 1, len(block.ways))) for block in blocks]
    shapes, seconds, counts, where = list[Shape](), list[Array](), list[np.ndarray](), list[Any]()
    for block, into in zip(blocks, found):
        times = block.micro[..., [FORWARD, BACKWARD, RECOMPUTE]].reshape(*block.shape[:2], -1)
        under = block.micro[..., 0, UNDER:]
        sends = np.broadcast_to(block.sends[:, None, None], (*block.shape[:2], 1))
        cases = ((1.0, 0.0), (1.0, 1.0), (0.0, 0.0))
        every = np.stack([np.concatenate([times, hides * under, share * sends], axis=-1) for hides, share in cases])
        for of_family, way in ((family, way) for family in block.families for way in family.ways):
            rule = block.ways[way].of(block.layouts[0]).rule_name
            kept, spans = few(rule, block.pp, block.counts), every[: 3 if under.any() and pairs_passes(rule) else 2]
            for microbatches in np.unique(kept[block.is_possible[:, way]]).tolist():
                pairs = np.flatnonzero((kept == microbatches) & block.is_possible[:, way])
                shapes.append(Shape(rule, block.pp, block.ways[way].virtual, microbatches, of_family.stages))
                seconds.append(spans[:, pairs].reshape(-1, TERMS))
                counts.append(np.broadcast_to(block.counts[pairs][:, None], spans[:, pairs].shape[:3]).ravel())
                where.append((into, pairs, way))
    for (into, pairs, way), spans in zip(where, makespans(shapes, seconds, counts, exact)):
        several = spans.reshape(-1, len(pairs), into.shape[2])
        into[..., 0, way][:, pairs] = several if len(several) == 3 else several[[0, 1, 0]]
    return found
