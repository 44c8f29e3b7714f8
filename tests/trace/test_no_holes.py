"""On the critical path of a modelled trace, events explain every second."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from threading import Thread

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.cost.event_simulator import BANDWIDTH, LATENCY, random_programs
from tests.jax.test_timing import RANKS, random_tasks
from tests.torch.test_event_order import CHIP, MESHES, traced
from tplab import Event, Mesh, Trace
from tplab.cost import Cluster, Link
from tplab.jax.tracing.trace import recorded
from tplab.schedules import RULES, Costs, one_f_one_b, simulate
from tplab.torch import all_reduce, axis_index, receive, run, send, start, train_batch
from tplab.trace import Recorder, critical_path
from tplab.trace.label import UNKNOWN

WORK = torch.ones(1_000_000)
WIRE = Cluster("wire", CHIP, Link("wire", LATENCY, BANDWIDTH))
NODES = replace(WIRE, node_size=2, outer_link=Link("net", 4 * LATENCY, BANDWIDTH / 2))
CLUSTERS = {
    "hops": None,
    "switch": WIRE,
    "torus": replace(WIRE, wiring="torus"),
    "nodes": NODES,
    "one card": replace(NODES, cards=1),
    "one card, slowed": replace(NODES, cards=1, communication_share=0.5),
}
LATENCIES = LATENCY, 4 * LATENCY


def holes(trace: Trace, latencies: Sequence[float] = LATENCIES) -> list[tuple[Event | None, Event | None]]:
    """Neighbours on the path of which the second does not begin when the first ends. A message and what goes next on
    its link overlap by its latency, since the link is free before the message is there."""
    found, rounding = [], 1e-9 * trace.makespan
    for one, other in pairwise([None, *critical_path(trace), None]):
        until = trace.start if one is None else one.end
        begins = trace.start + trace.makespan if other is None else other.start
        may_overlap = (
            one is not None and one.kind == "send" and other is not None and other.kind in ("send", "collective")
        )
        allowed = (0.0, *latencies) if may_overlap else (0.0,)
        if min(abs(until - begins - early) for early in allowed) > rounding:
            found.append((one, other))
    return found


def torch_trace(seed: int, name: str) -> Trace:
    chance = random.Random(seed)
    mesh = chance.choice([mesh for mesh in MESHES if name[:3] not in ("nod", "one") or mesh.size % 2 == 0])
    groups = sorted({mesh.group(rank, axis) for axis in mesh.axis_names for rank in mesh.ranks})
    return traced(random_programs(chance, groups, mesh.size), mesh, CLUSTERS[name])


def jax_trace(seed: int, name: str) -> Trace:
    tasks = random_tasks(random.Random(seed))
    for task in tasks:
        task.labels = {source: UNKNOWN for source, _ in task.pairs}
    return recorded(Recorder(Mesh(x=len(RANKS))), tasks, set(range(len(tasks))), CLUSTERS[name], record=0)


@pytest.mark.parametrize("name", CLUSTERS)
@pytest.mark.parametrize("made", [torch_trace, jax_trace])
def test_random_programs_have_a_path_without_holes(made, name: str):
    for seed in range(15 if made is torch_trace else 60):
        assert holes(made(seed, name)) == [], seed


def test_measured_computing_and_modelled_messages_leave_no_holes():
    for seed in range(15):
        chance = random.Random(seed)
        mesh = chance.choice(MESHES)
        groups = sorted({mesh.group(rank, axis) for axis in mesh.axis_names for rank in mesh.ranks})
        assert holes(traced(random_programs(chance, groups, mesh.size), mesh, WIRE, clock="measured")) == [], seed


@pytest.mark.parametrize("clock", ["modelled", "measured"])
def test_the_threads_of_a_rank_leave_no_holes(clock: str):
    """They compute one at a time; the thread also waits for other ranks, and the rank for its thread."""

    def program() -> None:
        def beside() -> None:
            torch.neg(WORK)
            start(all_reduce, WORK, "tp").wait()
            torch.neg(WORK)

        torch.neg(WORK)
        thread = Thread(target=beside)
        thread.start()
        torch.neg(WORK[:1000])
        thread.join()
        torch.neg(WORK)

    path = critical_path(trace := run(program, Mesh(tp=2), distributed=True, cluster=WIRE, clock=clock).trace)
    assert holes(trace) == []
    assert clock == "measured" or "all_reduce" in [event.op for event in path]


def test_the_actions_of_a_pipeline_leave_no_holes():
    """Each is one event, or several if it waited in between, of many operations: here of layers that are cut, too."""
    schedule = one_f_one_b(2, 4)
    mesh = Mesh(pp=2, tp=2)

    def program() -> None:
        x = torch.ones(8, 8)
        train_batch(schedule, nn.Sequential(nn.Linear(8, 8), Summed(), nn.Tanh()), [(x, x)] * 4, F.mse_loss)

    class Summed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return all_reduce(x, "tp")

    for cluster in (None, WIRE, CLUSTERS["one card"]):
        trace = run(program, mesh, cluster=cluster).trace
        assert holes(trace) == []
        assert {"F0", "B3", "all_reduce"} <= {event.op for event in critical_path(trace)}


def test_a_message_waits_for_another_ranks_on_the_card_that_they_share():
    """Rank 0 sends for a second, and rank 1's small message goes behind it."""
    seconds = Cluster("s", CHIP, Link("wire", 0.0, 1e6), node_size=2, outer_link=Link("net", 0.25, 1e6), cards=1)

    def program() -> None:
        here = axis_index("dp")
        if here == 0:
            send(torch.empty(250_000), "dp", 2)
        elif here == 1:
            send(torch.neg(torch.empty(1_000)), "dp", 3)
        else:
            receive("dp", here - 2)

    trace = run(program, Mesh(dp=4), cluster=seconds).trace
    path = [(event.rank, event.kind, event.start, event.end) for event in critical_path(trace)]
    assert path == [(0, "send", 0, 1.25), (1, "send", 1, pytest.approx(1.254))]
    small = next(event for event in trace.events if event.kind == "send" and event.rank == 1)
    (waited,) = [event for event in trace.events if event.kind == "wait" and event.rank == 3]
    (received,) = [event for event in trace.events if event.kind == "receive" and event.rank == 3]
    assert trace.events[small.after].rank == 0
    assert trace.events[waited.after] == trace.events[received.after] == small


