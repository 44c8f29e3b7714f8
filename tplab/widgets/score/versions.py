"""A variable of which every rank has its own version, as in recursive doubling: `x = x + received`.

If ranks pass pieces on, each piece is an item. Here there is only one item: a rank merges what it receives into its own
version, and sends that version, including everything received so far.

A sum that goes around a ring as a whole is such a variable too: `total = ring_shift(total) + x`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tplab.trace.trace import Trace
from tplab.widgets.score.holds import JOINING, in_order

_SEND, _RECEIVE, _COMPUTE = 1, -1, 0


def versions(trace: Trace, columns: Mapping[str, np.ndarray], item: np.ndarray) -> dict[int, int]:
    """chunk -> the first chunk of its variable, for the chunks that are versions of one variable.

    item    the chunk of each event, or -1
    Chunks are versions of one variable if the program has one name for them (not that of a piece), they have the same
    shape, and each rank began at most one. Also, every rank either sends its whole version, and combines what it
    receives with it without any overlap, or always adds the same number of its own to what it receives. In a ring of
    pieces, by contrast, the rank adds another piece each time.
    """
    shapes = trace.codes("shape")[1]
    named: dict[str, list[int]] = {}
    for chunk in np.unique(item[item >= 0]).tolist():
        if trace.chunk_names and trace.chunk_names[chunk] and not trace.chunk_names[chunk].endswith("]"):
            named.setdefault(trace.chunk_names[chunk], []).append(chunk)
    found: dict[int, int] = {}
    for chunks in named.values():
        origins = {trace.chunks[chunk][0] for chunk in chunks}
        mine = np.isin(item, chunks)
        one_shape = len(np.unique(shapes[mine & (columns["kind"] == _SEND)])) == 1
        if len(chunks) == len(origins) > 1 and one_shape:
            its = {**columns, "item": np.where(mine, item, -1)}
            if _are_versions(trace, its) or _go_around(trace, its):
                found |= dict.fromkeys(chunks, chunks[0])
    return found


def _go_around(trace: Trace, columns: Mapping[str, np.ndarray]) -> bool:
    """Whether each rank sends its version, and computes the next one from what it receives and a constant addend. Only
    the values show that."""
    first: dict[int, np.ndarray] = {}
    came: dict[int, np.ndarray] = {}
    made: dict[int, np.ndarray] = {}  # the rank's version
    joins = False
    for row in in_order(dict(columns))[0]:
        rank, kind, values = int(columns["rank"][row]), int(columns["kind"][row]), trace.values.get(row)
        if values is None:
            return False
        if kind == _SEND:
            first.setdefault(rank, values)
            if rank in came or not np.array_equal(made.setdefault(rank, values), values):
                return False
        elif kind == _RECEIVE:
            if rank in came or rank not in first:
                return False
            came[rank] = values
        elif kind == _COMPUTE and rank in came and columns["op_name"][row] in ("add", "add_", "add_any"):
            if not np.array_equal(values, came.pop(rank) + first[rank]):
                return False
            made[rank], joins = values, True
    return joins and not came


def _are_versions(trace: Trace, columns: Mapping[str, np.ndarray]) -> bool:
    who, codes = trace.codes("contributors")
    has: dict[int, frozenset[int]] = {}
    waits: dict[int, frozenset[int]] = {}  # received but not yet combined with the rank's own
    joins = False
    for row in in_order(dict(columns))[0]:
        rank, kind, members = int(columns["rank"][row]), int(columns["kind"][row]), frozenset(who[codes[row]])
        if kind == _SEND:
            if rank in waits or has.setdefault(rank, members) != members or rank not in members:
                return False
        elif kind == _RECEIVE:
            if rank in waits or not members.isdisjoint(has.get(rank, {rank})):
                return False
            waits[rank] = members
        elif kind == _COMPUTE and rank in waits and columns["op_name"][row] in JOINING:
            if members != waits[rank] | has.get(rank, {rank}):
                return False
            has[rank], joins = members, True
            del waits[rank]
    return joins and not waits
