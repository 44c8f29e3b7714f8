"""A trace: its columns, totals against a plain recount, JSON and back, and what it says to events that cannot be."""

import contextlib
import copy
import json
import pickle
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import example as for_example
from hypothesis import given
from hypothesis import strategies as st

from tests.simulated_traces import arbitrary, arbitrary_traces, simulate
from tplab import Event, Mesh, Trace
from tplab.errors import MeshError, TplabError, TraceError
from tplab.trace import Recorder, critical_path
from tplab.trace.event import COLUMNS, KINDS


def example(**about: Any) -> Trace:
    """Two ranks: both compute, rank 0 sends 8 bytes to rank 1, both all_reduce."""
    recorder = Recorder(Mesh(tp=2), "example", "torch")
    chunk = recorder.chunk(0, 3)
    recorder.add(0, "compute", "matmul", 1, 2, bytes=96, flops=128, shape=(4, 4), dtype="float32")
    recorder.add(1, "compute", "matmul", 1, 3, bytes=96, flops=128, shape=(4, 4), dtype="float32")
    message = {
        "axis": "tp",
        "group": (0, 1),
        "bytes": 8,
        "message": 0,
        "step": 0,
        "chunk": chunk,
        "where": "cell 3, line 4",
    }
    recorder.add(0, "send", "ring_shift", 2, 4, peer=1, contributors=(0,), values=np.array([1.0, 2.0]), **message)
    recorder.add(1, "receive", "ring_shift", 2, 4, peer=0, contributors=(0,), **message)
    recorder.add(1, "wait", "ring_shift", 3, 4, axis="tp")
    for rank in (0, 1):
        recorder.add(rank, "collective", "all_reduce", 4, 5, axis="tp", group=(0, 1), bytes=16, message=1, step=1)
    return recorder.trace(**about)


# --- reading ---------------------------------------------------------------------------------------------------------


def test_events_are_what_was_recorded():
    events = example().events
    assert len(events) == 7
    assert events[0] == Event(0, "compute", "matmul", 1, 2, bytes=96, flops=128, shape=(4, 4), dtype="float32")
    send = events[2]
    assert (send.kind, send.peer, send.group, send.chunk, send.contributors) == ("send", 1, (0, 1), 0, (0,))
    assert send.where == "cell 3, line 4"
    assert send.duration == 2.0
    assert send.values is not None
    assert send.values.tolist() == [1, 2]
    assert example().chunks == [(0, 3)]
    assert events[0].peer is None
    assert events[0].values is None
    assert [type(value) for value in (send.rank, send.start, send.bytes, send.peer)] == [int, float, int, int]


@given(arbitrary_traces())
def test_every_way_to_read_an_event_gives_the_same(trace: Trace):
    events = list(trace.events)
    assert len(events) == len(trace) == len(trace.events)
    assert [(event.start, event.rank) for event in events] == sorted((event.start, event.rank) for event in events)
    assert [trace.events[row] for row in range(len(trace))] == events == trace.events[:]
    assert trace.events[::-2] == events[::-2]
    for row, event in enumerate(events):
        assert trace.events[row - len(trace)] == event
        assert (event.values is None) == (row not in trace.values)
    for name in COLUMNS:
        if name == "values":
            continue
        column = trace.column(name)
        assert [None if name == "peer" and value == -1 else value for value in column.tolist()] == [
            getattr(event, name) for event in events
        ]
        if column.dtype == object:
            table, codes = trace.codes(name)
            assert [table[code] for code in codes] == column.tolist()


def test_events_of_one_rank_that_start_together_stay_in_order():
    recorder = Recorder(Mesh(tp=2))
    for op in "abc":
        for rank in (1, 0):
            recorder.add(rank, "compute", op, 0, 0)
    assert [(event.rank, event.op) for event in recorder.trace().events] == list(product((0, 1), "abc"))


def test_there_is_no_event_past_the_end():
    with pytest.raises(IndexError):
        example().events[7]


def test_a_trace_cannot_be_changed():
    trace = example()
    for array in (trace.column("start"), trace.codes("kind")[1], trace.values[2]):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
    with pytest.raises(TypeError):
        trace.values[0] = np.zeros(1)  # type: ignore[index]
    trace.codes("kind")[0].clear()
    trace.column("op")[0] = "changed"
    assert trace == example()


