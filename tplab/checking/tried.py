"""What is tried on a collective: if another result of it makes the output right, the collective is at fault."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Reduction(NamedTuple):
    """An all_reduce where the program calls it: as text, the axis as text, and the line.

    op    how it combines what the ranks hold: "sum", "mean", "max" or "min"
    """

    op: str
    axis: str
    line: str

    def __str__(self) -> str:
        call = f"all_reduce(x, {self.axis!r}{'' if self.op == 'sum' else f', {self.op!r}'})"
        return f"{call} in {self.line}"


MOST_TRIALS = 8

LEFT_OUT, UNDIVIDED, SUMMED = "left out", "undivided", "summed"
"""What is tried: the input in place of the result, where all ranks hold the same; the result times the number of ranks;
a sum in place of a mean, a maximum or a minimum."""

_WORDS = {
    LEFT_OUT: "it is right without {}, which adds up what is the same on every rank",
    UNDIVIDED: "it is right if what {} returns is not divided by the number of ranks",
    SUMMED: "it is right with a sum in place of {}",
}


def trials(found: Sequence[Reduction]) -> list[tuple[Reduction, str]]:
    """What to try on the reductions that a program calls, the first ones first."""
    kinds = {"sum": (LEFT_OUT, UNDIVIDED)}
    return [(one, how) for one in dict.fromkeys(found) for how in kinds.get(one.op, (SUMMED,))][:MOST_TRIALS]


def words_of(makes_right: Mapping[Reduction, str]) -> str:
    """What to say about the reductions that make the output right if their result is another one."""
    return "; ".join(_WORDS[how].format(one) for one, how in list(makes_right.items())[:2])
