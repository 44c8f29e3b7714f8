"""On the critical path of a modelled trace, every second is explained: by an event, or by a link that another one held."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from tests.cost.event_simulator import BANDWIDTH, LATENCY, random_programs
from tests.jax.test_timing import RANKS, random_tasks
from tests.torch.test_event_order import CHIP, MESHES, traced
from tplab import Event, Mesh, Trace
from tplab.cost import Cluster, Link
from tplab.jax.tracing.trace import recorded
from tplab.torch import axis_index, receive, run, send, start
from tplab.trace import Recorder, critical_path
from tplab.trace.label import UNKNOWN

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


def holes(trace: Trace) -> list[tuple[Event | None, Event | None]]:
    """The neighbours on the path between which nothing is said to happen. A message and what goes next on its link may
    overlap by its latency, since the link is free before the message is there."""
    path: list[Event | None] = [None, *critical_path(trace), None]
    rounding = 1e-9 * trace.makespan
    latencies = [link.latency for link in (WIRE.link(0, 1), NODES.link(0, 2))]
    found = []
    for one, other in pairwise(path):
        until = trace.start if one is None else one.end
        begins = trace.start + trace.makespan if other is None else other.start
        early = until - begins
        is_on_link = one is not None and one.kind == "send" and other is not None and other.kind in ("send", "collective")
        explained = abs(early) <= rounding or (is_on_link and min(abs(early - each) for each in latencies) <= rounding)
        if not explained:
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
