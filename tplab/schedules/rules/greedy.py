"""List scheduling: whenever a rank is free, it takes the best action that is ready."""

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
from tplab.schedules.schedule import Row


@dataclass(frozen=True)
class Durations:
    """How long each action takes: forward, backward (B, or I if it is split), weight [stages]; and a transfer."""

    forward: Sequence[float]
    backward: Sequence[float]
    weight: Sequence[float]
    transfer: float = 0.0


@dataclass(frozen=True)
class Policy:
    """Which of the ready actions a free rank takes.

    backward_first   it prefers a ready backward to a ready forward
    deep_first       it prefers the forward of its later stage to that of its earlier one
    patience         it waits instead of beginning a W if something else arrives within this fraction of W's duration
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
    free: float = 0.0  # when its current action ends
    held: int = 0  # stage activations: allocated by F, freed by B or W
    owed: deque[tuple[int, int]] = field(default_factory=deque)  # W that can be done
    row: list[tuple[int, int, int, int]] = field(default_factory=list)
    plan: deque[Step] | None = None


def list_schedule(
    placement: Placement,
    microbatches: int,
    durations: Durations,
    limits: Sequence[int],
    split: bool = True,
    policy: Policy | None = None,
    plan: Sequence[Sequence[Step]] | None = None,
) -> list[Row]:
    """One row per rank. `limits` is how many stage activations each rank may hold.

    Without a plan, a rank begins a forward only if it could then still finish the microbatches in flight, oldest first,
    within its limit (the banker's algorithm). So a rank never deadlocks itself.

    plan    the order of F and I (or B) on each rank, if it is already decided. Each rank then follows it, and does a W
            that it owes whenever the next step cannot begin, for lack of its input or of room for its activations
    """
    policy = policy or Policy()
    ranks = [_Rank(sorted(stages), limit) for stages, limit in zip(placement, limits)]
    for rank, steps in zip(ranks, plan or ()):
        rank.plan = deque(steps)
    num_stages = max(max(rank.stages) for rank in ranks) + 1
    home = {stage: number for number, rank in enumerate(ranks) for stage in rank.stages}
    back, last = I if split else B, num_stages - 1
    done_f, done_b = [0] * num_stages, [0] * num_stages  # microbatches of each stage so far: they run in order
    # When the input of each stage's F and I (or B) arrives, by microbatch; inf until that is known.
    there_f, there_b = ([[np.inf] * microbatches for _ in range(num_stages)] for _ in range(2))
    there_f[0] = [0.0] * microbatches

    def fits(rank: _Rank, stage: int, k: int) -> bool:
        """Whether F may begin here: could the microbatches in flight then still be finished, oldest first?"""
        stages, held = rank.stages, rank.held - len(rank.owed) + 1
        if len(stages) == 1 or held + len(stages) <= rank.limit:
            return held <= rank.limit
        first = min([done_b[s] for s in stages])
        # From one of these turns to the next, all microbatches have equally many stages left and free equally much.
        turns = sorted({first, k, *(n for s in stages for n in (done_f[s], done_b[s]) if first < n < k)})
        for older, until in pairwise([*turns, k + 1]):
            ran = sum([done_f[s] > older for s in stages]) + (older == k)
            if held + len(stages) - ran > rank.limit:
                return False
            held -= (until - older) * sum([done_b[s] <= older < done_f[s] for s in stages])
        return True

    def choose(rank: _Rank, now: float) -> Step | None:
        """The action of `rank` now; None if it has to wait."""
        near, soon = now + 1e-12, np.inf
        if rank.plan is not None:  # it may only take the next step of its plan
            backs = [rank.plan[0]] if rank.plan and rank.plan[0][0] != F else []
            aheads = [rank.plan[0]] if rank.plan and rank.plan[0][0] == F else []
        else:
            backs = [(back, s, done_b[s]) for s in reversed(rank.stages) if done_b[s] < done_f[s]]
            order = reversed(rank.stages) if policy.deep_first else rank.stages
            aheads = [(F, s, done_f[s]) for s in order if done_f[s] < microbatches]
        ready = next((step for step in backs if there_b[step[1]][step[2]] <= near), None)
        if ready is None or not policy.backward_first:
            for step in aheads:
                if there_f[step[1]][step[2]] <= near and (rank.plan is not None or fits(rank, *step[1:])):
                    ready = step
                    break
        if ready is not None:
            if ready[0] != F or rank.held < rank.limit:
                return ready
            return (W, *rank.owed[0]) if rank.owed else None  # it fits once a W has freed something
        if not rank.owed:
            return None
        for _, s, k in backs:
            soon = min(soon, there_b[s][k])
        for _, s, k in aheads:
            if near < there_f[s][k] < soon and (rank.plan is not None or fits(rank, s, k)):
                soon = there_f[s][k]
        wait = policy.patience * durations.weight[rank.owed[0][0]]
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
