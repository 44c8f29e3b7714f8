"""All plans of layouts of ranks at once, in arrays: how long a step takes, and what the fullest rank holds.

The formulas are those of `tplab.forecast.step` and `tplab.forecast.memory`, but for two things. A pipeline is filled
and drained in

    (sum over ranks of F + B  -  the busiest rank's) / v       with ZB-H1, F for F + B, or as long as F + I need

and rank r of p holds min(m, ...) microbatches: 1F1B p - r, ZB-H1 p, GPipe m, interleaved (2(p-r-1) + (v-1)p + 1) / v.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from tplab.cost import Cluster
from tplab.forecast.layers import Layer
from tplab.forecast.model import Model
from tplab.forecast.once import Once, at_end
from tplab.forecast.plan import Plan, divisors
from tplab.forecast.stacks import Stack
from tplab.forecast.stages import stages_on
from tplab.forecast.step import ONCE, on_cluster
from tplab.forecast.tables import TIMES, Array, Tables, tables

ZEROS = (0, 1, 2, 3)
AXES = "lmrzw"
"""Axes of arrays: l(ayout), m(icrobatch), r(ecomputation), z(ero), w(ay): schedule and virtual stages."""
Stages = tuple[tuple[int, bool, bool], ...]
"""(layers, whether it has the embedding, whether it has the head) of each rank of a pipeline."""


class Grid(NamedTuple):
    """All plans of one layout, in arrays [microbatch, recompute, zero, schedule and virtual].

    What is not possible takes infinitely long.

    reasons   seconds by reason, broadcast to that shape
    """

    layout: Plan
    choices: tuple[Sequence[Any], ...]
    seconds: Array
    held: Array
    reasons: dict[str, Array]

    def plan(self, place: int) -> Plan:
        microbatch, recompute, zero, (schedule, virtual) = (
            choices[int(at)] for choices, at in zip(self.choices, np.unravel_index(place, self.seconds.shape))
        )
        return replace(
            self.layout, microbatch=microbatch, recompute=recompute, zero=zero, schedule=schedule, virtual=virtual
        )


def grids(
    model: Model,
    layouts: Sequence[Plan],
    cluster: Cluster,
    batch: int,
    sequence: int,
    stack: Stack,
    schedules: Sequence[str],
) -> list[Grid]:
    """A grid for each of the layouts, which differ in their axes only. Equal pipelines are computed together."""
    if not layouts:
        return []
    base = replace(layouts[0], dp=1, tp=1, pp=1, cp=1, ep=1, sequence_parallel=False)
    recomputes = ("none", "full") if base.flash else ("none", "selective", "full")
    known = tables(model, base, cluster, sequence, on_cluster(stack, cluster), recomputes)
    groups, found = dict[Stages, list[int]](), dict[int, Grid]()
    for index, layout in enumerate(layouts):
        groups.setdefault(_stages(model, layout.pp, layout.tp, layout.balance), []).append(index)
    for stages, places in groups.items():
        ways = _ways(model, len(stages), schedules)
        found.update(zip(places, _together([layouts[place] for place in places], stages, ways, batch, known)))
    return [found[index] for index in range(len(layouts))]


def _together(
    layouts: Sequence[Plan], stages: Stages, ways: Sequence[tuple[str, int]], batch: int, known: Tables
) -> list[Grid]:
    """The grids of layouts whose pipelines have the same stages. Arrays have the axes lmrzw, or some of them."""
    pp, sizes, recomputes = len(stages), divisors(batch), known.recomputes
    shares = batch // np.array([layout.dp for layout in layouts])
    divides = shares[:, None] % np.array(sizes) == 0
    count = np.maximum(1, shares[:, None] // np.array(sizes))
    each = np.array(
        [
            [known.microbatch(layout, size) if has else known.nothing for size, has in zip(sizes, row)]
            for layout, row in zip(layouts, divides)
        ]
    )
    first, last = (np.moveaxis(of, -1, 0)[..., None] for of in (each[..., -2 * TIMES : -TIMES], each[..., -TIMES:]))
    table = each[..., : -2 * TIMES].reshape(*divides.shape, len(recomputes), -1)
    layer, kept = np.moveaxis(table[..., :TIMES], -1, 0), np.moveaxis(table[..., TIMES:], -1, 0)

    kinds = Counter(stages)
    ranks = np.stack([n * layer + a * first + b * last for n, a, b in kinds])  # [kind, field of Layer, l, m, r]
    both, forward, weights = ranks[:, 0] + ranks[:, 1], ranks[:, 0], (ranks[:, 1] - ranks[:, 3]) / 2
    busy = Layer(*np.take_along_axis(ranks, np.argmax(both, axis=0)[None, None], axis=0)[0])
    all_both, all_forward, all_weights = (
        np.tensordot([*kinds.values()], part, axes=1) for part in (both, forward, weights)
    )
    late, optimizer = _after(layouts, busy, count, known)
    sends = np.array([known.send(layout) for layout in layouts])

    virtual = _spread([v for _, v in ways], "w")
    splits = _spread([name == "zb_h1" for name, _ in ways], "w")
    whole, many = _spread(busy.forward + busy.backward, "lmr"), _spread(count, "lm")
    fill = (_spread(all_both, "lmr") - whole) / virtual
    own = _spread((busy.backward - busy.recompute) / 2, "lmr")
    path = _spread(all_both - all_weights, "lmr") + (many - 1) * (whole - own) + own - many * whole
    split = np.maximum(_spread(all_forward - busy.forward, "lmr"), path)
    once = ONCE * known.stack.host * max(n for n, _, _ in kinds)
    reasons = {
        **{name: many * _spread(getattr(busy, name), "lmr") for name in ("computing", "recompute", "tp", "cp", "ep")},
        "host": many * _spread(busy.host, "lmr") + once,
        "bubble": np.where(splits, split, fill),
        "pp": 2 * (pp * virtual - 1) * _spread(sends[:, :1] + sends[:, 1:] * sizes, "lm"),
        "dp": _spread(late, "lmrz"),
        "optimizer": _spread(optimizer, "lz"),
    }
    seconds = many * whole + sum(reasons[name] for name in ("bubble", "pp", "dp", "optimizer")) + once
    is_possible = _spread(divides, "lm") * ((virtual == 1) | (many % pp == 0))  # interleaving takes whole rounds
    is_possible = is_possible * _spread([[layout.copies > 1 or not zero for zero in ZEROS] for layout in layouts], "lz")
    held = _held(layouts, stages, ways, count, kept, known)
    shape = np.broadcast_shapes(seconds.shape, held.shape)
    seconds, held = (np.where(is_possible, np.broadcast_to(of, shape), np.inf) for of in (seconds, held))
    choices = (sizes, recomputes, ZEROS, ways)
    return [
        Grid(layout, choices, seconds[at], held[at], {name: of[at % len(of)] for name, of in reasons.items()})
        for at, layout in enumerate(layouts)
    ]


def _spread(array: Any, axes: str) -> Array:
    """An array with some of the axes lmrzw as one with all of them."""
    found = np.asarray(array, float)
    sizes = dict(zip(axes, found.shape))
    return found.reshape([sizes.get(axis, 1) for axis in AXES])


def _ways(model: Model, pp: int, schedules: Sequence[str]) -> list[tuple[str, int]]:
    """The schedules, each with its numbers of virtual stages."""
    if pp == 1:
        return [("1f1b", 1)]
    found = [(name, 1) for name in schedules]
    if "1f1b" in schedules and model.layers % pp == 0:
        found += [("1f1b", virtual) for virtual in divisors(model.layers // pp)[1:]]
    return found


@lru_cache(maxsize=1024)
def _stages(model: Model, pp: int, tp: int, balance: str) -> Stages:
    plan = Plan(pp=pp, tp=tp, balance=balance)
    held = [stages_on(model, plan, place)[0] for place in range(pp)]
    return tuple((stage.layers, stage.is_first, stage.is_last) for stage in held)


def _after(layouts: Sequence[Plan], busy: Layer, count: Array, known: Tables) -> tuple[Array, Array]:
    """What is not hidden of gradients and parameters [l, m, r, z], and the optimizer [l, z]."""
    lates, optimizers = list[Array](), list[Array]()
    for zero in ZEROS:
        found = np.array([known.once(layout, zero if layout.copies > 1 else 0) for layout in layouts], float)
        once = Once(*(column[:, None, None] for column in found.T))
        late, optimizer = at_end(replace(layouts[0], zero=zero), busy, once, count[..., None])
        lates.append(np.broadcast_to(late, np.shape(busy.forward)))
        optimizers.append(optimizer[:, 0, 0])
    return np.stack(lates, axis=-1), np.stack(optimizers, axis=-1)


def _held(
    layouts: Sequence[Plan],
    stages: Stages,
    ways: Sequence[tuple[str, int]],
    count: Array,
    kept: Array,
    known: Tables,
) -> Array:
    """Bytes of the rank that holds most: a pipeline's first, its last, or the one with most layers.

    kept   [field of Kept, l, m, r]
    """
    layer, embedding, head, again, head_again, work, head_work, logits, keeps = kept
    pp, most = len(stages), np.zeros([1] * len(AXES))
    fullest = max(range(pp), key=lambda place: stages[place][0])
    for place in {0, fullest, pp - 1}:
        layers, is_first, is_last = stages[place]
        zeros = [[zero if layout.copies > 1 else 0 for zero in ZEROS] for layout in layouts]
        states = [[known.states(layout, zero, place) for zero in row] for layout, row in zip(layouts, zeros)]
        limits = np.array([_flying(*way, pp, place) for way in ways])
        inside, outside = (_spread(np.minimum(count[..., None], limit), "lmw") for limit in limits.T)
        kept_ = inside * layers * _spread(layer, "lmr")
        kept_ = kept_ + outside * _spread(is_first * embedding + is_last * head, "lmr")
        beside = _spread(again + work, "lmr")
        if is_last:  # the backward pass begins in the head, or in the layers, when its logits are gone
            waiting, each_logits = _spread(keeps, "lmr") * outside, _spread(logits, "lmr")
            in_head = _spread(head_again + head_work, "lmr") + np.maximum(1, waiting) * each_logits
            beside = np.maximum(in_head, beside + np.maximum(0, waiting - 1) * each_logits)
        most = np.maximum(most, _spread(states, "lz") + kept_ + beside)
    return most


def _flying(schedule: str, virtual: int, pp: int, place: int) -> tuple[float, float]:
    """How many microbatches of all its layers a rank holds at most, and of the embedding or the head: see above."""
    if virtual > 1:
        return (2 * (pp - place - 1) + (virtual - 1) * pp + 1) / virtual, 2 * pp - 1 if place == 0 else 1
    most = {"gpipe": np.inf, "zb_h1": pp, "1f1b": pp - place}[schedule]
    return most, most