def test_what_the_program_does_to_its_arrays_later_does_not_show():
    recorder, values = Recorder(Mesh(tp=1)), np.ones(2)
    recorder.add(0, "collective", "all_reduce", 0, 1, values=values)
    trace = recorder.trace()
    values[:] = 5
    assert trace.values[0].tolist() == [1, 1]


def test_the_recorder_goes_on_after_a_trace_and_past_its_blocks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tplab.trace.recorder._BLOCK", 999)
    recorder = Recorder(Mesh(tp=3), "long")
    for row in range(10_000):
        kept = np.array([row]) if row % 1000 == 999 else None
        recorder.add(row % 3, KINDS[row % 5], f"op {row % 7}", row, row + 1, bytes=row, values=kept)
        if row == 4999:
            assert len(recorder.trace()) == 5000
    trace = recorder.trace()
    assert len(trace) == 10_000
    assert trace.column("bytes").tolist() == list(range(10_000))
    assert trace.column("op").tolist() == [f"op {row % 7}" for row in range(10_000)]
    assert {row: array.item() for row, array in trace.values.items()} == {row: row for row in range(999, 10_000, 1000)}


def test_a_message_and_a_wait_in_one_call():
    recorder = Recorder(Mesh(tp=2))
    about: dict[str, Any] = {"shape": (2,), "dtype": "float32", "step": 0, "chunk": recorder.chunk(1, 0), "where": "x"}
    for number in (0, 1):
        between: dict[str, Any] = {"peer": 0, "axis": "tp", "group": (0, 1), "bytes": 8, "contributors": (1,)}
        made = recorder.add(1, "message", "ring_shift", 2.0, 4.0, values=np.ones(2), **between, **about)
        assert made == 2 * number
        assert recorder.next_message() == 2 * number + 1
    recorder.add(0, "wait", "ring_shift", 1.0, 4.0, axis="tp", where="x")
    wait, receive, _, send, last = recorder.trace().events
    more: dict[str, Any] = {"axis": "tp", "group": (0, 1), "bytes": 8, "message": 0, "contributors": (1,), **about}
    assert receive == Event(0, "receive", "ring_shift", 2, 4, peer=1, **more)
    assert send == Event(1, "send", "ring_shift", 2, 4, peer=0, **more)
    assert wait == Event(0, "wait", "ring_shift", 1, 4, axis="tp", where="x")
    assert last.message == 2
    assert send.values is not None
    assert receive.values is not None
    assert send.values.tolist() == receive.values.tolist() == [1, 1]


def test_the_fields_of_an_event_can_be_recorded_again():
    """Also a peer that is None."""
    event = Event(1, "compute", "matmul", 2, 3, bytes=4, shape=(2,), dtype="float32", where="x", phase="backward")
    recorder = Recorder(Mesh(tp=2))
    fields = {name: getattr(event, name) for name in COLUMNS if name not in ("types", "after")}
    assert recorder.add(**fields) == -1
    assert list(recorder.trace().events) == [event]


# --- columns ---------------------------------------------------------------------------------------------------------


def test_columns_may_be_sequences_arrays_single_values_or_codes():
    trace = Trace.from_columns(
        Mesh(tp=2),
        title="columns",
        framework="jax",
        chunks=[(0, 0)],
        rank=[1, 0],
        kind=np.array(["send", "receive"]),
        op=(["ring_shift", "unused"], np.array([0, 0])),
        start=np.array([2, 1]),
        end=3,
        axis="tp",
        group=(0, 1),
        shape=((4,), (2, 2)),
        peer=[0, None],
        chunk=0,
        values={0: np.array([5])},
    )
    one, other = trace.events
    assert (one.rank, one.kind, one.op, one.start, one.end) == (0, "receive", "ring_shift", 1.0, 3.0)
    assert (one.axis, one.group, one.shape, one.peer, one.chunk) == ("tp", (0, 1), (2, 2), None, 0)
    assert (other.rank, other.kind, other.shape, other.peer) == (1, "send", (4,), 0)
    assert other.values is not None
    assert one.message == other.step == -1
    assert type(one.kind) is type(one.op) is str


def test_shapes_of_a_framework_become_tuples():
    torch = pytest.importorskip("torch")
    recorder = Recorder(Mesh(tp=1))
    recorder.add(0, "compute", "x", 0, 1, shape=torch.zeros(2, 3).shape, group=(np.int64(0),))  # type: ignore
    (event,) = recorder.trace().events
    assert type(event.shape) is tuple
    assert repr(event.shape) == "(2, 3)"
    assert repr(event.group) == "(0,)"


