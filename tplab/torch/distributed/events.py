"""What a thread of a rank has recorded, by the names under which torch's profiler asks for it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch.autograd import profiler

from tplab.torch.private import DispatchMode, KinetoEvent, dispatch_modes

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


class Event:
    """What happened, by the names under which torch asks for it: each value is a method."""

    def __init__(self, name: str, thread: int, start_ns: int, end_ns: int, **values: Any):
        self.values: dict[str, Any] = {**_NOTHING, **values, "name": name, "start_ns": start_ns, "end_ns": end_ns}
        self.values["start_thread_id"] = self.values["end_thread_id"] = thread

    def __getattr__(self, name: str) -> Callable[[], Any]:
        if name not in self.values and not hasattr(KinetoEvent, name):
            raise AttributeError(name)
        value = self.values.get(name)  # None: a later torch asks for what was not recorded
        return lambda: value

    def duration_ns(self) -> int:
        return self.values["end_ns"] - self.values["start_ns"]


def events_of(records: Iterable[Any], silences: Sequence[tuple[int, int]]) -> list[Event]:
    """What a thread has recorded, in the order of the beginnings, the recording itself first. What began during
    `silences`, or has not ended, is left out.

    torch rounds times to 256 ns, so several records may have the same. Here each is at least 1 ns after the one before:
    otherwise torch would take an operation for a part of its neighbour, and drop it if both have one name.
    """
    found: list[Event] = []
    began: dict[int, Event] = {}
    silent: list[tuple[int, int]] = []
    for start, end in sorted(silences):  # some are inside others
        if not silent or start > silent[-1][1]:
            silent.append((start, end))
        else:
            silent[-1] = silent[-1][0], max(silent[-1][1], end)
    at, num_modes = 0, sum(isinstance(mode, DispatchMode) for mode in dispatch_modes())
    parents: dict[int, Event | None] = {}
    inside: list[Event] = []  # those that have begun and not ended, the innermost last
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
            found.append(Event(profiler.MEMORY_EVENT_NAME, record.thread_id(), at, at, nbytes=num_bytes))
        elif not found:
            found.append(Event("", record.thread_id(), at, at))
    left_out = {*map(id, began.values()), *(_of_modes(found, parents, num_modes) if num_modes else ())}
    return [event for event in found if id(event) not in left_out]


def _of_modes(events: Sequence[Event], parents: Mapping[int, Event | None], num_modes: int) -> Iterator[int]:
    """The identities of what is there only because tplab's own dispatch modes, `num_modes` of them, count memory.

    An operation reaches each mode in an event of its own, in which it is called again: mm, the mode, mm. It reaches
    tplab's modes, the outermost, last. Besides, where autograd keeps a result, torch asks the modes for a copy of it
    that is detached.
    """
    again: dict[int, Event] = {}  # a mode's event -> the operation in it
    modes_in: dict[int, Event] = {}  # an operation -> the mode's event in it
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
    below: dict[int, bool] = {}  # whether an event is inside the last of the modes
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


def _event(record: Any, at: int) -> Event:
    scope = record.scope()
    return Event(
        record.name(), record.thread_id(), at, at, correlation_id=record.handle(), shapes=record.shapes(),
        stack=record.stack(), scope=scope, sequence_nr=record.sequence_nr(), fwd_thread_id=record.fwd_thread_id(),
        flops=record.flops(), is_async=record.is_async(), is_user_annotation=scope == USER_SCOPE,
    )  # fmt: skip
