"""A trace in the Chrome trace-event format, for ui.perfetto.dev and chrome://tracing.

Each rank becomes a process, with a track for each of these kinds that occurs:

    compute       what the rank computes, and where it waits
    send          messages that it sends; an arrow leads from each to its receive
    receive       messages that it receives
    collective    collectives that run as one event

Slices of one track must not overlap, so an event that overlaps another of its kind goes to a second track ("send 2").
Times are microseconds from the start of the trace, rounded to nanoseconds; if a trace counts steps, one step is one
microsecond. Format: "Trace Event Format", Google 2016; and Perfetto, "Visualizing external trace formats".
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tplab.trace.event import Event
from tplab.trace.trace import Trace

_TRACKS = {"compute": "compute", "wait": "compute", "send": "send", "receive": "receive", "collective": "collective"}
_ORDER = ("compute", "send", "receive", "collective")


def to_perfetto(trace: Trace, path: str | Path) -> Path:
    """Write Chrome trace JSON, which ui.perfetto.dev and chrome://tracing open. Returns the path."""
    path = Path(path)
    path.write_text(json.dumps(chrome_trace(trace)), encoding="utf8")
    return path


def chrome_trace(trace: Trace) -> dict[str, Any]:
    """The trace as the object that the JSON file contains."""
    starts, ends = _nanoseconds(trace, "start"), _nanoseconds(trace, "end")
    events = list(trace.events)
    tracks = _tracks(events, starts, ends)
    thread_of = {track: trace.mesh.size + 1 + place for place, track in enumerate(sorted(set(tracks.values())))}
    sends, receives = _by_message(events, "send"), _by_message(events, "receive")

    # An arrow binds to the slice that is open at its time, and must begin before it ends: hence the keys.
    keyed: list[tuple[tuple[int, int, int, int], dict[str, Any]]] = []
    for row, event in enumerate(events):
        place = {"pid": event.rank, "tid": thread_of[tracks[row]]}
        slice_ = {"name": _name(event), "cat": event.kind, "ph": "X", "ts": starts[row] / 1000, **place}
        slice_ |= {"dur": (ends[row] - starts[row]) / 1000, "args": _args(event)}
        arrow = {"name": "message", "cat": "message", "id": event.message, **place}
        is_receive = int(event.kind == "receive")
        keyed.append(((starts[row], is_receive, row, 0), slice_))
        if sends.get(event.message) == row and event.message in receives:
            keyed.append(((starts[row], 0, row, 1), {"ph": "s", "ts": starts[row] / 1000, **arrow}))
        elif receives.get(event.message) == row and event.message in sends:
            # In a measured trace, a rank may begin to receive before the other rank sends.
            time = min(max(starts[row], starts[sends[event.message]]), ends[row])
            keyed.append(((time, 1, row, 1), {"ph": "f", "bp": "e", "ts": time / 1000, **arrow}))
    keyed.sort(key=lambda item: item[0])
    return {
        "traceEvents": _names(trace, thread_of) + [made for _, made in keyed],
        "displayTimeUnit": "ns",
        "otherData": _about(trace),
    }


def _by_message(events: list[Event], kind: str) -> dict[int, int]:
    """Message -> index of the event of this kind that carries it."""
    return {event.message: row for row, event in enumerate(events) if event.kind == kind and event.message >= 0}


_Track = tuple[int, int, int]
"""(rank, index in _ORDER, which of several)"""


def _tracks(events: list[Event], starts: list[int], ends: list[int]) -> dict[int, _Track]:
    """The track of each event, by index: the first of its kind that is free when the event starts.

    A slice of zero length keeps its track for one nanosecond, since an arrow could not tell two at the same time apart.
    """
    free: dict[tuple[int, int], list[int]] = {}
    tracks = {}
    for row, event in enumerate(events):
        order = _ORDER.index(_TRACKS[event.kind])
        until = free.setdefault((event.rank, order), [])
        number = next((number for number, end in enumerate(until) if end <= starts[row]), len(until))
        until[number : number + 1] = [max(ends[row], starts[row] + 1)]
        tracks[row] = (event.rank, order, number)
    return tracks


def _names(trace: Trace, thread_of: dict[_Track, int]) -> list[dict[str, Any]]:
    """The names of the ranks and their tracks, and the order in which they are shown."""
    named = []
    for rank in trace.mesh.ranks:
        named += _name_and_place("process", {"pid": rank}, _rank_name(trace, rank), rank)
    for (rank, order, number), thread in thread_of.items():
        name = _ORDER[order] + (f" {number + 1}" if number else "")
        named += _name_and_place("thread", {"pid": rank, "tid": thread}, name, thread)
    return named


def _name_and_place(what: str, ids: dict[str, int], name: str, place: int) -> list[dict[str, Any]]:
    return [
        {"name": f"{what}_name", "ph": "M", **ids, "args": {"name": name}},
        {"name": f"{what}_sort_index", "ph": "M", **ids, "args": {"sort_index": place}},
    ]


def _rank_name(trace: Trace, rank: int) -> str:
    if len(trace.mesh.axis_names) == 1:
        return f"rank {rank}"
    return f"rank {rank} ({', '.join(f'{axis} {place}' for axis, place in trace.mesh.coordinates(rank).items())})"


def _name(event: Event) -> str:
    return f"wait for {event.op}" if event.kind == "wait" else event.op


def _args(event: Event) -> dict[str, Any]:
    """The known fields, which a click on the slice shows."""
    shown: dict[str, Any] = {"bytes": event.bytes} if event.kind != "wait" else {}
    if event.dtype:
        shown |= {"shape": str(list(event.shape)), "dtype": event.dtype}
    if event.flops:
        shown["flops"] = event.flops
    if event.axis is not None:
        shown |= {"axis": event.axis, "group": str(list(event.group))}
    if event.peer is not None:
        shown["peer"] = event.peer
    shown |= {name: number for name in ("message", "step", "chunk") if (number := getattr(event, name)) >= 0}
    if event.contributors:
        shown["contributors"] = str(list(event.contributors))
    shown |= {name: text for name in ("reduction", "phase", "types", "where") if (text := getattr(event, name))}
    return shown


def _about(trace: Trace) -> dict[str, str]:
    about = {"title": trace.title, "framework": trace.framework, "mesh": repr(trace.mesh), "clock": trace.clock}
    about["time"] = "1 step is shown as 1 us" if trace.unit == "steps" else f"{trace.clock} seconds"
    return about | ({"cluster": trace.place} if trace.cluster else {})


def _nanoseconds(trace: Trace, name: str) -> list[int]:
    """Times since the start of the trace; a step is 1,000 ns."""
    scale = 1e3 if trace.unit == "steps" else 1e9
    return np.rint((trace.column(name) - trace.start) * scale).astype(np.int64).tolist()
