"""A label: whose data a tensor holds, as far as one rank knows, and how collectives combine it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tplab.comm import ROWS, Row


class Label(NamedTuple):
    """Where a tensor's data comes from.

    chunk          the number of the chunk that it is, or was computed from; -1: it is none that travelled in messages
    contributors   the ranks whose data is in it; (): unknown
    part           (index, count) where collectives have left this rank with one of `count` equal parts; (): the whole
    """

    chunk: int
    contributors: tuple[int, ...]
    part: tuple[int, ...] = ()


UNKNOWN = Label(-1, ())


def of_collective(op: str, given: Sequence[Label], index: int, root: int = 0) -> Label:
    """The label of what the rank at position `index` gets from a collective, from the labels of all inputs.

    op     the collective, by tplab's name
    root   the position that has something special, as in a broadcast
    """
    row = ROWS[op]
    if not row.takes:
        return UNKNOWN
    if row.takes == "root":
        source = given[root]
        part = (index, len(given)) if row.gives == "pieces" else source.part
        return Label(-1, source.contributors, part if source.contributors else ())
    if row.gives == "root" and index != root:
        return Label(-1, given[index].contributors)
    if not all(label.contributors for label in given):
        return UNKNOWN
    members = given[0].contributors
    if any(label.contributors != members for label in given):
        members = tuple(sorted({rank for label in given for rank in label.contributors}))
    return Label(-1, members, _part(row, [label.part for label in given], index))


def _part(row: Row, parts: Sequence[tuple[int, ...]], index: int) -> tuple[int, ...]:
    """Which part of the whole a collective leaves at position `index`, where its inputs are these parts."""
    count, alike = len(parts), all(part == parts[0] for part in parts)
    if row.gathers:
        number = parts[0][1] if parts[0] else 0
        first = parts[0][0] if parts[0] else 0
        in_order = parts == [(first + place, number) for place in range(count)]
        if not in_order or first % count or number == count:
            return ()
        return first // count, number // count
    if not alike:
        return ()
    if row.gives == "pieces":
        first, number = parts[0] or (0, 1)
        return first * count + index, number * count
    return parts[0]