def test_types_that_numpy_lacks_are_kept_as_float32():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    recorder = Recorder(Mesh(tp=1))
    recorder.add(0, "collective", "all_reduce", 0, 1, values=np.array([1.5, 2], ml_dtypes.bfloat16))
    trace = recorder.trace()
    assert trace.values[0].dtype == np.float32
    assert Trace.from_json(trace.to_json()) == trace


def test_a_million_events_stay_small():
    """About 100 MB while recording and 90 as columns; as one tuple an event they were 400."""
    tracemalloc = pytest.importorskip("tracemalloc")
    mesh, num_events = Mesh(tp=8), 100_000
    tracemalloc.start()
    try:
        recorder = Recorder(mesh)
        for row in range(num_events):
            recorder.add(
                row % 8, "send", "ring_shift", row, row + 1.0, axis="tp", bytes=row, message=row, shape=(row % 9,)
            )
        trace = recorder.trace()
        recording, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(trace) == num_events
    assert recording / num_events < 250
    assert peak / num_events < 520


# --- totals ----------------------------------------------------------------------------------------------------------


def recount(trace: Trace, **wanted: Any) -> int:
    total = 0
    for event in trace.events:
        if event.kind in ("send", "collective") and all(getattr(event, key) == value for key, value in wanted.items()):
            total += event.bytes
    return total


@given(arbitrary_traces())
def test_bytes_sent_against_a_plain_count(trace: Trace):
    assert trace.bytes_sent() == recount(trace)
    for rank, axis, op in product(trace.mesh.ranks, ("dp", "tp", ("dp", "tp")), ("ring_shift", "nothing")):
        name = axis if isinstance(axis, str) else ",".join(axis)
        assert trace.bytes_sent(rank=rank) == recount(trace, rank=rank)
        assert trace.bytes_sent(axis=axis) == recount(trace, axis=name) == trace.bytes_sent(axis=name)
        assert trace.bytes_sent(rank, axis, op) == recount(trace, rank=rank, axis=name, op=op)


@given(arbitrary_traces())
def test_times_against_a_plain_count(trace: Trace):
    events = list(trace.events)
    assert trace.start == min((event.start for event in events), default=0)
    assert trace.makespan == max((event.end for event in events), default=0) - trace.start
    assert trace.num_steps == max((event.step for event in events), default=-1) + 1
    for rank in trace.mesh.ranks:
        # Times are whole here: a rank is busy in those units of time that any of its computations covers.
        covered = {
            unit
            for event in events
            if event.rank == rank and event.kind == "compute"
            for unit in range(int(event.start), int(event.end))
        }
        assert trace.busy()[rank] == len(covered)
        idle = 1 - len(covered) / trace.makespan if trace.makespan else 0
        assert trace.idle_share()[rank] == pytest.approx(idle, abs=1e-15)
        assert 0 <= trace.idle_share()[rank] <= 1


@given(arbitrary_traces(), st.none() | st.integers(0, 1), st.none() | st.sampled_from(KINDS))
def test_select_keeps_what_was_asked_for(trace: Trace, rank: int | None, kind: str | None):
    for op, axis in product((None, "matmul"), (None, "tp", ("dp", "tp"))):
        selected = trace.select(rank=rank, kind=kind, op=op, axis=axis)
        name = ",".join(axis) if isinstance(axis, tuple) else axis
        wanted = {"rank": rank, "kind": kind, "op": op, "axis": name}
        expected = [
            event
            for event in trace.events
            if all(value is None or getattr(event, key) == value for key, value in wanted.items())
        ]
        assert list(selected.events) == expected
        kept = {event.where: event.values for event in trace.events}
        assert all(event.values is kept[event.where] for event in selected.events)
        assert (selected.mesh, selected.about()) == (trace.mesh, trace.about())


def test_the_table():
    assert example().table() == (
        "kind        op          axis  events  bytes  time (s, modelled)\n"
        "compute     matmul                 2    192                   3\n"
        "send        ring_shift  tp         1      8                   2\n"
        "receive     ring_shift  tp         1      8                   2\n"
        "collective  all_reduce  tp         2     32                   2\n"
        "wait        ring_shift  tp         1      0                   1"
    )
    assert example(unit="steps").table().splitlines()[0].endswith("time (steps, modelled)")
    assert example(clock="measured").table().splitlines()[0].endswith("time (s, measured)")
    assert example().select(op="none").table() == "kind  op  axis  events  bytes  time (s, modelled)"


