"""torch.profiler on simulated ranks: each rank's own profile.

torch's profiler exists once per process, and two ranks that use it at once crash the process. But its older recorder
of events is a thread's own. So on ranks, `torch.profiler` and `torch.autograd.profiler` get their events from that one,
and everything that they make of them (tables, averages, schedules, stacks) is torch's code as it is.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Sequence
from functools import wraps
from threading import get_ident
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler

from tplab.torch.distributed.asked import Method, methods_of, several
from tplab.torch.distributed.blocking import taking_turns
from tplab.torch.distributed.events import USER_SCOPE, Event, events_of
from tplab.torch.distributed.group import AnyMessage, Group
from tplab.torch.distributed.identity import number_of
from tplab.torch.distributed.work import Several, Started
from tplab.torch.private import Recorder


class Results:
    """One rank's profile, in place of torch's own object for what was recorded."""

    def __init__(self, events: Sequence[Event], start_ns: int, metadata: dict[str, Any], rank: int, number: int):
        self._events, self._start_ns, self._metadata = events, start_ns, metadata
        self._rank, self._number = rank, number

    def events(self) -> Sequence[Event]:
        return self._events

    def trace_start_ns(self) -> int:
        return self._start_ns

    def save(self, path: str) -> None:
        """Write what chrome://tracing and ui.perfetto.dev show; all ranks have the same clock."""
        base = self._start_ns - self._start_ns % 10**15
        rows = dict(enumerate(dict.fromkeys(_row(event) for event in self._events)))
        numbers = {row: number for number, row in rows.items()}
        labels = [("process_name", 0, f"rank {self._rank}"), *(("thread_name", n, row) for n, row in rows.items())]
        named = [{"ph": "M", "name": n, "pid": self._number, "tid": t, "args": {"name": x}} for n, t, x in labels]
        shown = [
            {
                "ph": "X", "cat": "user_annotation" if event.values["is_user_annotation"] else "cpu_op",
                "name": event.values["name"], "pid": self._number, "tid": numbers[_row(event)],
                "ts": (event.values["start_ns"] - base) / 1000, "dur": event.duration_ns() / 1000, "args": _args(event),
            }
            for event in self._events if event.values["name"] != profiler.MEMORY_EVENT_NAME
        ]  # fmt: skip
        about = {"schemaVersion": 1, "deviceProperties": [], **self._metadata, "host_name": socket.gethostname()}
        about |= {"displayTimeUnit": "ms", "baseTimeNanoseconds": base, "traceName": str(path)}
        with open(path, "w", encoding="utf8") as file:
            json.dump({**about, "traceEvents": [*named, *shown]}, file)

    def experimental_event_tree(self) -> Any:
        raise NotImplementedError(
            "torch.profiler on simulated ranks keeps no tree of allocations and Python functions, which "
            "export_memory_timeline reads; use key_averages(), events() or export_chrome_trace(), or run one rank alone"
        )

    trace_activities = experimental_event_tree


class _Recording:
    """What one thread of a rank records now.

    notes     the collectives that it has called
    is_inside whether it is in the call of one, which may be made of several
    silences  when tplab worked on them: its operations are not the program's
    metadata  what the program adds to the profile
    """

    def __init__(self, rank: int, number: int):
        self.rank, self.number = rank, number
        self.notes: list[Event] = []
        self.is_inside = False
        self.silences: list[tuple[int, int]] = []
        self.metadata: dict[str, Any] = {}

    def noting(self, note: Event, method: Callable[..., Any]) -> Callable[..., Any]:
        """The method, until whose return a collective lasts."""

        def noted(*args: Any, **kwargs: Any) -> Any:
            start = time.time_ns()
            before, self.is_inside = self.is_inside, True
            try:
                return method(*args, **kwargs)
            finally:
                self.is_inside = before
                note.values["end_ns"] = time.time_ns()
                self.silences.append((start, note.values["end_ns"]))

        return noted


