"""Zero-bubble schedules: the backward is split into I, which other ranks wait for, and W, which fills the gaps."""

from __future__ import annotations

import numpy as np

from tplab.schedules.action import I, W
from tplab.schedules.placement import counts, linear, v_shape, wrapped
from tplab.schedules.rules.classic import in_groups
from tplab.schedules.rules.row import Row, forwards, input_grads, riffle, spelled
from tplab.schedules.schedule import Schedule


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """1F1B with the backward split; rank r delays W by r microbatches. Qi et al., ICLR 2024 (ZB-H1).

    I goes up the ranks as fast as it can, and W fills part of the bubble: (p-1)(F+I-W) is left if W <= F and W <= I.
    Every rank holds p microbatches, as many as the first rank of 1F1B.

    F0 F1 .. I0 W0 F2 I1 W1 I2 W2
    .. F0 I0 F1 I1 W0 F2 I2 W1 W2
    """
    ranks, microbatches = counts(ranks=ranks, microbatches=microbatches)
    k = np.arange(microbatches)
    rows = [
        with_weight_grads(riffle(forwards(rank, k), input_grads(rank, k), lead=ranks - 1 - rank), late=rank)
        for rank in range(ranks)
    ]
    return Schedule(rows, linear(ranks), "zb_h1")


def zb_h2(ranks: int, microbatches: int) -> Schedule:
    """ZB-H1 with twice the warm-up and twice the delay of W: 2p-1 microbatches held. Qi et al., ICLR 2024 (ZB-H2).

    If W <= F and W <= I, only (p-1)(F+I-2W) of idle time is left in each rank's span. But the ranks end one after the
    other, so the makespan gains nothing over ZB-H1 unless a rank may start its optimizer step as soon as it is done.

    F0 F1 F2 I0 W0 I1 W1 I2 W2 ..
    .. F0 I0 F1 I1 F2 I2 W0 W1 W2
    """
    ranks, microbatches = counts(ranks=ranks, microbatches=microbatches)
    k = np.arange(microbatches)
    rows = [
        with_weight_grads(riffle(forwards(rank, k), input_grads(rank, k), lead=2 * (ranks - 1 - rank)), late=2 * rank)
        for rank in range(ranks)
    ]
    return Schedule(rows, linear(ranks), "zb_h2")


def interleaved_zb(ranks: int, microbatches: int, virtual_stages: int = 2) -> Schedule:
    """Interleaved 1F1B with the backward split and a shorter lead: p-1-r + (v-1)p forwards. Qi et al., ICLR 2024;
    torch's ScheduleInterleavedZeroBubble.

    A bubble of (p-1)F/v is left when F = I = W.

    0F0 0F1 2F0 2F1 ... 2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1
    ... 1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1
    """
    ranks, microbatches, virtual_stages = counts(ranks=ranks, microbatches=microbatches, virtual_stages=virtual_stages)
    rows = []
    for rank in range(ranks):
        F, B, group = in_groups(rank, ranks, microbatches, virtual_stages)
        B[:, 0] = I
        lead = ranks - 1 - rank + (virtual_stages - 1) * group
        rows.append(with_weight_grads(riffle(F, B, lead), late=rank))
    return Schedule(rows, wrapped(ranks, virtual_stages), "interleaved_zb")


def zb_v(ranks: int, microbatches: int) -> Schedule:
    """Two stages per rank, placed as a V, so that the last stage's backward starts where the first stage is. Qi et al.,
    ICLR 2024 and arXiv 2405.15362 (ZB-V); torch's ScheduleZBVZeroBubble.

    When F = I = W, no rank has a gap in its span, and each holds p microbatches, as in 1F1B. In the code, big letters
    are the rank's first stage r, small letters its second one 2p-1-r. With fewer than 2p-1 microbatches, the schedule
    is the one for 2p-1 without the extra microbatches.

    0F0 0F1 ... 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 ... 0I1 0W1
    ... 1F0 2F0 1F1 2F1 2I0 2W0 1I0 1W0 2I1 2W1 1I1 1W1 ...
    """
    ranks, microbatches = counts(ranks=ranks, microbatches=microbatches)
    p, m = ranks, max(microbatches, 2 * ranks - 1)
    rows = []
    for r in range(p):
        warm_up = "F" * (2 * (p - r) - 1) + "fF" * r + "fiw" * (p - r)
        steady = "FIWfiw" * (m - 2 * p + r + 1) + "IWfiw" * (p - r - 1)
        cool_down = "Ii" * r + "IW" * (p - r) + "w" * r + "W" * r
        rows.append(
            spelled(warm_up + steady + cool_down, big=(r, 0), small=(2 * p - 1 - r, 0), microbatches=microbatches)
        )
    return Schedule(rows, v_shape(ranks), "zb_v")


def with_weight_grads(row: Row, late: int) -> Row:
    """`row` with the W of each I placed after the I that comes `late` positions later; the last W at the end."""
    at = np.flatnonzero(row[:, 0] == I)
    late = min(late, len(at))
    weight_grads = row[at]
    weight_grads[:, 0] = W
    behind = np.append(at[late:] + 1, np.full(late, len(row)))
    return np.insert(row, behind, weight_grads, axis=0)