@given(arbitrary_traces())
def test_the_table_adds_up(trace: Trace):
    rows = [line.replace(",", "").split() for line in trace.table().replace("dp,tp", "both").splitlines()[1:]]
    for kind in KINDS:
        events = trace.select(kind=kind)
        mine = [row for row in rows if row[0] == kind]
        assert sum(int(row[-3]) for row in mine) == len(events)
        assert sum(int(row[-2]) for row in mine) == sum(event.bytes for event in events.events)
        assert sum(float(row[-1]) for row in mine) == sum(event.duration for event in events.events)
    assert len({tuple(row[:-3]) for row in rows}) == len(rows)


def test_an_empty_trace():
    trace = Recorder(Mesh(tp=2)).trace()
    assert (len(trace), trace.makespan, trace.num_steps, trace.bytes_sent()) == (0, 0.0, 0, 0)
    assert trace.busy().tolist() == trace.idle_share().tolist() == [0, 0]
    assert list(trace.events) == critical_path(trace) == []
    assert Trace.from_json(trace.to_json()) == trace


# --- as a value ------------------------------------------------------------------------------------------------------


@given(arbitrary_traces())
def test_json_there_and_back(trace: Trace):
    text = trace.to_json()
    back = Trace.from_json(text)
    assert back == trace
    assert hash(back) == hash(trace)
    assert list(back.events) == list(trace.events)
    assert back.to_json() == text
    for row, array in trace.values.items():
        assert back.values[row].dtype == array.dtype
        assert np.array_equal(back.values[row], array, equal_nan=array.dtype.kind in "fc")
    json.loads(text, parse_constant=pytest.fail)  # no NaN, no Infinity: a browser could not read them


def test_a_trace_of_too_many_ranks_is_refused_at_once():
    with pytest.raises(TraceError, match="has 1,000,000,000 ranks, and a mesh has at most 1,048,576; make an axis"):
        Trace.from_json(damaged(["mesh", "tp"], 10**9))


def test_times_survive_json_to_the_last_bit():
    trace = simulate(3, 4, 200).trace()
    back = Trace.from_json(trace.to_json())
    assert back.column("end").tobytes() == trace.column("end").tobytes()


def stored(trace: Trace) -> dict[str, Any]:
    """What `from_columns` needs to make it again, but for the values."""
    return {name: trace.column(name) for name in COLUMNS if name != "values"} | trace.about()


def test_equal_means_in_every_bit():
    trace = arbitrary(5, 30)
    assert trace == arbitrary(5, 30)
    assert trace == copy.deepcopy(trace) == pickle.loads(pickle.dumps(trace))
    assert trace != arbitrary(6, 30)
    assert trace != "trace"
    assert example() != example(unit="steps")
    assert example() != example(cluster="h100")
    more = Trace.from_columns(Mesh(tp=2), values={**example().values, 0: np.ones(1)}, **stored(example()))
    assert example() != more
    assert more != example()
    for name in COLUMNS:
        changed = stored(example())
        values, other = dict(example().values), {"kind": "wait", "op": "x", "axis": "x", "dtype": "x", "where": "x"}
        other |= {"phase": "backward", "reduction": "sum", "types": "tp: P → I"}
        if name == "values":
            values[2] = np.array([1.0, 2.5])
        elif name in ("rank", "peer", "chunk"):
            changed[name] = 1 - np.maximum(changed[name], 0) if name != "chunk" else -1
        else:
            changed[name] = other.get(name, (1,)) if changed[name].dtype == object else changed[name] + 1
            changed["end"] = changed["end"] + 1 if name == "start" else changed["end"]
        made = Trace.from_columns(Mesh(tp=2), values=values, **changed)
        assert made != example(), name


def test_what_it_is_called():
    assert repr(example()) == "Trace of example: 2 ranks, 7 events, modelled"
    assert repr(example(cluster="h100", clock="measured")) == "Trace of example: 2 ranks, 7 events, measured on h100"
    assert repr(Recorder(Mesh(tp=2)).trace()) == "Trace of a program: 2 ranks, 0 events, modelled"
    assert repr(example().events) == "<7 events>"


