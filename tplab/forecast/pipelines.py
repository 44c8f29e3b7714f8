"""A plan's schedule: how long the pipeline takes with given stages, and how many microbatches are in memory.

A makespan is the longest path through the schedule, and a path takes the sum of its actions' seconds. So a few paths,
each the longest for some stages, give the makespans for many stages, as the largest of a few sums:

    makespan = max over paths of  layers on it x a layer's F, B, ..  + embeddings + heads + messages x seconds of one

If a forward and a backward pass run as one action, the messages of experts in each are hidden by the computation of the
other. So the pair takes the longest of: the computation of both, the messages of both, and either pass by itself.

A schedule repeats itself: each further round of one microbatch per rank takes as long as the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from tplab.forecast.plan import few, pairs_passes, round_of, rule_of
from tplab.schedules.action import B, F, I, W
from tplab.schedules.relax import relax
from tplab.schedules.schedule import Schedule

Array = np.ndarray[Any, np.dtype[np.float64]]
TAKES = np.array([
    [1, 0, 0, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0, 0], [0, 0.5, 0.5, 0, 0, 0, 0], [0, 0.5, -0.5, 0, 0, 0, 0],
    [1, 0, 0, -1, 0, 0, 0], [0, 1, 0, 0, -1, 0, 0], [0, 0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 0, 0, 1],
])  # fmt: skip
"""F, B, I and W of a stage; F and B without messages of experts; and the messages of F and B: as sums of (forward,
backward, recompute, ep_forward, ep_backward, travel_forward, travel_backward). I includes all recomputation."""
COMPUTES, TRAVELS = 4, 6
TERMS = 17
"""The number of terms of a path: forward, backward and recompute of each of `Stage.counts`, four for messages of
experts in the layers that have them, and messages between stages."""
CELLS = 1 << 21
"""The most numbers simulated at once."""


TYPICAL = np.array([
    [1, back + again, again, first, first * (back + again), first * again, 0.03, 0.06, 0, head, 2 * head, 0,
     0.6 * travel, 0.6 * travel, travel, travel, send]
    for travel in (0.0, 0.4, 1.2) for again in (0, 1)
    for head, back, first in ((0.3, 1.7, 1.0), (1.2, 2.0, 0.3), (4.0, 2.3, 0.6)) for send in (0.0, 0.1)
])  # fmt: skip
"""Typical pipelines, in units of a layer's forward pass: see `makespans`. The first third sends nothing to experts, and
is all that matters unless two passes run as one action."""
_known = dict[Any, Array]()
"""Shape -> the paths of typical pipelines."""


class Shape(NamedTuple):
    """A pipeline without durations.

    rule, ranks, virtual, microbatches    of its schedule
    stages    what is in each stage: (layers, dense first ones, whether the embedding is, whether the head is)
    """

    rule: str
    ranks: int
    virtual: int
    microbatches: int
    stages: tuple[tuple[int, int, bool, bool], ...]


# ---------------------------------------------------------------------------------------------------------------- time


def makespans(
    shapes: Sequence[Shape], seconds: Sequence[Array], counts: Sequence[Array], exact: bool = True
) -> list[Array]:
    """The makespans of pipelines that differ in their durations and in their numbers of microbatches.

    seconds   for each shape [pipelines, TERMS]: backward includes recompute; a message goes to the next stage
    counts    for each shape [pipelines]: microbatches, of which the shape has `few`
    exact     whether each pipeline is simulated. If not, the cached paths of typical stages are used: no pipeline takes
              less than they give, and few take more
    """
    shorter = [shape._replace(microbatches=shape.microbatches - round_of(*shape[:2])) for shape in shapes]
    grows = [bool(np.any(count > shape.microbatches)) for shape, count in zip(shapes, counts)]
    wanted = dict[Shape, list[Array]]()
    for shape, less, of, grow in zip(shapes, shorter, seconds, grows):
        for one in (shape, less) if grow else (shape,):
            wanted.setdefault(one, []).append(of)
    known = {} if exact else _known
    missing = {one: np.concatenate(of) if exact else _typical(one) for one, of in wanted.items() if one not in known}
    known.update(zip(missing, _paths([*missing], [*missing.values()])))
    found = list[Array]()
    for shape, less, of, count, grow in zip(shapes, shorter, seconds, counts, grows):
        whole = np.max(of @ known[shape].T, axis=1)
        if grow:
            rounds = (count - shape.microbatches) / round_of(*shape[:2])
            whole = whole + rounds * (whole - np.max(of @ known[less].T, axis=1))
        found.append(whole)
    return found


def _typical(shape: Shape) -> Array:
    return TYPICAL if pairs_passes(shape.rule) else TYPICAL[: len(TYPICAL) // 3]


class _Wires(NamedTuple):
    """A schedule's columns as arrays [actions]: the duration of each action, and the one or two others it waits for.

    takes    indices into a table [stages x kinds, and nothing]; an action takes the longest of its sums [sums, 1 or 2,
             actions]. For the first of a pair these are the computation of both, the messages of both, and each alone
    """

    offsets: np.ndarray
    takes: np.ndarray
    needs: np.ndarray
    crosses: np.ndarray


@lru_cache(maxsize=1024)
def _wires(rule: str, ranks: int, virtual: int, microbatches: int) -> _Wires:
    schedule = rule_of(rule, ranks, microbatches, virtual)
    needs = np.stack([schedule.needs.message, schedule.needs.partner])
    crosses = schedule.crosses(needs)
    second, nothing = np.flatnonzero(schedule.joined), schedule.num_stages * len(TAKES)
    own = schedule.stage.astype(np.intp) * len(TAKES) + schedule.kind
    if not len(second):
        return _Wires(schedule.offsets, own[None, None], needs[:1], crosses[:1])
    takes = np.full((4, 2, len(own)), nothing)
    takes[0, 0] = own
    pair = np.stack([own[second - 1], own[second]])
    takes[:, :, second - 1] = [pair + COMPUTES, pair + TRAVELS, pair, pair[::-1]]
    takes[2:, 1, second - 1] = takes[0, 0, second] = nothing
    return _Wires(schedule.offsets, takes, needs, crosses)


def part_hidden(schedule: Schedule, forward: Array, backward: Array, under: Array) -> float:
    """The part of the shorter passes that the longer ones hide, over all pairs of a schedule.

    forward, backward   seconds of each stage [stages]      under   ep_forward and so on of each [4, stages]
    """
    second = np.flatnonzero(schedule.joined)
    table = TAKES @ np.stack([forward, backward, 0 * forward, *under])  # [kinds, stages]
    (a, i), (b, j) = ((schedule.kind[at], schedule.stage[at]) for at in (second - 1, second))
    alone = np.stack([table[a, i], table[b, j]])
    takes = [table[a + more, i] + table[b + more, j] for more in (COMPUTES, TRAVELS)]
    return float((alone.sum(axis=0) - np.max([*takes, *alone], axis=0)).sum() / (alone.min(axis=0).sum() or 1.0))


def _paths(shapes: Sequence[Shape], seconds: Sequence[Array]) -> list[Array]:
    """For each shape the longest paths of its pipelines [paths, TERMS]; a path takes path @ seconds."""
    wires = [_wires(*shape[:4]) for shape in shapes]
    seconds = [np.resize(of, (1 << (len(of) - 1).bit_length(), TERMS)) for of in seconds]  # some repeated
    cells = [one.takes.size * len(of) for one, of in zip(wires, seconds)]
    key = [(len(one.takes), len(of)) for one, of in zip(wires, seconds)]
    rest = sorted(range(len(shapes)), key=lambda at: (key[at], cells[at] / shapes[at].ranks))
    found = dict[int, Array]()
    while rest:
        chunk = [rest.pop()]
        while rest and key[rest[-1]] == key[chunk[0]] and sum(cells[at] for at in chunk) < CELLS:
            chunk.append(rest.pop())
        found.update(zip(chunk, _simulated([(shapes[at], wires[at], seconds[at]) for at in chunk])))
    return [found[at] for at in range(len(shapes))]


def _simulated(asked: Sequence[tuple[Shape, _Wires, Array]]) -> list[Array]:
    """Simulate all pipelines in one loop, as independent ranks, and then trace their longest paths backward.

    The unit of time is one message, so that messages are equally long in all pipelines. If messages take no time, they
    are given very little, so that of equally long paths those with few messages count.
    """
    wires, cases = [one for _, one, _ in asked], len(asked[0][2])
    starts = np.cumsum([0, *(one.takes.shape[-1] for one in wires)])
    rows = np.cumsum([0, *(shape.ranks for shape, _, _ in asked)])
    offsets = np.append(0, np.concatenate([one.offsets[1:] + at for one, at in zip(wires, starts)]))
    needs = np.concatenate([one.needs + at * (one.needs >= 0) for one, at in zip(wires, starts)], axis=1)
    crosses = np.concatenate([one.crosses for one in wires], axis=1)
    tables = [np.vstack([_stages(shape), np.zeros(TERMS - 1)]) for shape, _, _ in asked]
    takes = [one.takes + at for one, at in zip(wires, np.cumsum([0, *map(len, tables)]))]
    units = [np.maximum(seconds[:, TERMS - 1 :], 1e-9 * seconds[:, :1]) for _, _, seconds in asked]
    lasting = np.concatenate([table @ (of[:, :-1] / unit).T for table, (_, _, of), unit in zip(tables, asked, units)])
    takes, table = np.concatenate(takes, axis=-1), np.concatenate(tables)
    sums = np.stack([_summed(lasting, one) for one in takes])
    end, _ = relax(offsets, [*needs], [*crosses.astype(float)], sums.max(axis=0))

    last = offsets[1:] - 1  # of each row
    at = np.concatenate([last[a:b][np.argmax(end[last[a:b]], axis=0)] for a, b in pairwise(rows)])
    before = np.arange(len(end)) - 1
    before[offsets[:-1]] = -1
    paths, alive, case = np.zeros((len(at), TERMS)), np.arange(len(at)), np.tile(np.arange(cases), len(asked))
    while len(alive):
        here, of = at[alive], case[alive]
        paths[alive, :-1] += _summed(table, takes[sums[:, here, of].argmax(axis=0), :, here].T)
        latest = before[here]
        until = np.where(latest < 0, 0.0, end[latest, of])
        sent = np.zeros(len(alive), bool)
        for need, crossing in zip(needs[:, here], crosses[:, here]):
            there = np.where(need < 0, -np.inf, end[need, of] + crossing)
            is_later = there > until
            until, latest, sent = (
                np.where(is_later, *pair) for pair in ((there, until), (need, latest), (crossing, sent))
            )
        paths[alive, -1] += sent
        at[alive] = latest
        alive = alive[latest >= 0]
    return [np.unique(one, axis=0) for one in paths.reshape(len(asked), cases, TERMS)]


def _summed(table: Array, takes: np.ndarray) -> Array:
    """The sums of the table's rows at one or two indices each."""
    return table[takes[0]] if len(takes) == 1 else table[takes[0]] + table[takes[1]]


