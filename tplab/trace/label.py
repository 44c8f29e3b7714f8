"""A label: whose data a tensor holds, as far as one rank knows, and how collectives combine it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tplab.comm import ROWS, Row


class Label(NamedTuple):
    """The origin of a tensor's data.

    chunk          the number of the chunk that it is, or was computed from; -1: it is none that travelled in messages
    contributors   the ranks whose data is in it; (): unknown
    part           (index, count) where collectives have left this rank with one of `count` equal parts; (): the whole
    """

    chunk: int
    contributors: tuple[int, ...]
    part: tuple[int, ...] = ()


UNKNOWN = Label(-1, ())


def of_all(op: str, given: Sequence[Label], root: int = 0) -> list[Label]:
    """The label of what each position gets from a collective, from the labels of all inputs.

    op     the collective, by tplab's name
    root   the position that has something special, as in a broadcast
    """
    row, count = ROWS[op], len(given)
    if not row.takes:
        return [UNKNOWN] * count
    if row.takes == "root":
        source = given[root]
        parts = [(index, count) for index in range(count)] if row.gives == "pieces" else [source.part] * count
        return [Label(-1, source.contributors, part if source.contributors else ()) for part in parts]
    made = [UNKNOWN] * count
    if all(label.contributors for label in given):
        members = given[0].contributors
        if any(label.contributors != members for label in given):
            members = tuple(sorted({rank for label in given for rank in label.contributors}))
        made = [Label(-1, members, part) for part in _parts(row, [label.part for label in given])]
    if row.gives == "root":
        return [made[root] if index == root else Label(-1, label.contributors) for index, label in enumerate(given)]
    return made


def _parts(row: Row, parts: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Which part of the whole a collective leaves at each position, where its inputs are these parts."""
    count, alike = len(parts), all(part == parts[0] for part in parts)
    first, number = parts[0] or (0, 0)
    if row.gathers:
        in_order = parts == [(first + place, number) for place in range(count)]
        is_part = in_order and not first % count and number != count
        return [(first // count, number // count) if is_part else ()] * count
    if not alike:
        return [()] * count
    if row.gives == "pieces":
        return [(first * count + index, (number or 1) * count) for index in range(count)]
    return [parts[0]] * count