# --- what it says ----------------------------------------------------------------------------------------------------

NAMES = ", ".join(name for name in COLUMNS if name != "values")


def columns(**changed: Any) -> Trace:
    return Trace.from_columns(
        Mesh(tp=2), **{"rank": [0, 1], "kind": "send", "op": "x", "start": 0, "end": 1, **changed}
    )


FAULTS = {
    "a trace needs the column 'kind'; only axis, group, peer, bytes, flops, shape, dtype, message, step, chunk, "
    "contributors, where, held, phase, reduction, part, types, after may be left out":
        lambda: Trace.from_columns(Mesh(tp=2), rank=[0]),
    f"a trace has no column 'flop'; its columns are {NAMES}": lambda: columns(flop=1),
    f"a trace has no column 'time'; its columns are {NAMES}": lambda: example().column("time"),
    "column 'rank' has no table; those with one are kind, op, axis, group, shape, dtype, contributors, where, phase, "
    "reduction, part, types":
        lambda: example().codes("rank"),
    "an event's kind is one of compute, send, receive, collective, wait, not 'sent'": lambda: columns(kind="sent"),
    "event 1 is of rank 2; Mesh(tp=2) has ranks 0 to 1": lambda: columns(rank=[0, 2]),
    "event 0 is of rank -1; Mesh(tp=2) has ranks 0 to 1": lambda: columns(rank=[-1, 0]),
    "event 1 names rank 5 as its peer; Mesh(tp=2) has ranks 0 to 1": lambda: columns(peer=[1, 5]),
    "event 1 names rank -2 as its peer; Mesh(tp=2) has ranks 0 to 1": lambda: columns(peer=[1, -2]),
    "event 1 ends at 1.0, before it starts at 2.0": lambda: columns(start=[0, 2]),
    "event 0 lasts from 0.0 to nan; give finite times": lambda: columns(end=np.nan),
    "event 0 lasts from -inf to 1.0; give finite times": lambda: columns(start=-np.inf),
    "event 0 carries chunk 3 of 1; give chunks=[(origin rank, piece), ...]": lambda: columns(chunk=3, chunks=[(0, 0)]),
    "event 1 comes after event 2, but there are 2 events": lambda: columns(after=[-1, 2]),
    "event 0 has after -2, which is too small": lambda: columns(after=[-2, 0]),
    "column 'op' has 1 rows, and 'rank' has 2; they must be as many": lambda: columns(op=["x"]),
    "column 'bytes' has 3 rows, and 'rank' has 2; they must be as many": lambda: columns(bytes=[1, 2, 3]),
    "column 'bytes' holds 1.5; it must hold 64-bit whole numbers": lambda: columns(bytes=[1, 1.5]),
    "column 'step' holds nan; it must hold 32-bit whole numbers": lambda: columns(step=np.nan),
    "column 'flops' must hold numbers: Python int too large to convert to C long": lambda: columns(flops=2**64),
    "column 'group' holds a value that cannot be a key, as a list; give tuples": lambda: columns(group=[[0], [1]]),
    "column 'op' has places up to 2 in a table of 1": lambda: columns(op=(["x"], np.array([0, 2]))),
    "a clock is 'modelled' or 'measured', not 'guessed'": lambda: columns(clock="guessed"),
    "a trace counts its time in 's' or 'steps', not 'ms'": lambda: columns(unit="ms"),
    "this is not a trace that to_json wrote: it does not say 'tplab trace 1'": lambda: Trace.from_json("[1]"),
    "this is not a trace that to_json wrote: Expecting value: line 1 column 1 (char 0)": lambda: Trace.from_json("x"),
    "this is not a trace that to_json wrote: axis 'tp' has size 0; it must be a whole number of ranks, 1 or more":
        lambda: Trace.from_json(damaged(["mesh", "tp"], 0)),
    "this is not a trace that to_json wrote: 'columns' is missing, or is no object":
        lambda: Trace.from_json(damaged(["columns"], None)),
    "this is not a trace that to_json wrote: column 'op' has codes that are no places in its table of 3":
        lambda: Trace.from_json(damaged(["columns", "op", "codes", 0], 3)),
    "this is not a trace that to_json wrote: a value is damaged: dtype 'O' is not one of numbers":
        lambda: Trace.from_json(damaged(["values", "2", "dtype"], "O")),
    "column 'group' names rank 2; Mesh(tp=2) has ranks 0 to 1": lambda: columns(group=(0, 2)),
    "values are kept for event 2, but there are 2 events": lambda: columns(values={2: np.ones(1)}),
    "a chunk is (origin rank, piece), and (2, 0) is none: Mesh(tp=2) has ranks 0 to 1":
        lambda: columns(chunks=[(2, 0)]),
    "event 0 has bytes -4, which is too small": lambda: columns(bytes=-4),
    "column 'start' must hold one number per event, not [[0, 1], [0, 1]]": lambda: columns(start=[[0, 1], [0, 1]]),
    "column 'op' holds text, not 3": lambda: columns(op=[3, 4]),
}  # fmt: skip


