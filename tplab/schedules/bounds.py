"""Lower bounds: what no schedule of the same shape can beat, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tplab.schedules.action import B, F, I, W
from tplab.schedules.costs import Costs, memory_limits
from tplab.schedules.schedule import Schedule


@dataclass(frozen=True)
class Bounds:
    """Lower bounds for one schedule's shape: its placement, its microbatches, whether it splits the backward, and
    whether it overlaps only forwards with backwards, or computations of any kinds.

    makespan, span    no schedule of that shape is below these
    reason            what the makespan's bound says, in words and numbers
    rank              the rank whose work sets it; -1 if the path of one microbatch does
    """

    makespan: float
    span: float
    reason: str
    rank: int

    def __str__(self) -> str:
        return f"makespan >= {self.makespan:g}, span >= {self.span:g}: {self.reason}"


def lower_bounds(
    schedule: Schedule, costs: Costs | None = None, memory_limit: float | Sequence[float] | None = None
) -> Bounds:
    """The bounds for all schedules with this placement, number of microbatches, kind of backward and kind of overlap
    under `costs`.

    memory_limit    the most microbatches that a rank may hold; by default memory is unlimited

    With f and b the chains of forwards and of backwards (B, or I where it is split), including transfers between ranks:

        makespan >= head(r) + work(r) + gap(r) + tail(r)          for every rank r
        span     >= work(r) + gap(r)
        makespan >= f and b of one microbatch through all stages, and its last W

    head(r)   before its first stage has any input: the forwards of all stages before it
    tail(r)   after its last backward: the backwards of all stages before its first one; 0 if the backward is split,
              since the last action is then a W, which no rank waits for
    gap(r)    between its first forward and its first backward come all remaining forwards and backwards of that
              microbatch; in that time the rank has only forwards to do, one per microbatch, or fewer if its memory
              cannot hold them all

    For equal stages this is (m+p-1)(F+B) for GPipe and 1F1B, (p-1)(F+B)/v + m(F+B) interleaved, and with a split
    backward (p-1)F/v + m(F+I+W). With M activation slots and one stage per rank, gap(0) is pF + (p-1)I - MF.
    """
    costs = costs or Costs()
    schedule = schedule.compute_only() if schedule.has_communication else schedule
    if not schedule.num_stages or not schedule.num_microbatches:
        return Bounds(0.0, 0.0, "there is nothing to do", -1)
    duration, computes = costs.durations(schedule), schedule.kind <= W
    f, b = _fastest(schedule, duration, (F,)), _fastest(schedule, duration, (B, I))
    homes = [{rank for rank, held in enumerate(schedule.placement) if s in held} for s in range(schedule.num_stages)]
    crosses = np.array([not here & there for here, there in pairwise(homes)], bool)
    hop = crosses * (costs.transfer + float(costs.carrying(schedule).min(initial=np.inf)))
    before_f, before_b = (np.append(0.0, np.cumsum(of[:-1] + hop)) for of in (f, b))
    forward, backward = before_f[-1] + f[-1], before_b[-1] + b[-1]
    ranks = range(schedule.num_ranks)
    work = np.bincount(schedule.rank[computes], duration[computes], len(ranks)) - _hidden(schedule, costs, duration)
    step = np.bincount(schedule.rank[~computes], duration[~computes], len(ranks))
    limits = memory_limits(memory_limit, len(ranks))

    def waits(first: int, last: int) -> float:
        return forward - before_f[first] + backward - before_b[last] - b[last]

    gap = np.array([_gap(schedule, duration, waits, rank, limits[rank]) for rank in ranks])
    head, tail = (
        np.array([min((of[s] for s in held), default=0.0) for held in schedule.placement])
        for of in (before_f, before_b)
    )
    tail = np.maximum(0.0 if schedule.splits_backward else tail, step)

    by_rank = head + work + gap + tail
    rank, span = int(np.argmax(by_rank)), float(np.max(work + gap + step))
    weight = 0.0 if np.any(schedule.kind == B) else float(_fastest(schedule, duration, (W,))[0])
    if forward + backward + weight > by_rank[rank]:
        text = f"one microbatch takes {forward:g} forward and {backward:g} backward"
        text += f", and then the first stage's W {weight:g}" if weight else ""
        return Bounds(float(forward + backward + weight), span, text, -1)
    parts = [f"{head[rank]:g} before its first input", f"{work[rank]:g} of work"]
    parts += [f"{gap[rank]:g} in which only forwards could run"] if gap[rank] else []
    parts += [f"{tail[rank]:g} behind its last backward"] if tail[rank] else []
    return Bounds(float(by_rank[rank]), span, f"rank {rank} has " + ", ".join(parts), rank)


def _fastest(schedule: Schedule, duration: np.ndarray, kinds: tuple[int, ...]) -> np.ndarray:
    """The shortest duration among the actions of `kinds` [stages]."""
    fastest = np.full(schedule.num_stages, np.inf)
    rows = np.isin(schedule.kind, kinds) & (schedule.stage >= 0)
    np.minimum.at(fastest, schedule.stage[rows], duration[rows])
    return np.where(np.isfinite(fastest), fastest, 0.0)


def _hidden(schedule: Schedule, costs: Costs, duration: np.ndarray) -> np.ndarray:
    """The most work that pairs could hide [ranks], which is `overlap` times the shorter action of each pair.

    If the schedule pairs only forwards with backwards, that is at most all its forwards, or all its backwards. If it
    pairs computations of any kinds, no pairing hides more than pairing the longest with the second longest, the third
    with the fourth, and so on.
    """
    hidden = np.zeros(schedule.num_ranks)
    second = np.flatnonzero(schedule.joined)
    if not costs.overlap or not second.size:
        return hidden
    forward, duration = schedule.kind == F, np.where(schedule.kind <= W, duration, 0.0)
    only_opposite = bool(np.all(forward[second] != forward[second - 1]))
    for rank, row in enumerate(schedule.rows):
        amounts, ahead = duration[row], forward[row]
        if only_opposite:
            hidden[rank] = min(amounts[ahead].sum(), amounts[~ahead].sum())
        else:
            hidden[rank] = np.sort(amounts)[::-1][1::2].sum()
    return costs.overlap * hidden


def _gap(
    schedule: Schedule, duration: np.ndarray, waits: Callable[[int, int], float], rank: int, limit: float
) -> float:
    """Idle time that `rank` cannot avoid between its first forward and its first backward.

    waits   how long after the forward of one stage begins can the backward of another begin, for the same microbatch
    """
    held, rows = schedule.placement[rank], schedule.rows[rank]
    forwards = np.sort(duration[rows][schedule.kind[rows] == F])
    if not held or not len(forwards):
        return 0.0
    copies = sum(map(len, schedule.placement)) > schedule.num_stages  # then a microbatch passes one stage of the rank
    wait = min(waits(first, last) for first, last in (zip(held, held) if copies else [(min(held), max(held))]))
    slots = len(forwards) if np.isinf(limit) else min(len(forwards), round(limit * schedule.stages_per_rank))
    return max(0.0, float(wait - forwards[len(forwards) - slots :].sum()))
