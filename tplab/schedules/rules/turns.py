"""Rules by which each rank takes forwards and backwards in turn: naive, GPipe, 1F1B, interleaved, ZB-H1 and ZB-H2."""

from __future__ import annotations

import numpy as np

from tplab.schedules.action import B, F, I, W
from tplab.schedules.placement import counts, wrapped
from tplab.schedules.schedule import Row, Schedule, row
from tplab.sharding import cut


def in_turns(name: str, ahead: int | None, late: int | None = None, **sizes: int) -> Schedule:
    """Each rank runs some forwards first, then one forward and one backward in turn, then the backwards that are left.

    ahead   rank r of p runs `ahead` x (p-1-r) forwards first, and with v stages those of its first v-1 stages for a
            group of microbatches. None: all forwards
    late    None: the backward is whole. Otherwise it is split, and W comes `late` x r positions after the next I
    sizes   ranks, microbatches and, if the rule has it, virtual_stages (v), named so in errors

    A group goes through the rank's first stage, then through its next. A group of p is just long enough for its first
    microbatch to come round all ranks. If m is not a multiple of p, the m // p groups are made as equal as possible
    (torch requires equal groups; Megatron-LM's have p microbatches unless it is told another number). If all forwards
    come first, there is one group.
    """
    p, m, *virtual = counts(**sizes)
    v = virtual[0] if virtual else 1
    groups = cut(m, 1 if ahead is None else max(1, m // p), "even")
    microbatch = np.concatenate([np.tile(group, v) for group in groups])
    turn = np.concatenate([np.arange(v).repeat(len(group)) for group in groups]) * p
    rows = []
    for r in range(p):
        lead = m * v if ahead is None else ahead * (p - 1 - r) + (v - 1) * len(groups[0])
        forwards = row(F, turn + r, microbatch)
        backwards = row(B if late is None else I, (v - 1) * p - turn + r, microbatch)
        made = riffle(forwards, backwards, lead)
        rows.append(made if late is None else with_weight_grads(made, late * r))
    return Schedule(rows, wrapped(p, v), name)


def riffle(first: Row, second: Row, lead: int) -> Row:
    """`lead` actions of the first row, then one of each row in turn, then what is left.

    riffle(F0 F1 F2 F3, B0 B1 B2 B3, lead=1)  ->  F0  F1 B0 F2 B1 F3 B2  B3
    """
    lead = min(lead, len(first))
    pairs = min(len(first) - lead, len(second))
    shuffled = np.stack([first[lead : lead + pairs], second[:pairs]], axis=1).reshape(-1, 4)
    return np.concatenate([first[:lead], shuffled, first[lead + pairs :], second[pairs:]])


def with_weight_grads(made: Row, late: int) -> Row:
    """The row with the W of each I placed after the I that comes `late` positions later; the last W at the end."""
    at = np.flatnonzero(made[:, 0] == I)
    late = min(late, len(at))
    weight_grads = made[at]
    weight_grads[:, 0] = W
    behind = np.append(at[late:] + 1, np.full(late, len(made)))
    return np.insert(made, behind, weight_grads, axis=0)


# --- one stage per rank -----------------------------------------------------------------------------------------------


def naive(ranks: int, microbatches: int = 1) -> Schedule:
    """Vertical model parallelism: one microbatch at a time, all but one rank idle.

    F0 .. .. B0
    .. F0 B0 ..
    """
    return in_turns("naive", 0, ranks=ranks, microbatches=microbatches)


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards. Huang et al. 2018.

    F0 F1 F2 .. .. B0 B1 B2
    .. F0 F1 F2 B0 B1 B2 ..
    """
    return in_turns("gpipe", None, ranks=ranks, microbatches=microbatches)


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """Rank r runs p-1-r forwards ahead, then alternates one forward and one backward. Narayanan et al. 2020
    (PipeDream-Flush), Fan et al. 2020 (DAPPLE).

    The bubble is the same as GPipe's, but rank r holds only p-r microbatches at once, not m.

    F0 F1 .. B0 F2 B1 .. B2
    .. F0 B0 F1 B1 F2 B2 ..
    """
    return in_turns("one_f_one_b", 1, ranks=ranks, microbatches=microbatches)


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """1F1B with the backward split; rank r delays W by r microbatches. Qi et al., ICLR 2024 (ZB-H1).

    I goes up the ranks as fast as it can, and W fills part of the bubble: (p-1)(F+I-W) is left if W <= F and W <= I.
    Every rank holds p microbatches, as many as the first rank of 1F1B.

    F0 F1 .. I0 W0 F2 I1 W1 I2 W2
    .. F0 I0 F1 I1 W0 F2 I2 W1 W2
    """
    return in_turns("zb_h1", 1, 1, ranks=ranks, microbatches=microbatches)


def zb_h2(ranks: int, microbatches: int) -> Schedule:
    """ZB-H1 with twice the warm-up and twice the delay of W: 2p-1 microbatches held. Qi et al., ICLR 2024 (ZB-H2).

    If W <= F and W <= I, only (p-1)(F+I-2W) of idle time is left in each rank's span. But the ranks end one after the
    other, so the makespan gains nothing over ZB-H1 unless a rank may start its optimizer step as soon as it is done.

    F0 F1 F2 I0 W0 I1 W1 I2 W2 ..
    .. F0 I0 F1 I1 F2 I2 W0 W1 W2
    """
    return in_turns("zb_h2", 2, 2, ranks=ranks, microbatches=microbatches)


# --- several stages per rank ------------------------------------------------------------------------------------------


def interleaved_1f1b(ranks: int, microbatches: int, virtual_stages: int = 2) -> Schedule:
    """1F1B over `virtual_stages` (v) stages per rank, a group of p microbatches at a time. Narayanan et al. SC'21.

    Rank r runs 2(p-r-1) + (v-1)p forwards ahead. Compared with 1F1B, the bubble is divided by v and the transfers are
    multiplied by v.

    0F0 0F1 2F0 2F1 ... 2B0 ... 2B1 0B0 0B1
    ... 1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1 ...
    """
    return in_turns("interleaved_1f1b", 2, ranks=ranks, microbatches=microbatches, virtual_stages=virtual_stages)


def looped_bfs(ranks: int, microbatches: int, virtual_stages: int = 2) -> Schedule:
    """All microbatches go through one stage, then through the next; the backward in reverse. Lamy-Poirier 2022.

    The bubble is interleaved 1F1B's and the memory is GPipe's. Each stage's weights are needed in one go, once in
    the forward and once in the backward.

    0F0 0F1 2F0 2F1 ... ... 2B0 2B1 0B0 0B1
    ... 1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1 ...
    """
    return in_turns("looped_bfs", None, ranks=ranks, microbatches=microbatches, virtual_stages=virtual_stages)


def interleaved_zb(ranks: int, microbatches: int, virtual_stages: int = 2) -> Schedule:
    """Interleaved 1F1B with the backward split and a shorter lead: p-1-r + (v-1)p forwards. Qi et al., ICLR 2024;
    torch's ScheduleInterleavedZeroBubble.

    A bubble of (p-1)F/v is left when F = I = W.

    0F0 0F1 2F0 2F1 ... 2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1
    ... 1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1
    """
    return in_turns("interleaved_zb", 1, 1, ranks=ranks, microbatches=microbatches, virtual_stages=virtual_stages)