def damaged(path: list[Any], value: Any) -> str:
    """The example as JSON, with another value at `path`."""
    data = json.loads(example().to_json())
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return json.dumps(data)


def paths(value: Any) -> list[list[Any]]:
    """Every path into nested lists and objects."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [[key, *rest] for key, below in inside for rest in ([], *paths(below))]


ODD = [None, True, -1, 2, 0.5, 1e999, 2**31, 2**70, "", "tp", "ab cd", [], [[]], [None], [0, 1], {}, {"table": []}]


@given(st.sampled_from(paths(json.loads(example().to_json()))), st.sampled_from(ODD))
@for_example(["chunk_names"], None)
def test_a_damaged_trace_is_a_trace_error_or_still_a_trace(path: list[Any], value: Any):
    """Whatever stands in the place of any part of it: nothing but TraceError comes, and what is read can be used."""
    try:
        trace = Trace.from_json(damaged(path, value))
    except TraceError:
        return
    assert Trace.from_json(trace.to_json()) == trace
    assert trace.table() and critical_path(trace)
    assert all(0 <= share <= 1 for share in trace.idle_share())


@given(st.integers(0, len(example().to_json()) - 1), st.sampled_from(["", *'09-]"{,e\x00']))
def test_a_trace_with_another_letter_is_a_trace_error_or_still_a_trace(place: int, letter: str):
    text = example().to_json()
    for broken in (text[:place] + letter + text[place + 1 :], text[:place]):
        with contextlib.suppress(TraceError):
            Trace.from_json(broken)


@pytest.mark.parametrize("message", FAULTS)
def test_what_it_says(message: str):
    with pytest.raises(TraceError) as caught:
        FAULTS[message]()
    assert str(caught.value) == message
    assert isinstance(caught.value, TplabError)
    assert isinstance(caught.value, ValueError)


def test_the_recorder_says_it_too():
    recorder = Recorder(Mesh(tp=2))
    recorder.add(0, "compute", "x", 2, 1)
    with pytest.raises(TraceError, match=r"event 0 ends at 1\.0, before it starts at 2\.0"):
        recorder.trace()


def test_asking_for_what_is_not_there_is_an_error_and_no_empty_answer():
    trace = example()
    with pytest.raises(MeshError, match=r"Mesh\(tp=2\) has ranks 0 to 1, not 2"):
        trace.bytes_sent(rank=2)
    with pytest.raises(MeshError, match="has no axis 'dp'; its axes are 'tp'"):
        trace.select(axis="dp")
    with pytest.raises(TraceError, match=r"an event's kind is one of compute, .*, not 'sent'"):
        trace.select(kind="sent")


def test_a_trace_says_where_its_clocks_figures_come_from():
    """In words for people, beside the cluster's name, and in files."""
    sheet = example(cluster="h100", figures="data sheet")
    assert sheet.place == "h100, data sheet"
    assert Trace.from_json(sheet.to_json()) == sheet != example(cluster="h100")
    assert repr(sheet).endswith("modelled on h100, data sheet")
    assert (example(cluster="h100").place, example().place) == ("h100", "")
    old = json.loads(sheet.to_json())
    del old["figures"]  # as files from before have it
    assert Trace.from_json(json.dumps(old)) == example(cluster="h100")


def test_what_starts_later_is_a_trace_of_its_own():
    trace = example()
    times = sorted({event.start for event in trace.events})
    for time in (times[0], times[1], times[-1], times[-1] + 1):
        later = trace.since(time)
        assert list(later.events) == [event for event in trace.events if event.start >= time]
        assert later.about() == trace.about()
        assert later.start == (time if time in times else 0.0)