class Profiling:
    """torch's profiler as simulated ranks need it, for the time of a run: what is to be replaced, and by what."""

    def __init__(self) -> None:
        self._recordings: dict[int, _Recording] = {}
        self._methods: dict[str, Any] = {}
        kind = profiler.profile
        self._prepare, self._start = kind._prepare_trace, kind._start_trace
        self._disable, self._stopped = profiler._disable_profiler, profiler._run_on_profiler_stop
        self._add_metadata: Any = torch.autograd._add_metadata_json  # type: ignore[attr-defined]
        self.attributes: list[tuple[Any, str, Any]] = [
            (kind, "_prepare_trace", lambda profile: self._prepared(profile)),
            (kind, "_start_trace", lambda profile: self._started(profile)),
            (profiler, "_disable_profiler", self._ended),
            (profiler, "_run_on_profiler_stop", self._has_stopped),
            (torch.autograd, "_add_metadata_json", self._noted),
        ]

    def _prepared(self, profile: Any) -> None:
        if _is_one_of_several():
            profile.entered = True
            profile.config(create_trace_id=True)
        else:
            self._prepare(profile)

    def _started(self, profile: Any) -> None:
        if not _is_one_of_several():
            return self._start(profile)
        rank = taking_turns()
        assert rank is not None
        profile.entered = True
        Recorder.start(profile)
        profiler._run_on_profiler_start()
        self._recordings[get_ident()] = _Recording(rank.rank, number_of(rank))
        if len(self._recordings) == 1:
            self._watch()
        profile.profiling_start_time_ns = time.perf_counter_ns()
        return None

    def _ended(self) -> Any:
        recording = self._recordings.pop(get_ident(), None)
        if recording is None:
            return self._disable()
        if not self._recordings:
            self._watch_no_more()
        began, *events = events_of(Recorder.stop(), recording.silences)
        thread, start_ns = began.values["start_thread_id"], began.values["start_ns"]
        for note in recording.notes:
            note.values["start_thread_id"] = note.values["end_thread_id"] = thread
        return Results([*events, *recording.notes], start_ns, recording.metadata, recording.rank, recording.number)

    def _has_stopped(self) -> None:
        """torch's own sign that someone profiles stays up as long as a rank does."""
        if not self._recordings:
            self._stopped()

    def _noted(self, key: str, value: str) -> None:
        recording = self._recordings.get(get_ident())
        if recording is None:
            self._add_metadata(key, value)
        else:
            recording.metadata[key] = json.loads(value)

    # --- collectives ---------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """From now on, every call of a process group is noted if its thread records."""
        for name, (method, about) in methods_of(Group).items():
            if about.title:
                self._methods[name] = method
                setattr(Group, name, self._noting(about, method))

    def _watch_no_more(self) -> None:
        for name, method in self._methods.items():
            setattr(Group, name, method)

    def _noting(self, about: Method, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def noted(group: Group, *args: Any, **kwargs: Any) -> Any:
            recording = self._recordings.get(get_ident())
            if recording is None or recording.is_inside:
                return method(group, *args, **kwargs)
            now = time.time_ns()
            note = Event(
                f"{group.backend}:{about.title}", 0, now, now, is_async=True, scope=USER_SCOPE, is_user_annotation=True,
                shapes=_shapes(args[about.inputs]) if about.inputs < len(args) else [],
            )  # fmt: skip
            recording.notes.append(note)
            work = recording.noting(note, method)(group, *args, **kwargs)
            last = work.last if isinstance(work, Several) else work
            if isinstance(last, AnyMessage):
                last.wait = recording.noting(note, last.wait)
            elif isinstance(last, Started) and not last.is_done:
                last._finish, last.get_future = (
                    recording.noting(note, method) for method in (last._finish, last.get_future)
                )
            return work

        return noted


def _is_one_of_several() -> bool:
    rank = taking_turns()
    return rank is not None and rank.mesh.size > 1


def _shapes(inputs: Any) -> list[list[int]]:
    found = several(inputs)
    if found and not isinstance(found[0], Tensor):
        found = found[0]
    return [list(x.shape) for x in found]


def _row(event: Event) -> str:
    """The row of an event in a picture."""
    return "collectives" if event.values["is_async"] else f"thread {event.values['start_thread_id']}"


def _args(event: Event) -> dict[str, Any]:
    """What a click on an event shows."""
    values = event.values
    shown: dict[str, Any] = {"External id": values["correlation_id"]}
    if values["sequence_nr"] >= 0:
        shown |= {"Sequence number": values["sequence_nr"], "Fwd thread id": values["fwd_thread_id"]}
    if values["shapes"]:
        shown["Input Dims"] = list(values["shapes"])
    if values["stack"]:
        shown["Call stack"] = ";".join(reversed(values["stack"]))
    if values["flops"]:
        shown["flops"] = values["flops"]
    return shown
