"""The critical path: the chain of events that decides how long a program takes.

Going backwards from the event that ends last, each event is traced to what held it up. The modelled clock has noted that
(`Event.after`), so that every second of a modelled trace is explained: each event of the chain starts when the one before
it ends, or when its link is free again, a latency before the message arrives.

Real processes note no such thing, and it has to be guessed from when things happened:

    compute, send   what ended last on its own rank before it
    receive         its send, if that ended later than what the rank itself did before
    collective      what held up the member of the group that arrived last

Such a chain has gaps, where a rank did something that was not recorded.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict

import numpy as np

from tplab.trace.event import Event
from tplab.trace.trace import Trace

_PREFERRED = ("wait", "send", "receive", "collective", "compute")
"""Of events that end together, the last of these explains most. A wait only shows that something else was late."""


def critical_path(trace: Trace) -> list[Event]:
    """The events that set the makespan, first to last. n events take O(n log n)."""
    if not len(trace):
        return []
    after = trace.column("after")
    if not (after >= 0).any():
        return _guessed(trace)
    table, codes = trace.codes("kind")
    likely = np.array([kind != "receive" and _PREFERRED.index(kind) for kind in table], np.int8)[codes]
    row, path, seen = int(np.lexsort((likely, trace.column("end")))[-1]), list[int](), set[int]()
    while row >= 0 and row not in seen:  # a trace that was made by hand may go round in circles
        seen.add(row)
        path.append(row)
        row = int(after[row])
    return trace.events_at(np.array(path[::-1]))


def _guessed(trace: Trace) -> list[Event]:
    """The path of a trace that does not say what held its events up."""
    table, codes = trace.codes("kind")
    kind = [table[code] for code in codes.tolist()]
    rank, start, end, message = (trace.column(name).tolist() for name in ("rank", "start", "end", "message"))
    on_rank: dict[int, list[tuple[float, int, int]]] = defaultdict(list)
    sends: dict[int, int] = {}
    groups: dict[int, list[int]] = defaultdict(list)
    for row, what in enumerate(kind):
        on_rank[rank[row]].append((end[row], _PREFERRED.index(what), row))
        if what == "send":
            sends[message[row]] = row
        elif what == "collective" and message[row] >= 0:
            groups[message[row]].append(row)
    for events in on_rank.values():
        events.sort()
    path, seen = list[int](), {-1}

    def before(row: int) -> int:
        """What ended last on the rank before this event, or -1. Of events at one moment, what was recorded first."""
        events = on_rank[rank[row]]
        place = bisect_left(events, (start[row], len(_PREFERRED) - 1, row)) - 1
        while place >= 0 and (events[place][2] in seen or (events[place][0], events[place][2]) >= (start[row], row)):
            place -= 1
        return events[place][2] if place >= 0 else -1

    def since(row: int) -> tuple[float, float]:
        """Since when a member of a collective is there."""
        return start[row], end[cause] if (cause := before(row)) >= 0 else 0.0

    row = max(events[-1] for events in on_rank.values())[2]
    while row not in seen:
        send = sends.get(message[row], -1) if kind[row] == "receive" and message[row] >= 0 else -1
        if send >= 0 and send not in seen and end[send] == end[row]:
            row = send  # the message was on its way as long
        path.append(row)
        seen.add(row)
        came = [member for member in groups[message[row]] if start[member] <= end[row]] if kind[row] == "collective" else []
        cause = before(max(came, key=since) if came else row)
        if 0 <= send != row and end[send] <= end[row] and (cause < 0 or end[send] >= end[cause]):
            cause = send
        row = cause
    return trace.events_at(np.array(path[::-1]))
