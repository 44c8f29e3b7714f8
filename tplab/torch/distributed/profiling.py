"""torch.profiler on simulated ranks: each rank's own profile.

torch's profiler exists once per process, and two ranks that use it at once crash the process. But its older event
recorder belongs to a thread. So on ranks, `torch.profiler` and `torch.autograd.profiler` get their events from that
recorder, and everything built on them (tables, averages, schedules, stacks) is torch's own code.
"""

from __future__ import annotations

import json
import socket
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from operator import itemgetter
from threading import get_ident
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler

from tplab.torch.distributed.asked import Method, methods_of, several
from tplab.torch.distributed.group import Group
from tplab.torch.distributed.identity import number_of
from tplab.torch.distributed.replaced import Replaced, Value, on_ranks
from tplab.torch.distributed.work import Several, Started
from tplab.torch.private import DispatchMode, KinetoEvent, ThreadProfiler, dispatch_modes
from tplab.torch.ranks.simulated import SimulatedRank


class Results:
    """One rank's profile, in the form of torch's own object for what was recorded."""

    def __init__(self, events: Sequence[Profiled], start_ns: int, metadata: dict[str, Any], rank: int, number: int):
        self._events, self._start_ns, self._metadata = events, start_ns, metadata
        self._rank, self._number = rank, number

    def events(self) -> Sequence[Profiled]:
        return self._events

    def trace_start_ns(self) -> int:
        return self._start_ns

    def save(self, path: str) -> None:
        """Write a file for chrome://tracing and ui.perfetto.dev; all ranks have the same clock."""
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
    """What one thread of a rank is recording.

    notes     the collectives that it has called
    is_inside whether it is inside the call of a collective, which may consist of several
    silences  when tplab worked on collectives: those operations are not the program's
    metadata  what the program adds to the profile
    """

    def __init__(self, rank: int, number: int):
        self.rank, self.number = rank, number
        self.notes: list[Profiled] = []
        self.is_inside = False
        self.silences: list[tuple[int, int]] = []
        self.metadata: dict[str, Any] = {}

    def noting(self, note: Profiled, method: Callable[..., Any]) -> Callable[..., Any]:
        """The method; the collective of `note` lasts until it returns."""

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
    """torch's profiler as simulated ranks need it, for the duration of a run: the replacements."""

    def __init__(self) -> None:
        self._recordings: dict[int, _Recording] = {}
        self._watched = Replaced()
        kind = profiler.profile
        self._stopped = profiler._run_on_profiler_stop
        self.attributes: list[Value] = [
            on_ranks(kind, "_prepare_trace")(self._prepared),
            on_ranks(kind, "_start_trace")(self._started),
            on_ranks(profiler, "_disable_profiler")(self._ended),
            (profiler, "_run_on_profiler_stop", self._has_stopped),
            on_ranks(torch.autograd, "_add_metadata_json")(self._noted),
        ]

    def _prepared(self, rank: SimulatedRank, own: Any, profile: Any) -> None:
        if rank.mesh.size == 1:
            own(profile)
        else:
            profile.entered = True
            profile.config(create_trace_id=True)

    def _started(self, rank: SimulatedRank, own: Any, profile: Any) -> None:
        if rank.mesh.size == 1:
            own(profile)
            return
        profile.entered = True
        ThreadProfiler.start(profile)
        profiler._run_on_profiler_start()
        self._recordings[get_ident()] = _Recording(rank.rank, number_of(rank))
        if len(self._recordings) == 1:
            self._watch()
        profile.profiling_start_time_ns = time.perf_counter_ns()

    def _ended(self, rank: SimulatedRank, own: Any) -> Any:
        recording = self._recordings.pop(get_ident(), None)
        if recording is None:
            return own()
        if not self._recordings:
            self._watched.take_back()
        began, *events = events_of(ThreadProfiler.stop(), recording.silences)
        thread, start_ns = began.values["start_thread_id"], began.values["start_ns"]
        for note in recording.notes:
            note.values["start_thread_id"] = note.values["end_thread_id"] = thread
        return Results([*events, *recording.notes], start_ns, recording.metadata, recording.rank, recording.number)

    def _has_stopped(self) -> None:
        """Keep torch's own sign of a running profiler while any rank profiles."""
        if not self._recordings:
            self._stopped()

    def _noted(self, rank: SimulatedRank, own: Any, key: str, value: str) -> None:
        recording = self._recordings.get(get_ident())
        if recording is None:
            own(key, value)
        else:
            recording.metadata[key] = json.loads(value)

    # --- collectives ---------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """From here on, note every call of a process group in a thread that records."""
        noted = {name: (method, about) for name, (method, about) in methods_of(Group).items() if about.title}
        self._watched = Replaced((Group, name, self._noting(about, method)) for name, (method, about) in noted.items())
        self._watched.put()

    def _noting(self, about: Method, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def noted(group: Group, *args: Any, **kwargs: Any) -> Any:
            recording = self._recordings.get(get_ident())
            if recording is None or recording.is_inside:
                return method(group, *args, **kwargs)
            now = time.time_ns()
            note = Profiled(
                f"{group.backend}:{about.title}", 0, now, now, is_async=True, scope=USER_SCOPE, is_user_annotation=True,
                shapes=_shapes(args[about.inputs]) if about.inputs < len(args) else [],
            )  # fmt: skip
            recording.notes.append(note)
            work = recording.noting(note, method)(group, *args, **kwargs)
            last = work.last if isinstance(work, Several) else work
            if isinstance(last, Started) and not last.is_done:
                last._finish, last.get_future = (
                    recording.noting(note, method) for method in (last._finish, last.get_future)
                )
            return work

        return noted


def _shapes(inputs: Any) -> list[list[int]]:
    found = several(inputs)
    if found and not isinstance(found[0], Tensor):
        found = found[0]
    return [list(x.shape) for x in found]


def _row(event: Profiled) -> str:
    """The row of an event in the picture."""
    return "collectives" if event.values["is_async"] else f"thread {event.values['start_thread_id']}"


def _args(event: Profiled) -> dict[str, Any]:
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


# --- events -----------------------------------------------------------------------------------------------------------


_NOTHING: dict[str, Any] = {
    "activity_type": "", "concrete_inputs": (), "correlation_id": 0, "cuda_elapsed_us": -1, "device_index": 0,
    "device_resource_id": 0, "device_type": torch.autograd.DeviceType.CPU, "dtypes": (), "external_id": 0,
    "extra_meta": {}, "flops": 0, "flow_id": 0, "flow_start": False, "flow_type": 0, "fwd_thread_id": 0,
    "is_async": False, "is_hidden_event": False, "is_python_function": False, "is_user_annotation": False,
    "kwinputs": {}, "linked_correlation_id": 0, "metadata_json": "", "nbytes": 0, "overload_name": "",
    "privateuse1_elapsed_us": -1, "python_id": 0, "python_module_id": -1, "python_parent_id": 0, "scope": 0,
    "sequence_nr": -1, "shapes": (), "stack": (), "structured_input_shapes": (), "structured_input_strides": (),
    "typed_metadata": {},
}  # fmt: skip
USER_SCOPE = 7


class Profiled:
    """An event with the methods by which torch reads it: one for each value."""

    def __init__(self, name: str, thread: int, start_ns: int, end_ns: int, **values: Any):
        self.values: dict[str, Any] = {**_NOTHING, **values, "name": name, "start_ns": start_ns, "end_ns": end_ns}
        self.values["start_thread_id"] = self.values["end_thread_id"] = thread

    def __getattr__(self, name: str) -> Callable[[], Any]:
        if name not in self.values and not hasattr(KinetoEvent, name):
            raise AttributeError(name)
        value = self.values.get(name)  # None: a later torch asks for a value that was not recorded
        return lambda: value

    def duration_ns(self) -> int:
        return self.values["end_ns"] - self.values["start_ns"]


def events_of(records: Iterable[Any], silences: Sequence[tuple[int, int]]) -> list[Profiled]:
    """What a thread has recorded, in the order of beginnings, the recording itself first. Leaves out what began during
    `silences`, or has not ended.

    torch rounds times to 256 ns, so several records may have the same. Here each is at least 1 ns after the one before:
    otherwise torch would take an operation for a part of its neighbour, and drop it if both have the same name.
    """
    found: list[Profiled] = []
    began: dict[int, Profiled] = {}
    silent: list[tuple[int, int]] = []
    for start, end in sorted(silences):  # some contain others
        if not silent or start > silent[-1][1]:
            silent.append((start, end))
        else:
            silent[-1] = silent[-1][0], max(silent[-1][1], end)
    at, num_modes = 0, sum(isinstance(mode, DispatchMode) for mode in dispatch_modes())
    parents: dict[int, Profiled | None] = {}
    inside: list[Profiled] = []  # begun and not ended, innermost last
    for record in records:
        kind, at = record.kind(), max(at + 1, int(record.start_us() * 1000))
        if kind == "pop":
            if (event := began.pop(record.handle(), None)) is not None:
                event.values["end_ns"] = at
                inside.remove(event)
            continue
        number = bisect_right(silent, at, key=itemgetter(0))
        if number and at < silent[number - 1][1]:
            continue
        if kind == "push":
            event = began[record.handle()] = _event(record, at)
            parents[id(event)] = inside[-1] if inside else None
            inside.append(event)
            found.append(event)
        elif kind == "memory_alloc":
            num_bytes = record.cpu_memory_usage()
            found.append(Profiled(profiler.MEMORY_EVENT_NAME, record.thread_id(), at, at, nbytes=num_bytes))
        elif not found:
            found.append(Profiled("", record.thread_id(), at, at))
    left_out = {*map(id, began.values()), *(_of_modes(found, parents, num_modes) if num_modes else ())}
    return [event for event in found if id(event) not in left_out]


def _of_modes(events: Sequence[Profiled], parents: Mapping[int, Profiled | None], num_modes: int) -> Iterator[int]:
    """The ids of the events that exist only because tplab's own dispatch modes, `num_modes` of them, count memory.

    An operation reaches each mode in an event of its own, in which it is called again: mm, the mode, mm. It reaches
    tplab's modes, the outermost, last. Besides, where autograd keeps a result, torch asks the modes for a detached
    copy.
    """
    again: dict[int, Profiled] = {}  # a mode's event -> the operation in it
    modes_in: dict[int, Profiled] = {}  # an operation -> the mode's event in it
    for event in events:
        if (parent := parents.get(id(event))) is None:
            continue
        if event.values["name"] == _MODE:
            modes_in[id(parent)] = event
        elif parent.values["name"] == _MODE:
            called = parents[id(parent)]
            if called is not None and event.values["name"] == called.values["name"]:
                again.setdefault(id(parent), event)
    copies = set[int]()
    below: dict[int, bool] = {}  # whether an event is inside the last mode
    for event in events:
        name, parent = event.values["name"], parents.get(id(event))
        below[id(event)] = parent is not None and below[id(parent)]
        if name == _MODE:
            chain, last = [event], again.get(id(event))
            while last is not None and (mode := modes_in.get(id(last))) is not None:
                chain.append(mode)
                last = again.get(id(mode))
            below[id(event)] |= len(chain) == 1
            if len(chain) <= num_modes:
                yield id(event)
                if id(event) in again:
                    yield id(again[id(event)])
        elif id(parent) in copies or (name == "aten::detach" and id(event) not in modes_in and not below[id(event)]):
            copies.add(id(event))
            yield id(event)


_MODE = "PythonDispatchMode"


def _event(record: Any, at: int) -> Profiled:
    scope = record.scope()
    return Profiled(
        record.name(), record.thread_id(), at, at, correlation_id=record.handle(), shapes=record.shapes(),
        stack=record.stack(), scope=scope, sequence_nr=record.sequence_nr(), fwd_thread_id=record.fwd_thread_id(),
        flops=record.flops(), is_async=record.is_async(), is_user_annotation=scope == USER_SCOPE,
    )  # fmt: skip
