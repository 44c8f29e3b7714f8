"""V-shaped schedules with controllable memory: V-Half and V-Min."""

from __future__ import annotations

from tplab.schedules.placement import counts, v_shape
from tplab.schedules.rules.stamp import Block
from tplab.schedules.schedule import Schedule


def v_half(ranks: int, microbatches: int) -> Schedule:
    """A V whose forwards and backwards go down at half speed and come up at full speed: (p+2)//2 microbatches held,
    half as many as in 1F1B. Qi et al., arXiv 2405.15362 (V-Half).

    0F0 0F1 ... 3F0 3I0 3F1 3I1 0I0 3W0 0I1 3W1 0W0 0W1
    ... 1F0 2F0 1F1 2F1 2I0 1I0 2I1 1I1 2W0 1W0 2W1 1W1
    """
    ranks, microbatches = counts(ranks=ranks, microbatches=microbatches)
    return v_half_block(ranks).schedule(microbatches, name="v_half")


def v_min(ranks: int, microbatches: int) -> Schedule:
    """A V that goes down and up at full speed: (p+4)//3 microbatches held, the fewest of the V schedules. Qi et al.,
    arXiv 2405.15362 (V-Min).

    0F0 0F1 ... 3F0 3I0 3F1 3W0 0I0 3I1 0W0 3W1 0I1 0W1
    ... 1F0 2F0 1F1 2F1 2I0 1I0 2W0 1W0 2I1 1I1 2W1 1W1
    """
    ranks, microbatches = counts(ranks=ranks, microbatches=microbatches)
    return v_min_block(ranks).schedule(microbatches, name="v_min")


def v_block(down: list[int], up: list[int], back_down: list[int], back_up: list[int], interval: int = 6) -> Block:
    """A building block on the V: for each rank, the slots of F on the first stage r, F on the second stage 2p-1-r, I
    on the second, and I on the first. `Block.schedule` stamps it.
    """
    p = len(down)
    return Block(v_shape(p), tuple(down + up[::-1]), tuple(back_up + back_down[::-1]), interval)


def v_min_block(ranks: int) -> Block:
    """Slots r, 2p-1-r, 2p+r and 4p-1-r; from the first I on, two later if p is a multiple of 3."""
    p, gap = ranks, 2 if ranks % 3 == 0 else 0
    r = range(p)
    return v_block(list(r), [2 * p - 1 - i for i in r], [2 * p + gap + i for i in r], [4 * p + gap - 1 - i for i in r])


def v_half_block(ranks: int) -> Block:
    """Slots 2r, 3p-2-r, 3p-1+2r and 6p-2-r; from the first I on, three later if p is even."""
    p, gap = ranks, 3 if ranks % 2 == 0 else 0
    r = range(p)
    return v_block(
        [2 * i for i in r],
        [3 * p - 2 - i for i in r],
        [3 * p + gap - 1 + 2 * i for i in r],
        [6 * p + gap - 2 - i for i in r],
    )
