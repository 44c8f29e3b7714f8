"""What each rank holds, and since when: inferred from what it sent, received and computed.

A trace records messages. We can infer more from them: a rank that sends a chunk had it before. A rank that passes on
more than it received has added its own part, so it had that part from the beginning. And a partial sum that was sent on
to be completed is no longer needed by the rank that sent it.

Of some variables, every rank has its own version, as in recursive doubling: `x = x + received`. If ranks pass pieces
on, each piece is an item. Here there is only one item: a rank merges what it receives into its own version, and sends
that version, including everything received so far. A sum that goes around a ring as a whole is such a variable too:
`total = ring_shift(total) + x`.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

import numpy as np

from tplab.trace.trace import Trace

OWN, HELD, PASSED, GONE, UNSURE = 1, 2, 3, 4, 5
"""States of a hold: the rank's own part; arrived or computed; sent on, to be added to elsewhere; no longer kept; made
by these ranks together from unknown data."""

_SEND, _RECEIVE, _COLLECTIVE, _COMPUTE = 1, -1, 2, 0
JOINING = {"add": "sum", "add_": "sum", "add_any": "sum", "_foreach_add_": "sum", "sub": "", "mul": "product",
           "mul_": "product", "maximum": "max", "max": "max", "minimum": "min", "min": "min"}  # fmt: skip
"""The operations by which a rank combines its own part with what arrived -> the name of the result."""


class _Book:
    """The rows of the result: which rank holds what since when, in the order in which it happened."""

    def __init__(self, contents, parts: list[int]):
        self.rows: list[tuple[float, int, int, int, int, int, int]] = []  # time, rank, item, set, state, value, part
        self.sets: dict[tuple[int, ...], int] = {}
        self.values: list[np.ndarray] = []
        self.latest: dict[tuple[int, int], frozenset[int]] = {}
        self._last: dict[tuple[int, int], int] = {}
        self._contents, self._parts = contents, parts

    def write(self, time: float, rank: int, item: int, members: frozenset[int], state: int, row: int = -1) -> None:
        value = -1
        if row in self._contents:
            value = len(self.values)
            self.values.append(self._contents[row])
        code = self.sets.setdefault(tuple(sorted(members)), len(self.sets))
        self.rows.append((time, rank, item, code, state, value, self._parts[row] if row >= 0 else 0))

    def hold(self, time: float, rank: int, item: int, members: frozenset[int], state: int, row: int = -1) -> None:
        self.write(time, rank, item, members, state, row)
        self.latest[rank, item] = members
        self._last[rank, item] = len(self.rows) - 1

    def fill(self, rank: int, item: int, row: int) -> None:
        """Fill in unknown contents of what `rank` holds from what it sends on."""
        place = self._last[rank, item]
        if self.rows[place][5] < 0 and row in self._contents:
            self.rows[place] = (*self.rows[place][:5], len(self.values), self.rows[place][6])
            self.values.append(self._contents[row])


def holdings(trace: Trace, columns: dict[str, np.ndarray], times: np.ndarray, num_items: int, versions: Set[int]):
    """(distinct sets of contributors, columns time rank item set state value part, the values) for a score's columns.

    versions    the items of which each rank has its own version
    """
    book = _Book(trace.values, trace.codes("part")[1].tolist())
    who, who_codes = trace.codes("contributors")
    groups, group_codes = trace.codes("group")
    shapes = trace.codes("shape")[1]
    rank_of, item_of, kind = (columns[name].tolist() for name in ("rank", "item", "kind"))
    rows, when = in_order(columns)
    members_of = {row: frozenset(who[who_codes[row]]) for row in rows}
    sums = _sums(rows, columns, members_of)
    first = _first_rounds(columns, times, num_items)
    came: dict[tuple[int, int], tuple[float, int, int]] = {}  # the last message: time, source, row
    own: set[tuple[int, int]] = set()

    def added(rank: int, item: int) -> None:
        """`rank` has added its own part to what arrived: so it had that part, and the sender's is passed on."""
        time, sender, row = came[rank, item]
        if item not in versions:
            book.write(time, sender, item, members_of[row], PASSED)
        if (rank, item) not in own:
            own.add((rank, item))
            book.write(float(times[first[item]]), rank, item, frozenset((rank,)), OWN)

    for row in rows:
        rank, item, members = rank_of[row], item_of[row], members_of[row]
        before = book.latest.get((rank, item))
        if kind[row] == _COLLECTIVE:
            group = frozenset(groups[group_codes[row]])
            if members == group:  # each puts in a part of its own
                book.write(float(columns["start"][row]), rank, item, frozenset((rank,)), OWN)
            book.hold(when[row], rank, item, members or group, HELD if members else UNSURE, row)
        elif kind[row] == _RECEIVE:
            came[rank, item] = when[row], int(columns["peer"][row]), row
            if before is not None and item in versions:
                continue  # it becomes part of the rank's own version
            if before is None or not before > members:
                book.hold(when[row], rank, item, members, HELD, row)
        elif before is None:
            if kind[row] == _SEND:  # the sender has had it since the round began
                own.add((rank, item))
                begin = float(times[max(int(columns["step"][row]), 0)])
                book.hold(begin, rank, item, members, OWN, row)
        elif kind[row] == _SEND or (
            item in sums
            and (rank, item) in came
            and shapes[row] == shapes[came[rank, item][2]]
            and members in (before | {rank}, before | members_of[came[rank, item][2]])
        ):
            if members > before and rank in members and (rank, item) in came:
                added(rank, item)
            if members != before:
                book.hold(when[row], rank, item, members, HELD, row)
            elif kind[row] == _SEND:
                book.fill(rank, item, row)
    table = np.array(book.rows, float).reshape(-1, 7)
    # In order of time. At the same moment, what is sent away comes first, so that what arrives then stays visible.
    table = table[np.lexsort((np.arange(len(table)), table[:, 4] != PASSED, table[:, 0]))]
    names = ("time", "rank", "item", "set", "state", "value", "part")
    holds = {name: table[:, place].astype(float if name == "time" else np.int32) for place, name in enumerate(names)}
    return list(book.sets), holds, book.values


