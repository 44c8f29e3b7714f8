"""A rank's row while a rule builds it: an int array [actions, 4] of kind, stage, microbatch, joined."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from tplab.schedules.action import CODE, B, F, I, W

Row: TypeAlias = np.ndarray


def forwards(stage: ArrayLike, microbatch: ArrayLike) -> Row:
    """F of each microbatch, in order. `stage` and `microbatch` are numbers or sequences that broadcast."""
    return row(F, stage, microbatch)


def backwards(stage: ArrayLike, microbatch: ArrayLike) -> Row:
    """B of each microbatch, in order."""
    return row(B, stage, microbatch)


def input_grads(stage: ArrayLike, microbatch: ArrayLike) -> Row:
    """I of each microbatch, in order."""
    return row(I, stage, microbatch)


def weight_grads(stage: ArrayLike, microbatch: ArrayLike) -> Row:
    """W of each microbatch, in order."""
    return row(W, stage, microbatch)


def row(kind: ArrayLike, stage: ArrayLike, microbatch: ArrayLike, joined: ArrayLike = 0) -> Row:
    """The actions of these columns; numbers are repeated to the length of the others."""
    columns = kind, stage, microbatch, joined
    found = np.empty((max(map(np.size, columns)), 4), np.int32)
    for place, column in enumerate(columns):
        found[:, place] = column
    return found


def chain(*parts: Row) -> Row:
    """One after the other."""
    return np.concatenate([part.reshape(-1, 4) for part in parts])


def riffle(first: Row, second: Row, lead: int) -> Row:
    """`lead` actions of the first row, then one of each row in turn, then what is left.

    riffle(F0 F1 F2 F3, B0 B1 B2 B3, lead=1)  ->  F0  F1 B0 F2 B1 F3 B2  B3
    """
    lead = min(lead, len(first))
    pairs = min(len(first) - lead, len(second))
    shuffled = np.stack([first[lead : lead + pairs], second[:pairs]], axis=1).reshape(-1, 4)
    return chain(first[:lead], shuffled, first[lead + pairs :], second[pairs:])


def overlap(first: Row, second: Row) -> Row:
    """Each action of the first row overlapped with the action of the second row at the same index."""
    second = second.copy()
    second[:, 3] = 1
    return riffle(first, second, lead=0)


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