def test_on_a_torus_a_message_waits_for_the_one_that_goes_the_same_way():
    torus = Cluster("t", CHIP, Link("wire", 0.5, 1e6), wiring="torus")

    def program() -> None:
        here = axis_index("dp")
        if here == 0:
            big, small = torch.empty(250_000), torch.empty(225_000)
            for x, to in ((big, 1), (small, 2), (small, 1)):
                send(x, "dp", to)
        elif here == 1:
            receive("dp", 0)
        if here:
            receive("dp", 0)

    path = critical_path(run(program, Mesh(dp=3), cluster=torus).trace)
    assert [(event.peer, event.start, event.end) for event in path] == [(1, 0, 1.5), (1, 1, pytest.approx(2.4))]


COSTS = {
    "free": Costs(0.9, 2.1, 1.3, 0.1, message_bytes=0.3, bandwidth=2),
    "queues": Costs(1, 2, 1, 0.25, message_bytes=3, bandwidth=2, links="queue"),
    "busy ports": Costs(1, 2, 1, 0.1, message_bytes=30, bandwidth=2, links="port"),
    "overlap": Costs(overlap=0.5),
    "steps": Costs(transfer=0.3, optimizer_step=2, gradient_sync=1),
}


@pytest.mark.parametrize("lockstep", [False, True])
@pytest.mark.parametrize("optimizer", [None, "own", "together"])
@pytest.mark.parametrize("rule", ["one_f_one_b", "zb_h2", "dualpipe_v", "interleaved_1f1b"])
def test_simulated_schedules_have_a_path_without_holes(rule: str, optimizer: str | None, lockstep: bool):
    for name, costs in COSTS.items():
        simulation = simulate(RULES[rule](4, 8), costs, lockstep=lockstep, optimizer=optimizer)
        if not (lockstep and simulation.schedule.joined.any()):  # the two ticks of a pair are one event
            assert holes(simulation.trace, [costs.transfer]) == [], name
        path = simulation.critical_indices()
        assert simulation.start[path[0]] == 0 and simulation.end[path[-1]] == simulation.makespan
