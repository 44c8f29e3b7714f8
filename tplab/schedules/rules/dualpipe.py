"""DualPipe and DualPipeV: forwards of one stream overlapped with backwards of another."""

from __future__ import annotations

from tplab.errors import ScheduleError
from tplab.schedules.placement import counts, two_way, v_shape
from tplab.schedules.rules.row import spelled
from tplab.schedules.schedule import Schedule


def dualpipe(ranks: int, microbatches: int) -> Schedule:
    """Two streams, one from each end of the pipe; each rank holds one stage of both. DeepSeek-V3 2024.

    The first half of the microbatches runs down the ranks, the second half up. Forwards of one stream are overlapped
    with backwards of the other: (p/2-1)(F&B + B - 3W) of bubble if I = W, p+1 stage activations, two copies of
    the weights.

    0F0 1F2 0F1 1B2 1F3+0B0 1B3 0I1 0W1
    0F2 1F0 0F3 1B0 1F1+0B2 1B1 0I3 0W3
    """
    ranks, microbatches = counts(ranks=ranks, microbatches=microbatches)
    if ranks % 2 or microbatches % 2 or microbatches < 2 * ranks:
        raise ScheduleError(
            "dualpipe needs an even number of ranks, and an even number of microbatches, at least two per rank; it has "
            f"{ranks} ranks and {microbatches} microbatches: take {ranks + ranks % 2} ranks and "
            f"{max(microbatches + microbatches % 2, 2 * (ranks + ranks % 2))} microbatches"
        )
    half, rows = microbatches // 2, []
    for rank in range(ranks):
        down, up = (rank, 0), (ranks - 1 - rank, half)
        nearer, farther = (down, up) if rank < ranks // 2 else (up, down)
        rows.append(spelled(_dual_letters(min(rank, ranks - 1 - rank), ranks // 2, half), big=nearer, small=farther))
    return Schedule(rows, two_way(ranks), "dualpipe")


def dualpipe_v(ranks: int, microbatches: int) -> Schedule:
    """DualPipe cut in half: the two streams are the two arms of a V, so one copy of the weights is enough. Sea AI Lab
    and DeepSeek 2025; torch's ScheduleDualPipeV.

    0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3+3B1 3F2+0B0 3B2 ... 3F3+0B1 3B3 0I2 0W2 0I3 0W3
    ... 1F0 2F0 1F1 2F1 1F2 2B0 2F2+1B0 1F3+2B1 2F3+1B1 2B2 1B2 ... 2I3 1I3 2W3 1W3
    """
    ranks, microbatches = counts(ranks=ranks, microbatches=microbatches)
    if microbatches < 2 * ranks:
        raise ScheduleError(
            f"dualpipe_v on {ranks} ranks needs at least {2 * ranks} microbatches, as many as stages, and has "
            f"{microbatches}; take more, or another rule (zb_v takes any number)"
        )
    rows = [
        spelled(_dual_letters(rank, ranks, microbatches), big=(rank, 0), small=(2 * ranks - 1 - rank, 0))
        for rank in range(ranks)
    ]
    return Schedule(rows, v_shape(ranks), "dualpipe_v")


def _dual_letters(r: int, p: int, m: int) -> str:
    """The actions of a rank of DualPipeV, in eight steps. Capital letters are its first stage, small ones its second.

    The last p of the 2p final backwards are split, so that W fills the gaps that the last I actions leave.
    """
    steady = "(Fb)(fB)" * (m - 2 * p + r + 1)
    if r == p - 1:  # the turn of the V: an overlapped pair would only make its own backward later
        steady = steady.replace("(Fb)", "Fb", 1)
    last = ("bB" * (r + 1))[: r + 1] + ("iI" * (r + 1))[r + 1 :]
    return (
        "F" * (2 * (p - r - 1))
        + "Ff" * (r + 1)
        + "iwf" * (p - r - 1)
        + steady
        + "b(fB)" * (p - r - 1)
        + last
        + "*I" * (p - r - 1)
        + "*" * (r + 1)
    )
