"""The critical path, held against programs that know what each of their events waited for."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from tests.simulated_traces import Simulation, arbitrary_traces, simulate, simulations
from tplab import Event, Mesh, Trace
from tplab.trace import Recorder, critical_path


def stretches(path: list[Event]) -> list[tuple[int, str, float, float]]:
    return [(event.rank, event.kind, event.start, event.end) for event in path]


@settings(max_examples=300)
@given(simulations())
def test_it_is_the_path_the_program_took(simulation: Simulation):
    trace = simulation.trace()
    path = critical_path(trace)
    if not len(trace):
        assert path == []
        return
    assert [int(event.where) for event in path if event.duration] == simulation.critical_path()
    assert path[0].start == trace.start
    assert path[-1].end - path[0].start == trace.makespan
    assert critical_path(Trace.from_json(trace.to_json())) == path


@settings(max_examples=300)
@given(simulations(has_queues=False))
def test_where_nothing_is_noted_and_no_link_is_busy_it_is_guessed(simulation: Simulation):
    trace = simulation.trace(is_noted=False)
    assert not len(trace) or (trace.column("after") < 0).all()
    path = [int(event.where) for event in critical_path(trace) if event.duration]
    assert path == (simulation.critical_path() if len(trace) else [])


@given(simulations())
def test_in_a_part_of_a_trace_events_come_after_the_same_events(simulation: Simulation):
    """They name each other by their place, which is another one among fewer events."""

    def causes(trace: Trace) -> dict[tuple[int, str], tuple[int, str] | None]:
        names = [(event.rank, event.where) for event in trace.events]
        return {name: None if row < 0 else names[row] for name, row in zip(names, trace.column("after"), strict=True)}

    trace = simulation.trace()
    whole = causes(trace)
    for part in (trace.select(rank=0), trace.select(kind="send"), trace.since(trace.makespan / 2)):
        found = causes(part)
        assert found == {name: whole[name] if whole[name] in found else None for name in found}


@given(simulations())
def test_each_event_starts_when_the_one_before_it_ends(simulation: Simulation):
    path = critical_path(simulation.trace())
    for one, other in pairwise(path):
        if other.kind in ("send", "collective") and one.kind == "send" and one.end > other.start:
            assert one.start < other.start  # the link was free again before the message was there
        else:
            assert one.end == other.start


@given(arbitrary_traces(min_size=1))
def test_of_events_that_make_no_sense_it_is_still_a_path(trace: Trace):
    path = critical_path(trace)
    assert path[-1].end == trace.start + trace.makespan
    for one, other in pairwise(path):
        assert one.end <= other.end or (one.kind == "send" and one.start <= other.end)
    assert len({event.where for event in path}) == len(path)  # there each event has its own


def test_a_message_joins_two_ranks():
    simulation = Simulation(2)
    simulation.compute(0, 3)
    simulation.compute(1, 2)
    simulation.send(0, 1, 4, 1)
    simulation.receive(1)
    simulation.compute(1, 5)
    assert stretches(critical_path(simulation.trace())) == [
        (0, "compute", 0, 3),
        (0, "send", 3, 8),
        (1, "compute", 8, 13),
    ]


def test_a_send_waits_for_its_link():
    simulation = Simulation(3)
    simulation.compute(0, 1)
    simulation.send(0, 1, 4, 0)
    simulation.send(0, 2, 4, 0)
    simulation.receive(2)
    assert stretches(critical_path(simulation.trace())) == [(0, "compute", 0, 1), (0, "send", 1, 5), (0, "send", 5, 9)]


def test_a_link_carries_the_next_message_while_the_last_is_on_its_way():
    simulation = Simulation(2)
    simulation.compute(0, 1)
    simulation.send(0, 1, 4, 2)
    simulation.send(0, 1, 4, 2)
    assert stretches(critical_path(simulation.trace())) == [
        (0, "compute", 0, 1),
        (0, "send", 1, 7),
        (0, "send", 5, 11),
    ]


def test_a_collective_waits_for_the_last_of_its_group():
    simulation = Simulation(3)
    for rank, duration in enumerate((2, 6, 4)):
        simulation.compute(rank, duration)
    simulation.collective([0, 1, 2], 1, blocking=True)
    simulation.compute(0, 1)
    assert stretches(critical_path(simulation.trace())) == [
        (1, "compute", 0, 6),
        (0, "collective", 6, 7),
        (0, "compute", 7, 8),
    ]


def test_a_collective_waits_for_the_links_of_its_group():
    """Both members have a message on its way; the one that arrives later held its link for longer."""
    simulation = Simulation(2)
    simulation.send(0, 1, 5, 2)
    simulation.send(1, 0, 4, 2)
    simulation.collective([0, 1], 1, blocking=True)
    assert stretches(critical_path(simulation.trace()))[0] == (0, "send", 0, 7)


def test_in_a_ring_of_steps_it_follows_the_data():
    """Without a cluster: no compute, every hop takes 1, and what rank 0 gets last has gone round."""
    recorder = Recorder(Mesh(tp=4))
    for step in range(3):
        for rank in range(4):
            about: dict[str, Any] = {"message": 4 * step + rank, "bytes": 4}
            recorder.add(rank, "send", "ring_shift", step, step + 1, peer=(rank + 1) % 4, **about)
            recorder.add((rank + 1) % 4, "receive", "ring_shift", step, step + 1, peer=rank, **about)
    path = critical_path(recorder.trace(unit="steps"))
    assert [(event.start, event.kind) for event in path] == [(0, "send"), (1, "send"), (2, "send")]
    assert [one.peer for one in path[:-1]] == [other.rank for other in path[1:]]


def test_events_without_length_are_taken_in_their_order():
    recorder = Recorder(Mesh(tp=1))
    recorder.add(0, "compute", "first", 0, 2)
    for op in ("view", "reshape"):
        recorder.add(0, "compute", op, 2, 2)
    recorder.add(0, "compute", "last", 2, 3)
    recorder.add(0, "compute", "after", 3, 3)
    assert [event.op for event in critical_path(recorder.trace())] == ["first", "view", "reshape", "last", "after"]


def test_messages_in_a_circle_do_not_go_on_for_ever():
    recorder = Recorder(Mesh(tp=2))
    for rank in (0, 1):
        recorder.add(rank, "receive", "x", 1, 1, peer=1 - rank, message=1 - rank)
        recorder.add(rank, "send", "x", 1, 1, peer=1 - rank, message=rank)
    path = critical_path(recorder.trace())
    assert len(path) == len({(event.rank, event.kind) for event in path})


def test_a_measured_receive_that_began_before_its_send_is_kept():
    recorder = Recorder(Mesh(tp=2))
    recorder.add(0, "compute", "slow", 0, 8)
    recorder.add(0, "send", "x", 8.5, 9, peer=1, message=0)
    recorder.add(1, "receive", "x", 1, 10, peer=0, message=0)
    recorder.add(1, "compute", "last", 11, 12)
    path = critical_path(recorder.trace(clock="measured"))
    assert [(event.rank, event.kind) for event in path] == [(0, "compute"), (0, "send"), (1, "receive"), (1, "compute")]


def test_members_of_a_measured_collective_come_at_their_own_times():
    recorder = Recorder(Mesh(tp=2))
    recorder.add(0, "compute", "quick", 0, 1)
    recorder.add(1, "compute", "slow", 0, 8)
    recorder.add(0, "collective", "all_reduce", 1, 10, message=0)
    recorder.add(1, "collective", "all_reduce", 8, 9, message=0)
    assert [event.op for event in critical_path(recorder.trace(clock="measured"))] == ["slow", "all_reduce"]


@pytest.mark.parametrize("program", ["many messages", "one long chain", "all at once"])
def test_a_hundred_thousand_events(program: str):
    """In 0.1 to 0.4 s. Looking at every pair of events would take longer than a test may."""
    num_events = 100_000
    if program == "many messages":
        trace = simulate(1, 5, 140_000).trace()
        num_events = len(trace)
    else:
        start = np.arange(num_events) if program == "one long chain" else np.zeros(num_events)
        length = 1 if program == "one long chain" else 0
        trace = Trace.from_columns(
            Mesh(tp=1), rank=np.zeros(num_events, int), kind="compute", op="x", start=start, end=start + length
        )
    path = critical_path(trace)
    if program != "many messages":
        assert len(path) == num_events
    assert len(trace) >= 100_000
