"""Schedules in which microbatches run in two directions: Chimera, Hanayo, ZB-V, DualPipe and DualPipeV."""

from __future__ import annotations

import numpy as np

from tplab.errors import ScheduleError
from tplab.schedules.action import CODE, B, F, I, W
from tplab.schedules.placement import counts, two_way, v_shape, wave
from tplab.schedules.rules.greedy import Durations, list_schedule
from tplab.schedules.schedule import Row, Schedule, row


def spelled(letters: str, big: tuple[int, int], small: tuple[int, int], microbatches: int | None = None) -> Row:
    """A row from letters: F B I W on one stage, f b i w on another; each letter takes its next microbatch.

    big, small     (stage, first microbatch) of the big and of the small letters
    microbatches   leave out microbatches from this number on
    (Fb)           an overlapped pair
    *              the oldest weight gradient still to be done, of either stage

    spelled("FF(Fb)*", ...)  where b is i: F0 F1, F2 together with the other stage's I0, then that W0
    """
    cells: list[tuple[int, int, int, bool]] = []
    owed: list[tuple[int, int]] = []
    letter_of = {letter: (CODE[letter.upper()], *(big if letter.isupper() else small)) for letter in "FBIWfbiw"}
    taken = dict.fromkeys("FBfb", 0)
    for index, letter in enumerate(letters):
        if letter in "()":
            continue
        kind, stage, first = letter_of.get(letter, (W, -1, 0))
        if kind == W:
            stage, k = owed.pop(next(at for at, one in enumerate(owed) if stage in (-1, one[0])))
        else:
            counted = {"I": "B", "i": "b"}.get(letter, letter)
            k = first + taken[counted]
            taken[counted] += 1
        if kind == I:
            owed.append((stage, k))
        if microbatches is None or k < microbatches:
            cells.append((kind, stage, k, index >= 2 and letters[index - 2] == "("))
    return np.array(cells, np.int32).reshape(-1, 4)


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


def chimera(ranks: int, microbatches: int) -> Schedule:
    """Two pipes, one down and one up the ranks, each with half of every p microbatches. Li and Hoefler, SC'21.

    In each unit of p microbatches, the j-th of those that go down has its forward on rank r at slot r + 2j and its
    backward at slot 2p-1-r + 2j; those that go up are the mirror image. If p is even, no two ever share a slot.

    The bubble is about half of GPipe's, at the cost of two copies of the weights. Units follow each other by "direct
    concatenation".

    0F0 1F1 1B1 0B0
    0F1 1F0 1B0 0B1
    """
    ranks, microbatches = counts(ranks=ranks, microbatches=microbatches)
    if ranks % 2:
        raise ScheduleError(
            f"chimera has {ranks} ranks and needs an even number, so that its two pipes never meet; take {ranks + 1}"
        )
    k = np.arange(microbatches)
    unit = k // ranks
    size = np.minimum(microbatches - unit * ranks, ranks)  # the last unit may be smaller
    within = k % ranks
    goes_down = within < (size + 1) // 2
    j = np.where(goes_down, within, within - (size + 1) // 2)
    rows: list[Row] = []
    for rank in range(ranks):
        stage = np.where(goes_down, rank, ranks - 1 - rank)
        slot = 2 * ranks * unit + 2 * j
        slots = np.append(slot + stage, slot + 2 * ranks - 1 - stage)
        passes = np.concatenate([row(F, stage, k), row(B, stage, k)])
        rows.append(passes[np.argsort(slots, kind="stable")])
    return Schedule(rows, two_way(ranks), "chimera")


def hanayo(ranks: int, microbatches: int, virtual_stages: int = 2) -> Schedule:
    """Waves: every microbatch goes down the ranks and up again, virtual_stages / 2 times over, so that two directions
    share one copy of the weights. Liu et al., SC'23.

    In each slot, a rank takes a backward if one is ready, and otherwise the ready forward of its deepest stage. It
    holds at most p microbatches.

    0F0 0F1 ... 3F0 3B0 3F1 3B1 0B0 ... 0B1
    ... 1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1 ...
    """
    ranks, microbatches, virtual_stages = counts(ranks=ranks, microbatches=microbatches, virtual_stages=virtual_stages)
    if virtual_stages % 2:
        raise ScheduleError(
            f"hanayo has {virtual_stages} stages per rank and needs an even number, since a wave goes down and up; "
            f"take {virtual_stages + 1}"
        )
    slot = [1.0] * (ranks * virtual_stages)
    placement = wave(ranks, virtual_stages)
    rows = list_schedule(
        placement, microbatches, Durations(slot, slot, slot), [ranks * virtual_stages] * ranks, split=False
    )
    return Schedule(rows, placement, "hanayo")