def in_order(columns: dict[str, np.ndarray]) -> tuple[list[int], dict[int, float]]:
    """(the rows that are about an item, in order of time, the time of each). At equal times, arrivals come first, then
    computations, then sends. A receive happens when its message arrives."""
    kind, end = columns["kind"], columns["end"]
    rows = np.flatnonzero(columns["item"] >= 0)
    sent = kind == _SEND
    arrival = dict(zip(columns["message"][sent].tolist(), end[sent].tolist()))
    when = np.where(sent, columns["start"], end)[rows]
    for place in np.flatnonzero(kind[rows] == _RECEIVE).tolist():
        when[place] = arrival.get(int(columns["message"][rows[place]]), when[place])
    turn = np.select([kind[rows] == value for value in (_RECEIVE, _COMPUTE, _COLLECTIVE)], [0, 1, 2], 3)
    order = np.lexsort((turn, when))
    return rows[order].tolist(), dict(zip(rows[order].tolist(), when[order].tolist()))


def _sums(rows: list[int], columns: dict[str, np.ndarray], members_of: dict[int, frozenset[int]]) -> set[int]:
    """The items to which ranks add as they are passed on, so that an addition on a rank makes a new version of them.

    If ranks pass an item on, we compare the contributors before and after: there are more, or the same. An item that
    makes only one hop counts if the receiver adds a tensor of the same shape to it.
    """
    grown, passed, adding = set(), set(), set()
    last: dict[tuple[int, int], frozenset[int]] = {}
    ops = columns["op_name"]
    for row in rows:
        kind, item = int(columns["kind"][row]), int(columns["item"][row])
        key = int(columns["rank"][row]), item
        if kind == _RECEIVE:
            last[key] = members_of[row]
        elif kind == _SEND and key in last:
            (grown if members_of[row] > last[key] else passed).add(item)
        elif kind == _COMPUTE and key in last and ops[row] in JOINING:
            adding.add(item)
    return grown | (adding - passed)


def _first_rounds(columns: dict[str, np.ndarray], times: np.ndarray, num_items: int) -> np.ndarray:
    """The round in which each item is first sent."""
    first = np.full(num_items, len(times) - 1)
    rows = (columns["item"] >= 0) & (columns["step"] >= 0)
    np.minimum.at(first, columns["item"][rows], columns["step"][rows])
    return first


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
