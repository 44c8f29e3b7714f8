"""The Perfetto export, held against the trace-event format as Perfetto reads it."""

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from tests.simulated_traces import Simulation, arbitrary_traces, simulations
from tplab import Mesh, Trace
from tplab.trace import Recorder, to_perfetto
from tplab.trace.perfetto import chrome_trace


def read(trace: Trace) -> list[dict[str, Any]]:
    """The events as a reader sees them: through JSON, which has no NaN, in the order of their times."""
    exported = json.loads(json.dumps(chrome_trace(trace), allow_nan=False))
    metadata = [event for event in exported["traceEvents"] if event["ph"] == "M"]
    timed = [event for event in exported["traceEvents"] if event["ph"] != "M"]
    # Readers sort by time and keep the order of the file; that order must do as it is.
    assert timed == sorted(timed, key=lambda event: event["ts"])
    return metadata + timed


def slices(trace: Trace) -> list[dict[str, Any]]:
    return [event for event in read(trace) if event["ph"] == "X"]


def nanoseconds(event: dict[str, Any]) -> tuple[int, int]:
    """Start and end as Perfetto has them; the times of the file must be whole nanoseconds."""
    start, duration = round(event["ts"] * 1000), round(event["dur"] * 1000)
    assert event["ts"] == start / 1000
    assert event["dur"] == duration / 1000
    return start, start + duration


def scale(trace: Trace) -> float:
    return 1e3 if trace.unit == "steps" else 1e9


@given(arbitrary_traces())
def test_every_event_has_the_fields_its_kind_needs(trace: Trace):
    for event in read(trace):
        assert {"name", "ph", "pid"} <= event.keys()
        assert event["ph"] in "MXsf"
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "process_sort_index", "thread_name", "thread_sort_index")
            (value,) = event["args"].values()
            assert isinstance(value, str if event["name"].endswith("_name") else int)
            assert list(event["args"]) == ["name" if event["name"].endswith("_name") else "sort_index"]
        else:
            assert {"ts", "tid", "cat"} <= event.keys()
            assert event["ts"] >= 0
            assert event["pid"] in trace.mesh.ranks
        if event["ph"] == "X":
            assert event["dur"] >= 0
        if event["ph"] in "sf":
            assert event["id"] >= 0
            assert event["cat"] == "message"
        assert event.get("bp") == ("e" if event["ph"] == "f" else None)


@given(arbitrary_traces())
def test_a_slice_an_event(trace: Trace):
    found = {event["args"]["where"]: event for event in slices(trace)}  # there each event has its own
    assert len(found) == len(trace)
    for event in trace.events:
        slice_ = found[event.where]
        start, end = nanoseconds(slice_)
        assert start == round((event.start - trace.start) * scale(trace))
        assert end == round((event.end - trace.start) * scale(trace))
        assert (slice_["pid"], slice_["cat"]) == (event.rank, event.kind)
        assert slice_["name"] == (f"wait for {event.op}" if event.kind == "wait" else event.op)
        shown = slice_["args"]
        assert shown.get("bytes", 0) == (0 if event.kind == "wait" else event.bytes)
        assert shown.get("peer") == event.peer
        assert shown.get("axis") == event.axis
        assert shown.get("dtype", "") == event.dtype
        assert shown.get("shape") == (str(list(event.shape)) if event.dtype else None)
        assert shown.get("step", -1) == event.step


def test_times_are_rounded_so_that_what_touched_still_touches():
    recorder = Recorder(Mesh(tp=1))
    for start, end in ((0, 1.6e-9), (1.6e-9, 3.4e-9), (3.4e-9, 1e-3)):
        recorder.add(0, "compute", "x", start, end)
    assert [nanoseconds(event) for event in slices(recorder.trace())] == [(0, 2), (2, 3), (3, 1_000_000)]


@given(arbitrary_traces())
def test_slices_of_a_track_do_not_overlap(trace: Trace):
    """Perfetto puts aside what overlaps without nesting; here nothing does, and no two even start together."""
    tracks = defaultdict(list)
    for event in slices(trace):
        tracks[event["tid"]].append(event)
    for events in tracks.values():
        assert len({event["pid"] for event in events}) == 1
        times = sorted(nanoseconds(event) for event in events)
        for (start, end), (next_start, _) in pairwise(times):
            assert end <= next_start
            assert start < next_start


@given(simulations())
def test_an_arrow_leads_from_each_send_to_its_receive(simulation: Simulation):
    """As Perfetto does it: an arrow belongs to the slice that is open on its track, and starts before it ends."""
    trace = simulation.trace()
    open_slice: dict[int, dict[str, Any]] = {}
    begun: dict[tuple[int, str, str], dict[str, Any]] = {}
    arrows = []
    for event in read(trace):
        if event["ph"] == "X":
            open_slice[event["tid"]] = event
        elif event["ph"] == "s":
            begun[event["id"], event["cat"], event["name"]] = open_slice[event["tid"]]
        elif event["ph"] == "f":
            arrows.append((begun.pop((event["id"], event["cat"], event["name"])), open_slice[event["tid"]]))
    assert begun == {}
    assert len(arrows) == len(trace.select(kind="send"))
    for one, other in arrows:
        assert (one["cat"], other["cat"]) == ("send", "receive")
        assert one["args"]["message"] == other["args"]["message"]
        assert (one["args"]["peer"], other["args"]["peer"]) == (other["pid"], one["pid"])


