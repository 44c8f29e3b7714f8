"""The critical path: the chain of events that decides how long a program takes.

Going backwards from the event that ends last, each event is traced to what held it up. The modelled clock records this
(`Event.after`), so every second of a modelled trace is explained: each event of the chain starts when the one before it
ends or, if it waited for a link, when the link is free, a latency before the message arrives.

In a trace of real processes, what held an event up is guessed from the times:

    compute, send   what ended last on its own rank
    receive         its send, if that ended later than what its own rank did before
    collective      what held up the member of the group that arrived last

Such a chain has gaps, where a rank did something that was not recorded.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict

import numpy as np

from tplab.trace.event import Event
from tplab.trace.trace import Trace

_LIKELY = ("wait", "send", "receive", "collective", "compute")
"""Of events that end together, the last of these kinds explains most; a wait only shows that something was late."""


def critical_path(trace: Trace) -> list[Event]:
    """The events that set the makespan, first to last. n events take O(n log n)."""
    return trace.events_at(critical_rows(trace))


def critical_rows(trace: Trace) -> np.ndarray:
    """The same, as indices into `Trace.events`."""
    after = trace.column("after")
    if not (after >= 0).any():
        return np.array(_guessed(trace)[::-1], np.intp)
    table, codes = trace.codes("kind")
    likely = np.array([kind != "receive" and _LIKELY.index(kind) for kind in table], np.int8)[codes]  # as its send is
    row, path = int(np.lexsort((likely, trace.column("end")))[-1]), dict[int, None]()
    while row >= 0 and row not in path:  # events written by hand may form a cycle
        path[row] = None
        row = int(after[row])
    return np.array([*path][::-1], np.intp)


def _guessed(trace: Trace) -> list[int]:
    """The path of a trace without `Event.after`, last to first."""
    names, kinds = trace.codes("kind")
    kind = [names[code] for code in kinds.tolist()]
    rank, start, end, message = (trace.column(name).tolist() for name in ("rank", "start", "end", "message"))
    on_rank: dict[int, list[tuple[float, int, int]]] = defaultdict(list)
    send_of: dict[int, int] = {}
    members: dict[int, list[int]] = defaultdict(list)
    for row, what in enumerate(kind):
        on_rank[rank[row]].append((end[row], _LIKELY.index(what), row))
        if what == "send":
            send_of[message[row]] = row
        elif what == "collective" and message[row] >= 0:
            members[message[row]].append(row)
    for events in on_rank.values():
        events.sort()
    path: list[int] = []
    seen = {-1}

    def before(row: int) -> int:
        """What ended last on the rank before this event, or -1. Events without duration keep the order of the trace."""
        events = on_rank[rank[row]]
        place = bisect_left(events, (start[row], len(_LIKELY) - 1, row)) - 1
        while place >= 0 and (events[place][2] in seen or events[place][2] >= row):
            place -= 1
        return events[place][2] if place >= 0 else -1

    def here_since(row: int) -> tuple[float, float]:
        cause = before(row)
        return start[row], end[cause] if cause >= 0 else 0.0

    row = max((events[-1] for events in on_rank.values()), default=(0.0, 0, -1))[2]
    while row not in seen:
        send = send_of.get(message[row], -1) if kind[row] == "receive" and message[row] >= 0 else -1
        if send not in seen and end[send] == end[row]:
            row = send  # it lasts as long as the receive
        path.append(row)
        seen.add(row)
        came = [member for member in members[message[row]] if start[member] <= end[row]]
        cause = before(max(came, key=here_since) if kind[row] == "collective" and came else row)
        if send not in seen and end[send] <= end[row] and (cause < 0 or end[send] >= end[cause]):
            cause = send
        row = cause
    return path
