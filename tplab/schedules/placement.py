"""Placements: which stages each rank holds. A placement is a tuple with one tuple of stages per rank."""

from __future__ import annotations

import math

from tplab.errors import ScheduleError
from tplab.mesh import whole_or_none

Placement = tuple[tuple[int, ...], ...]

MOST_RANKS, MOST_CELLS = 10_000, 4_000_000
"""Limits for a schedule made by a rule: ranks, and stages times microbatches. At that size it takes a gigabyte."""


def linear(ranks: int) -> Placement:
    """One stage per rank, in order.

    rank     0  1  2  3
    stages   0  1  2  3
    """
    return wrapped(ranks, 1)


def wrapped(ranks: int, virtual_stages: int) -> Placement:
    """`virtual_stages` per rank: after the last rank, the first rank takes the next stage. Narayanan et al., SC'21.

    rank     0  1  2  3
    stages   0  1  2  3
             4  5  6  7
    """
    ranks, virtual_stages = counts(ranks=ranks, virtual_stages=virtual_stages)
    return tuple(tuple(range(rank, ranks * virtual_stages, ranks)) for rank in range(ranks))


def wave(ranks: int, virtual_stages: int) -> Placement:
    """`virtual_stages` per rank, alternately down and up, so that a turn needs no message. Hanayo, SC'23.

    rank     0  1  2  3
    stages   0  1  2  3
             7  6  5  4
             8  9 10 11
    """
    ranks, virtual_stages = counts(ranks=ranks, virtual_stages=virtual_stages)
    return tuple(
        tuple(turn * ranks + (ranks - 1 - rank if turn % 2 else rank) for turn in range(virtual_stages))
        for rank in range(ranks)
    )


def v_shape(ranks: int) -> Placement:
    """Two stages per rank, placed as a V: rank r holds r and 2p-1-r. Qi et al. 2024.

    rank     0  1  2  3
    stages   0  1  2  3
             7  6  5  4
    """
    return wave(ranks, 2)


def one_way(placement: Placement, num_stages: int) -> Placement:
    """The placement along which a model is balanced: `placement`, or a line if it has two directions, each a line."""
    return placement if sum(map(len, placement)) == num_stages else linear(num_stages)


def two_way(ranks: int) -> Placement:
    """One pipe down the ranks and one up, each with its own copy of every stage. Chimera, DualPipe.

    rank     0  1  2  3
    down     0  1  2  3
    up       3  2  1  0
    """
    (ranks,) = counts(ranks=ranks)
    return tuple((rank, ranks - 1 - rank) for rank in range(ranks))


def name_of(placement: Placement) -> str:
    """ "linear", "wrapped", "V", "wave", "two directions", or "custom"."""
    ranks, held = len(placement), max(map(len, placement), default=0)
    for name, made in (
        ("linear", lambda: linear(ranks)),
        ("V", lambda: v_shape(ranks)),
        ("wrapped", lambda: wrapped(ranks, held)),
        ("wave", lambda: wave(ranks, held)),
        ("two directions", lambda: two_way(ranks)),
    ):
        if held and tuple(map(tuple, placement)) == made():
            return name
    return "custom"


def counts(**given: int) -> tuple[int, ...]:
    """The sizes as plain ints. Raises ScheduleError unless each is a whole number from 1 up, and not too large."""
    found: dict[str, int] = {}
    for name, count in given.items():
        number = whole_or_none(count)
        if number is None or number < 1:
            raise ScheduleError(f"{name} is {count!r}; it must be a whole number, 1 or more")
        found[name] = number
    total, asked = math.prod(found.values()), " x ".join(f"{number:,} {name}" for name, number in found.items())
    if found["ranks"] > MOST_RANKS:
        raise ScheduleError(f"{asked} are too many: a schedule has at most {MOST_RANKS:,} ranks; take fewer")
    if total > MOST_CELLS:
        raise ScheduleError(f"{asked} are {total:,}: a schedule has at most {MOST_CELLS:,}; take fewer")
    return tuple(found.values())
