"""Building blocks: the slots of one microbatch, stamped for each one, then squeezed. Qi et al., arXiv 2405.15362.

A block says at which slot each stage runs F and I of microbatch 0; each later microbatch runs `interval` slots after
the one before. All actions take one slot here. In the long run, the activations that a rank
holds are the slots for which each of its stages keeps a microbatch, divided by the interval. So you can read a
schedule's memory off its block.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from tplab.errors import ScheduleError
from tplab.schedules.action import F, I, W
from tplab.schedules.placement import Placement
from tplab.schedules.rules.greedy import Durations, Step, Taste, list_schedule
from tplab.schedules.schedule import Schedule


@dataclass(frozen=True)
class Block:
    """forward, backward: the slots of F and I of microbatch 0 [stages]; interval: slots from one microbatch to the
    next."""

    placement: Placement
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    interval: int

    def collides(self) -> bool:
        """Whether two stampings would ever meet in one slot of a rank."""
        for stages in self.placement:
            slots = [slot % self.interval for stage in stages for slot in (self.forward[stage], self.backward[stage])]
            if len(set(slots)) < len(slots) or len(slots) + len(stages) > self.interval:
                return True
        return False

    def schedule(
        self,
        microbatches: int,
        limits: Sequence[int] | None = None,
        durations: Durations | None = None,
        taste: Taste | None = None,
        name: str = "",
    ) -> Schedule:
        """Stamp the block `microbatches` times, squeeze, and fill in the W.

        limits      how many stage activations each rank may hold; by default what the stamped block holds
        durations   used for filling in the W; by default one slot each
        """
        num_stages = len(self.forward)
        durations = durations or Durations([1] * num_stages, [1] * num_stages, [1] * num_stages)
        plan, held = self.squeezed(microbatches, limits)
        rows = list_schedule(self.placement, microbatches, durations, limits or held, taste=taste, plan=plan)
        return Schedule(rows, self.placement, name)

    def squeezed(self, microbatches: int, limits: Sequence[int] | None = None) -> tuple[list[list[Step]], list[int]]:
        """(the order of F and I on each rank, what each rank holds at most).

        In the order of their slots, actions move to the earliest free slot after what they need: a backward always, a
        forward only if the rank then holds no more than its limit.
        """
        if self.collides():
            raise ScheduleError(f"two stampings of {self} meet in one slot of a rank; choose other slots")
        slot = {
            (kind, stage, k): first + self.interval * k
            for kind, firsts in ((F, self.forward), (I, self.backward))
            for stage, first in enumerate(firsts)
            for k in range(microbatches)
        }
        home = {stage: rank for rank, stages in enumerate(self.placement) for stage in stages}
        used = [_with_weight_grads(slot, set(stages)) for stages in self.placement]
        for rank in used:
            slot |= {step: at for at, step in rank.items()}
        held = [_held(rank) for rank in used]
        peaks = [max(amounts) for amounts in held]
        limits = [max(peaks)] * len(used) if limits is None else limits
        if any(peak > limit for peak, limit in zip(peaks, limits)):
            raise ScheduleError(
                f"the block holds {max(peaks)} stage activations on a rank, more than the limit {min(limits)}"
            )

        last = len(self.forward) - 1
        for step, now in sorted(slot.items(), key=lambda item: (item[1], home[item[0][1]])):
            kind, stage, k = step
            rank, amounts = used[home[stage]], held[home[stage]]
            if kind == W:
                sources = [(I, stage, k)]
            elif kind == F:
                sources = [(F, stage - 1, k)] if stage else []
            else:
                sources = [(F, stage, k) if stage == last else (I, stage + 1, k), (F, stage, k)]
            sources += [(kind, stage, k - 1)] if k else []
            earliest = max((slot[source] + 1 for source in sources), default=0)
            if kind == F:
                fits = now
                while fits > earliest and amounts[fits - 1] < limits[home[stage]]:
                    fits -= 1
                earliest = max(earliest, fits)
            to = next((free for free in range(earliest, now) if free not in rank), now)
            if to < now:
                del rank[now]
                rank[to], slot[step] = step, to
                moved = range(to, now) if kind == F else range(to + 1, now + 1) if kind == W else range(0)
                for at in moved:
                    amounts[at] += 1 if kind == F else -1
        order = [[step for _, step in sorted(rank.items()) if step[0] != W] for rank in used]
        return order, [max(peaks)] * len(used)


def _with_weight_grads(slot: dict[Step, int], stages: set[int]) -> dict[int, Step]:
    """slot -> action of one rank: its F and I, and each W in the first free slot after its I."""
    taken = {at: step for step, at in slot.items() if step[1] in stages}
    owed, at = deque(step for _, step in sorted(taken.items()) if step[0] == I), 0
    while owed:
        _, stage, k = owed[0]
        at = max(at, slot[owed[0]] + 1)
        if at not in taken:
            taken[at] = (W, stage, k)
            owed.popleft()
        at += 1
    return taken


def _held(taken: dict[int, Step]) -> list[int]:
    """How many activations the rank holds in each slot: F adds one in its slot, W frees one after its own."""
    change = [0] * (max(taken) + 2)
    for at, (kind, _, _) in taken.items():
        change[at + (kind == W)] += {F: 1, I: 0, W: -1}[kind]
    for at in range(1, len(change)):
        change[at] += change[at - 1]
    return change
