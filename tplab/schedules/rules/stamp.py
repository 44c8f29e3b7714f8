"""Building blocks: the slots of one microbatch, stamped for each one, then squeezed. Qi et al., arXiv 2405.15362.

A block says at which slot each stage runs F and I of microbatch 0; each later microbatch runs `interval` slots after
the one before. All actions take one slot here. In the long run, the activations that a rank
holds are the slots for which each of its stages keeps a microbatch, divided by the interval. So you can read a
schedule's memory off its block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import ArrayLike

from tplab.errors import ScheduleError
from tplab.schedules.action import F, I, W
from tplab.schedules.placement import Placement, counts, v_shape
from tplab.schedules.rules.greedy import Durations, Step, list_schedule
from tplab.schedules.schedule import Schedule

_FREE = b"\0"


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
        name: str = "",
    ) -> Schedule:
        """Stamp the block `microbatches` times, squeeze, and fill in the W.

        limits      how many stage activations each rank may hold; by default what the stamped block holds
        durations   used for filling in the W; by default one slot each
        """
        num_stages = len(self.forward)
        durations = durations or Durations([1] * num_stages, [1] * num_stages, [1] * num_stages)
        plan, held = self.squeezed(microbatches, limits)
        rows = list_schedule(self.placement, microbatches, durations, limits or held, plan=plan)
        return Schedule(rows, self.placement, name)

    def squeezed(self, microbatches: int, limits: Sequence[int] | None = None) -> tuple[list[list[Step]], list[int]]:
        """(the order of F and I on each rank, what each rank holds at most).

        In the order of their slots, actions move to the earliest free slot after what they need: a backward always, a
        forward only if the rank then holds no more than its limit.
        """
        if self.collides():
            raise ScheduleError(f"two stampings of {self} meet in one slot of a rank; choose other slots")
        home = {stage: rank for rank, stages in enumerate(self.placement) for stage in stages}
        used = [self._stamped(stages, microbatches) for stages in self.placement]
        slot = {step: at for rank in used for at, step in rank.items()}
        held = [_held(rank) for rank in used]
        filled = [bytearray(at in rank for at in range(max(rank) + 1)) for rank in used]
        peaks = [int(amounts.max()) for amounts in held]
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
                full = np.flatnonzero(amounts[earliest:now] >= limits[home[stage]])
                earliest += int(full[-1]) + 1 if full.size else 0
            to = filled[home[stage]].find(_FREE, earliest, now)
            if to >= 0:
                del rank[now]
                rank[to], slot[step] = step, to
                filled[home[stage]][to], filled[home[stage]][now] = 1, 0
                if kind == F:
                    amounts[to:now] += 1
                elif kind == W:
                    amounts[to + 1 : now + 1] -= 1
        order = [[step for _, step in sorted(rank.items()) if step[0] != W] for rank in used]
        return order, [max(peaks)] * len(used)

    def _stamped(self, stages: Sequence[int], microbatches: int) -> dict[int, Step]:
        """slot -> action of the rank with these stages: its F and I, and each W in the first free slot after its I."""
        taken: dict[int, Step] = {
            firsts[stage] + self.interval * k: (kind, stage, k)
            for kind, firsts in ((F, self.forward), (I, self.backward))
            for stage in stages
            for k in range(microbatches)
        }
        at = 0
        for since, (_, stage, k) in sorted(item for item in taken.items() if item[1][0] == I):
            at = max(at, since + 1)
            while at in taken:
                at += 1
            taken[at] = (W, stage, k)
            at += 1
        return taken


def _held(taken: dict[int, Step]) -> np.ndarray:
    """How many activations the rank holds in each slot: F adds one in its slot, W frees one after its own."""
    change = np.zeros(max(taken) + 2, np.intp)
    change[[at for at, (kind, _, _) in taken.items() if kind == F]] += 1
    change[[at + 1 for at, (kind, _, _) in taken.items() if kind == W]] -= 1
    return np.cumsum(change)


# --- families ---------------------------------------------------------------------------------------------------------


_MOST = 6_000  # combinations tried for one interval


def blocks(placement: Placement, slots: Sequence[int]) -> Iterator[Block]:
    """Blocks for a placement whose stages form arms of p (linear, wrapped, V, wave), the shortest first.

    Each arm has a slope: the number of slots from one stage's F (or I) to the next stage's. Each turn has a pause. A
    block without idle slots has an interval of three slots per stage; if memory is scarce, a longer one fits.
    Only blocks whose activations fit into `slots` are given.
    """
    p, num_stages = len(placement), sum(map(len, placement))
    arms = num_stages // p
    home = np.empty(num_stages, np.intp)
    for rank, stages in enumerate(placement):
        home[list(stages)] = rank
    for idle in range(4):
        interval = 3 * arms + idle
        forward, backward = _ways(arms, p, interval)
        slot = np.concatenate([forward, backward], axis=1) % interval
        owner = np.concatenate([home, home])
        fits = np.ones(len(slot), bool)
        for rank in range(p):
            mine = np.sort(slot[:, owner == rank], axis=1)
            fits &= ~np.any(mine[:, 1:] == mine[:, :-1], axis=1)
            kept = (backward - forward + 2)[:, home == rank].sum(axis=1) / interval  # W comes a slot or so after I
            fits &= kept <= slots[rank] + 0.5
        found = np.flatnonzero(fits)
        for row in found[np.argsort(backward[found, 0], kind="stable")].tolist():
            yield Block(placement, tuple(forward[row].tolist()), tuple(backward[row].tolist()), interval)


def _ways(arms: int, p: int, interval: int) -> tuple[np.ndarray, np.ndarray]:
    """(forward, backward) slots of microbatch 0 for every choice of slopes and pauses [choices, stages]."""
    slopes = range(1, 5) if arms == 1 else range(1, 4)
    one_slope = 3 ** (2 * arms) * 4 ** (2 * arms - 1) > _MOST  # too many: the same slope and pause on all arms each way
    kinds = [slopes] * (2 if one_slope else 2 * arms) + [range(interval if arms == 1 else 4)] * (
        2 if one_slope else 2 * arms - 1
    )
    choices = np.array(list(product(*kinds)), np.intp)
    if one_slope:
        down, up, pause, turn = choices.T
        pauses = [pause] * (arms - 1) + [turn] + [pause] * (arms - 1)
        slopes_of = [down] * arms + [up] * arms
    else:
        slopes_of, pauses = list(choices.T[: 2 * arms]), list(choices.T[2 * arms :])
    at = np.zeros(len(choices), np.intp)
    columns = []
    for leg, slope in enumerate(slopes_of):
        columns += [at + slope * step for step in range(p)]
        if leg < len(pauses):
            at = columns[-1] + 1 + pauses[leg]
    ways = np.stack(columns, axis=1)
    return ways[:, : arms * p], ways[:, arms * p :][:, ::-1]


# --- V-shapes ---------------------------------------------------------------------------------------------------------


def v_half(ranks: int, microbatches: int) -> Schedule:
    """A V whose forwards and backwards go down at half speed and come up at full speed: (p+2)//2 microbatches held,
    half as many as in 1F1B. Qi et al., arXiv 2405.15362 (V-Half).

    Slots 2r, 3p-2-r, 3p-1+2r and 6p-2-r; from the first I on, three later if p is even.

    0F0 0F1 ... 3F0 3I0 3F1 3I1 0I0 3W0 0I1 3W1 0W0 0W1
    ... 1F0 2F0 1F1 2F1 2I0 1I0 2I1 1I1 2W0 1W0 2W1 1W1
    """
    ranks, microbatches = counts(ranks=ranks, microbatches=microbatches)
    p, gap, r = ranks, 3 if ranks % 2 == 0 else 0, np.arange(ranks)
    block = v_block(2 * r, 3 * p - 2 - r, 3 * p + gap - 1 + 2 * r, 6 * p + gap - 2 - r)
    return block.schedule(microbatches, name="v_half")


def v_min(ranks: int, microbatches: int) -> Schedule:
    """A V that goes down and up at full speed: (p+4)//3 microbatches held, the fewest of the V schedules. Qi et al.,
    arXiv 2405.15362 (V-Min).

    Slots r, 2p-1-r, 2p+r and 4p-1-r; from the first I on, two later if p is a multiple of 3.

    0F0 0F1 ... 3F0 3I0 3F1 3W0 0I0 3I1 0W0 3W1 0I1 0W1
    ... 1F0 2F0 1F1 2F1 2I0 1I0 2W0 1W0 2I1 1I1 2W1 1W1
    """
    ranks, microbatches = counts(ranks=ranks, microbatches=microbatches)
    p, gap, r = ranks, 2 if ranks % 3 == 0 else 0, np.arange(ranks)
    return v_block(r, 2 * p - 1 - r, 2 * p + gap + r, 4 * p + gap - 1 - r).schedule(microbatches, name="v_min")


def v_block(down: ArrayLike, up: ArrayLike, back_down: ArrayLike, back_up: ArrayLike, interval: int = 6) -> Block:
    """A building block on the V: for each rank, the slots of F on the first stage r, F on the second stage 2p-1-r, I
    on the second, and I on the first. `Block.schedule` stamps it.
    """
    forward, backward = (
        np.concatenate([first, np.flip(second)]).tolist() for first, second in ((down, up), (back_up, back_down))
    )
    return Block(v_shape(len(forward) // 2), tuple(forward), tuple(backward), interval)
