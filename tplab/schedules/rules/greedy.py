"""List scheduling: every rank takes, whenever it is free, the best action that is ready."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from tplab.errors import ScheduleError
from tplab.schedules.action import B, F, I, W
from tplab.schedules.placement import Placement
from tplab.schedules.rules.row import Row


@dataclass(frozen=True)
class Durations:
    """How long each action takes: forward, backward (B, or I where it is split), weight [stages]; and a transfer."""

    forward: Sequence[float]
    backward: Sequence[float]
    weight: Sequence[float]
    transfer: float = 0.0


@dataclass(frozen=True)
class Taste:
    """What a free rank prefers.

    backward_first   a ready backward to a ready forward
    deep_first       the forward of its later stage to that of its earlier one
    patience         to wait, rather than begin a W, where something else arrives within this part of W's duration
    """

    backward_first: bool = True
    deep_first: bool = True
    patience: float = 0.0


Step = tuple[int, int, int]
"""kind, stage, microbatch"""


@dataclass
class _Rank:
    stages: list[int]
    limit: int
    free: float = 0.0  # when it is done with what it does
    held: int = 0  # activations of a stage: taken by F, let go by B or W
    owed: deque[tuple[int, int]] = field(default_factory=deque)  # W that can be done
    row: list[tuple[int, int, int, int]] = field(default_factory=list)
    plan: deque[Step] | None = None


def list_schedule(
    placement: Placement,
    microbatches: int,
    durations: Durations,
    limits: Sequence[int],
    split: bool = True,
    taste: Taste | None = None,
    plan: Sequence[Sequence[Step]] | None = None,
) -> list[Row]:
    """One row per rank. `limits` is how many stage activations each rank may hold.

    Without a plan, a forward is begun only where the rank could still take the microbatches in flight to their end,
    oldest first, within its limit (the banker's rule): a rank never locks itself out.

    plan    the order of F and I (or B) on each rank, if that is settled: then each rank follows it, and does the W it
            owes where the next step cannot begin, because its input is not there or its activations do not fit
    """
    taste = taste or Taste()
    ranks = [_Rank(sorted(stages), limit) for stages, limit in zip(placement, limits)]
    for rank, steps in zip(ranks, plan or ()):
        rank.plan = deque(steps)
    num_stages = max(max(rank.stages) for rank in ranks) + 1
    home = {stage: number for number, rank in enumerate(ranks) for stage in rank.stages}
    back, last = I if split else B, num_stages - 1
    done_f, done_b = [0] * num_stages, [0] * num_stages  # microbatches of each stage so far: they run in order
    # When the input of each stage's F and I (or B) is there, by microbatch; inf while nobody knows.
    there_f, there_b = ([[np.inf] * microbatches for _ in range(num_stages)] for _ in range(2))
    there_f[0] = [0.0] * microbatches

    def fits(rank: _Rank, stage: int, k: int) -> bool:
        """Whether F may begin here: could the microbatches in flight then be taken to their end, oldest first?"""
        stages, held = rank.stages, rank.held - len(rank.owed) + 1
        if len(stages) == 1 or held + len(stages) <= rank.limit:
            return held <= rank.limit
        first = min([done_b[s] for s in stages])
        # Between these microbatches, each older one lacks as many stages and lets go of as much.
        turns = sorted({first, k, *(n for s in stages for n in (done_f[s], done_b[s]) if first < n < k)})
        for older, until in pairwise([*turns, k + 1]):
            ran = sum([done_f[s] > older for s in stages]) + (older == k)
            if held + len(stages) - ran > rank.limit:
                return False
            held -= (until - older) * sum([done_b[s] <= older < done_f[s] for s in stages])
        return True

    def choose(rank: _Rank, now: float) -> Step | None:
        """What `rank` does now; None if it waits."""
        near, soon = now + 1e-12, np.inf
        if rank.plan is not None:  # it may turn to the next of its plan only
            backs = [rank.plan[0]] if rank.plan and rank.plan[0][0] != F else []
            aheads = [rank.plan[0]] if rank.plan and rank.plan[0][0] == F else []
        else:
            backs = [(back, s, done_b[s]) for s in reversed(rank.stages) if done_b[s] < done_f[s]]
            order = reversed(rank.stages) if taste.deep_first else rank.stages
            aheads = [(F, s, done_f[s]) for s in order if done_f[s] < microbatches]
        ready = next((step for step in backs if there_b[step[1]][step[2]] <= near), None)
        if ready is None or not taste.backward_first:
            for step in aheads:
                if there_f[step[1]][step[2]] <= near and (rank.plan is not None or fits(rank, *step[1:])):
                    ready = step
                    break
        if ready is not None:
            if ready[0] != F or rank.held < rank.limit:
                return ready
            return (W, *rank.owed[0]) if rank.owed else None  # it fits once a W has let go of something
        if not rank.owed:
            return None
        for _, s, k in backs:
            soon = min(soon, there_b[s][k])
        for _, s, k in aheads:
            if near < there_f[s][k] < soon and (rank.plan is not None or fits(rank, s, k)):
                soon = there_f[s][k]
        wait = taste.patience * durations.weight[rank.owed[0][0]]
        return (W, *rank.owed[0]) if soon - now >= wait - 1e-12 else None

    left = sum(len(rank.stages) for rank in ranks) * microbatches * (3 if split else 2)
    queue = [(0.0, number) for number in range(len(ranks))]  # when a rank has something new to choose from
    while left:
        if not queue:
            raise ScheduleError(
                f"no schedule with at most {list(limits)} stage activations per rank was found; allow more"
            )
        now, number = heapq.heappop(queue)
        rank = ranks[number]
        step = choose(rank, now) if now >= rank.free else None
        if step is None:
            continue
        kind, stage, k = step
        if rank.plan and kind != W:
            rank.plan.popleft()
        if kind == F:
            done_f[stage], rank.held = k + 1, rank.held + 1
        elif kind == W:
            rank.owed.popleft()
            rank.held -= 1
        else:
            done_b[stage] = k + 1
            if split:
                rank.owed.append((stage, k))
            else:
                rank.held -= 1
        spent = (durations.forward if kind == F else durations.weight if kind == W else durations.backward)[stage]
        rank.free = now + spent
        rank.row.append((kind, stage, k, 0))
        left -= 1
        heapq.heappush(queue, (rank.free, number))
        if kind == W:
            continue
        if kind == F and stage == last:  # its own backward comes next
            there_b[stage][k] = rank.free
            continue
        taker = stage + 1 if kind == F else stage - 1
        if taker < 0:
            continue
        arrival = rank.free + (0.0 if home[taker] == number else durations.transfer)
        (there_f if kind == F else there_b)[taker][k] = arrival
        if home[taker] != number:
            heapq.heappush(queue, (arrival, home[taker]))
    return [np.array(rank.row, np.int32).reshape(-1, 4) for rank in ranks]