def test_a_message_of_which_one_side_is_missing_has_no_arrow():
    simulation = Simulation(2)
    simulation.send(0, 1, 1, 0)
    for kind in ("send", "receive"):
        assert [event["ph"] for event in read(simulation.trace().select(kind=kind)) if event["ph"] != "M"] == ["X"]


def test_a_measured_receive_may_begin_before_its_send():
    recorder = Recorder(Mesh(tp=2))
    recorder.add(0, "send", "x", 5e-6, 6e-6, peer=1, message=0)
    recorder.add(1, "receive", "y", 1e-6, 7e-6, peer=0, message=0)
    trace = recorder.trace(clock="measured")
    assert len({event["name"] for event in read(trace) if event["ph"] in "sf"}) == 1  # else they would be two arrows
    arrow = {event["ph"]: event["ts"] for event in read(trace) if event["ph"] in "sf"}
    assert arrow == {"s": 4.0, "f": 4.0}


def names(trace: Trace) -> dict[str, list[str]]:
    """Process -> its threads, in the order in which they are to be shown."""
    metadata = [event for event in read(trace) if event["ph"] == "M"]
    place = {(event["name"][:-11], event.get("tid", event["pid"])): event["args"]["sort_index"]
             for event in metadata if event["name"].endswith("_sort_index")}  # fmt: skip
    processes = [event for event in metadata if event["name"] == "process_name"]
    threads = [event for event in metadata if event["name"] == "thread_name"]
    processes.sort(key=lambda event: place["process", event["pid"]])
    threads.sort(key=lambda event: place["thread", event["tid"]])
    assert len({event["tid"] for event in threads}) == len(threads)  # Perfetto knows a thread by its number alone
    assert not {event["tid"] for event in threads} & {event["pid"] for event in processes}
    return {
        process["args"]["name"]: [thread["args"]["name"] for thread in threads if thread["pid"] == process["pid"]]
        for process in processes
    }


def test_tracks_are_named_and_in_order():
    recorder = Recorder(Mesh(dp=2, tp=6))
    for rank in (11, 0):
        recorder.add(rank, "collective", "all_reduce", 0, 3, message=7)
        recorder.add(rank, "wait", "all_reduce", 1, 3)
        recorder.add(rank, "compute", "matmul", 0, 1)
    for rank, peer, message in ((0, 11, 0), (0, 11, 1), (11, 0, 2)):
        recorder.add(rank, "send", "ring_shift", message, message + 2, peer=peer, message=message)
        recorder.add(peer, "receive", "ring_shift", message, message + 2, peer=rank, message=message)
    tracks = names(recorder.trace())
    assert list(tracks) == [f"rank {rank} (dp {rank // 6}, tp {rank % 6})" for rank in range(12)]
    assert tracks.pop("rank 0 (dp 0, tp 0)") == ["compute", "send", "send 2", "receive", "collective"]
    assert tracks.pop("rank 11 (dp 1, tp 5)") == ["compute", "send", "receive", "receive 2", "collective"]
    assert set(map(tuple, tracks.values())) == {()}


def test_ranks_of_one_axis_have_plain_names():
    assert list(names(Recorder(Mesh(tp=3)).trace())) == ["rank 0", "rank 1", "rank 2"]


def test_it_says_which_clock_and_what_a_step_is():
    recorder = Recorder(Mesh(dp=2, tp=3), "ring", "torch")
    recorder.add(0, "send", "ring_shift", 2, 3, peer=1, message=0)
    about = {"title": "ring", "framework": "torch", "mesh": "Mesh(dp=2, tp=3)"}
    steps = recorder.trace(unit="steps")
    assert chrome_trace(steps)["otherData"] == about | {"clock": "modelled", "time": "1 step is shown as 1 us"}
    assert (slices(steps)[0]["ts"], slices(steps)[0]["dur"]) == (0.0, 1.0)
    seconds = recorder.trace(clock="measured", cluster="h100")
    assert chrome_trace(seconds)["otherData"] == about | {
        "clock": "measured",
        "time": "measured seconds",
        "cluster": "h100",
    }
    assert slices(seconds)[0]["dur"] == 1e6
    assert chrome_trace(seconds)["displayTimeUnit"] == "ns"


def test_the_file(tmp_path: Path):
    simulation = Simulation(2)
    simulation.send(0, 1, 1, 0)
    path = to_perfetto(simulation.trace(), str(tmp_path / "trace.json"))
    assert path == tmp_path / "trace.json"
    assert json.loads(path.read_text("utf8")) == json.loads(json.dumps(chrome_trace(simulation.trace())))


def test_a_place_that_cannot_be_written_is_an_error(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        to_perfetto(Recorder(Mesh(tp=1)).trace(), tmp_path / "missing" / "trace.json")