def _stages(shape: Shape) -> Array:
    """The duration of each kind of action of each stage, as terms [stages x kinds, TERMS - 1]."""
    counts = np.array(shape.stages, float)
    ends = (counts[:, None, :, None] * TAKES[:, None, :3]).reshape(len(counts), len(TAKES), -1)
    return np.concatenate([ends, counts[:, :1, None] * TAKES[:, 3:]], axis=-1).reshape(-1, TERMS - 1)


# -------------------------------------------------------------------------------------------------------------- memory

Moment = tuple[int, tuple[int, ...]]
"""The beginning of a backward pass: which of the rank's stages, and how many microbatches of each are in memory."""


@lru_cache(maxsize=4096)
def in_flight(rule: str, ranks: int, virtual: int, microbatches: int) -> tuple[tuple[Moment, ...], ...]:
    """For each pipeline rank, the Pareto-maximal moments of its schedule, by microbatches of every stage in memory.

    A forward pass adds one to its stage, and the end of a backward pass removes one. If a rank holds all microbatches
    of the first few rounds, it holds all microbatches.
    """
    seen = int(few(rule, ranks, microbatches))
    if seen < microbatches:
        return tuple(
            tuple((at, tuple(n if n < seen else microbatches for n in held)) for at, held in moments)
            for moments in in_flight(rule, ranks, virtual, seen)
        )
    schedule = rule_of(rule, ranks, seen, virtual)
    change = np.zeros(len(schedule), np.intp)
    change[schedule.kind == F] = 1
    change[(schedule.kind == B) | (schedule.kind == W)] = -1
    found = []
    for row, held in zip(schedule.rows, schedule.placement):
        slot, kind = schedule.slot[row], schedule.kind[row]
        steps = np.where(slot[:, None] == np.arange(len(held)), change[row][:, None], 0)
        begins = np.flatnonzero((kind == B) | (kind == I))
        before = (np.cumsum(steps, axis=0) - steps)[begins]
        rows = largest(np.column_stack([slot[begins], before]), 1)
        found.append(tuple((at, tuple(held)) for at, *held in rows.tolist()))
    return tuple(found)


def largest(rows: np.ndarray, keys: int) -> np.ndarray:
    """The distinct rows, sorted, that no other row with the same first `keys` columns equals or exceeds everywhere."""
    rows = rows[np.lexsort(rows.T[::-1])]
    rows = rows[np.append(True, np.any(rows[1:] != rows[:-1], axis=1))]
    exceeds = np.ones((len(rows), len(rows)), bool)
    for place, column in enumerate(rows.T):
        exceeds &= column[:, None] == column if place < keys else column[:, None] <= column
    return rows[exceeds.sum(axis=1) == 1]
