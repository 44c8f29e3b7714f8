"""List scheduling: every rank takes, whenever it is free, the best action that is ready."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tplab.errors import ScheduleError
from tplab.schedules.action import B, F, I, W
from tplab.schedules.placement import Placement
from tplab.schedules.row import Row


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
    """One row a rank. `limits` is how many stage activations each rank may hold.

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
    back = I if split else B
    done_f, done_b = [0] * num_stages, [0] * num_stages  # microbatches of each stage so far: they run in order
    end: dict[Step, float] = {}

    def arrival(kind: int, stage: int, k: int) -> float | None:
        """When the input of an action is there; None while nobody knows."""
        if kind == F and stage == 0:
            return 0.0
        turn = kind != F and stage == num_stages - 1
        source = (F, stage, k) if turn else (kind, stage + (-1 if kind == F else 1), k)
        if source not in end:
            return None
        return end[source] + (durations.transfer if home[source[1]] != home[stage] else 0.0)

    def fits(rank: _Rank, stage: int, k: int) -> bool:
        held = rank.held - len(rank.owed) + 1
        for older in range(min(done_b[s] for s in rank.stages), k + 1):
            ran = sum(done_f[s] > older or (s, older) == (stage, k) for s in rank.stages)
            if held + len(rank.stages) - ran > rank.limit:
                return False
            held -= sum(done_b[s] <= older and (done_f[s] > older or (s, older) == (stage, k)) for s in rank.stages)
        return True

    def open_steps(rank: _Rank) -> list[Step]:
        """The F and I (or B) that the rank may turn to, whether their input is there or not."""
        if rank.plan is not None:
            return [rank.plan[0]] if rank.plan else []
        backs = [(back, stage, done_b[stage]) for stage in rank.stages if done_b[stage] < done_f[stage]]
        aheads = [(F, stage, done_f[stage]) for stage in rank.stages if done_f[stage] < microbatches]
        return backs + [step for step in aheads if fits(rank, *step[1:])]

    def choose(rank: _Rank, now: float) -> Step | None:
        """What `rank` does now; None if it waits."""
        ready, soon = [], np.inf
        for kind, stage, k in open_steps(rank):
            at = arrival(kind, stage, k)
            if at is not None and at <= now + 1e-12:
                first = (kind != F) == taste.backward_first
                ready.append((not first, -stage if taste.deep_first or kind != F else stage, kind, stage, k))
            elif at is not None:
                soon = min(soon, at)
        if ready:
            _, _, kind, stage, k = min(ready)
            if kind != F or rank.held < rank.limit:
                return kind, stage, k
            return (W, *rank.owed[0]) if rank.owed else None  # it fits once a W has let go of something
        if rank.owed and soon - now >= taste.patience * durations.weight[rank.owed[0][0]] - 1e-12:
            return W, *rank.owed[0]
        return None

    left = sum(len(rank.stages) for rank in ranks) * microbatches * (3 if split else 2)
    queue = [(0.0, number) for number in range(len(ranks))]  # when a rank has something new to choose from
    while left:
        if not queue:
            raise ScheduleError(
                f"no schedule with at most {list(limits)} stage activations a rank was found; allow more"
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
        end[step] = rank.free = now + spent
        rank.row.append((kind, stage, k, 0))
        left -= 1
        heapq.heappush(queue, (rank.free, number))
        taker = stage + 1 if kind == F else stage - 1
        if kind != W and 0 <= taker < num_stages and home[taker] != number:
            heapq.heappush(queue, (rank.free + durations.transfer, home[taker]))
    return [np.array(rank.row, np.int32).reshape(-1, 4) for rank in ranks]
