"""When the tasks of a traced program run: against a plain list scheduler, and whatever ranks are called."""

from __future__ import annotations

import random
from typing import Literal

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tplab.jax as tj
from tplab import Mesh
from tplab.cost import Chip, Cluster, Link
from tplab.jax.tracing.tasks import Task
from tplab.jax.tracing.timing import Timing

CHIP = Chip("z", {"float32": 1e9}, 1e15, 1e9)
WIRE = Cluster("w", CHIP, Link("wire", 3e-6, 1e9))
GROUPS = [[(0, 1), (2, 3)], [(0, 2), (1, 3)], [(0, 1, 2, 3)]]
RANKS: tuple[int, ...] = (0, 1, 2, 3)
KINDS: tuple[Literal["compute", "message", "collective"], ...] = ("compute", "compute", "message", "collective")


def random_tasks(chance: random.Random) -> list[Task]:
    """Each needs some of those before it. Some are done by a part of the ranks only, as in branches of a cond."""
    tasks: list[Task] = []
    for number in range(chance.randint(4, 24)):
        kind = chance.choice(KINDS)
        groups = chance.choice(GROUPS)
        needs = tuple(sorted(chance.sample(range(number), min(number, chance.randint(0, 2)))))
        ranks = tuple(sorted(chance.sample(RANKS, chance.randint(1, 4)))) if kind == "compute" else RANKS
        sources, targets = chance.sample(RANKS, 4), chance.sample(RANKS, 4)
        pairs = list(zip(sources, targets))[: chance.randint(1, 4)] if kind == "message" else []
        task = Task(kind, kind, ranks, needs, (), "float32", 4 * chance.randint(1, 20_000), f"line {number}",
                    flops=chance.randint(1, 100_000), axis="x", groups=GROUPS[2] if kind == "message" else groups,
                    pairs=pairs, costs="all_reduce")  # fmt: skip
        tasks.append(task)
    return tasks


def scheduled(tasks: list[Task]) -> list[dict[int, tuple[float, float]]]:
    """The rules, one after another: slow and plain."""
    spans: list[dict[int, tuple[float, float]]] = [{} for _ in tasks]
    done: list[dict[int, float]] = [{} for _ in tasks]  # from when on others on the rank can use it
    port, busy = dict.fromkeys(RANKS, 0.0), dict.fromkeys(RANKS, 0.0)
    sent: set[tuple[int, object]] = set()
    times = {0.0}
    while times:
        now = min(times)
        times.discard(now)

        def is_ready(number: int, rank: int, now: float = now) -> bool:
            needs = [need for need in tasks[number].needs if rank in tasks[need].ranks]
            return rank in tasks[number].ranks and all(done[need].get(rank, np.inf) <= now for need in needs)

        for number, task in enumerate(tasks):  # what needs no link
            for rank in RANKS:
                is_met = rank not in [target for _, target in task.pairs] or (rank, rank) in task.pairs
                if task.kind == "message" and is_met and rank not in done[number] and is_ready(number, rank):
                    done[number][rank] = now
                    times.add(now)
        if now in times:
            continue
        for rank in RANKS:
            ready = [n for n, task in enumerate(tasks) if task.kind == "compute" and not done[n].get(rank)]
            ready = [n for n in ready if is_ready(n, rank)]
            if ready and busy[rank] <= now:
                busy[rank] = now + tasks[ready[0]].flops / 1e9
                spans[ready[0]][rank] = now, busy[rank]
                done[ready[0]][rank] = busy[rank]
                times.add(busy[rank])
        for number, task in enumerate(tasks):
            if task.kind == "collective":
                for group in task.groups:
                    if (number, group) not in sent and all(is_ready(number, rank) for rank in group):
                        sent.add((number, group))
                        start = max(now, *(port[rank] for rank in group))
                        seconds = WIRE.collective_seconds("all_reduce", task.num_bytes, group)
                        for rank in group:
                            port[rank] = done[number][rank] = start + seconds
                            spans[number][rank] = start, start + seconds
                        times.add(start + seconds)
            for source, target in task.pairs:
                if source != target and (number, source) not in sent and is_ready(number, source):
                    sent.add((number, source))
                    start = max(now, port[source])
                    port[source] = start + task.num_bytes / 1e9
                    spans[number][source] = start, port[source] + 3e-6
                    done[number][target] = port[source] + 3e-6
                    times.add(done[number][target])
    return spans


def test_random_tasks_run_when_a_plain_scheduler_says():
    for seed in range(300):
        tasks = random_tasks(random.Random(seed))
        found = Timing(tasks, set(range(len(tasks))), 4, WIRE).spans
        for number, (spans, wanted) in enumerate(zip(found, scheduled(tasks), strict=True)):
            assert spans.keys() == wanted.keys(), (seed, number)
            for rank, span in wanted.items():
                assert spans[rank] == pytest.approx(span, rel=1e-9, abs=1e-15), (seed, number, rank)


@pytest.mark.parametrize("busy", range(3))
def test_a_collective_that_all_have_called_does_not_wait_for_a_later_message(busy: int):
    """One rank computes and then sends; the sum, which needs neither, begins at once."""

    def program(x):
        total = tj.all_reduce(x, "dp")
        late = lax.cond(tj.axis_index("dp") == busy, lambda v: jnp.tanh(jnp.tanh(v)), lambda v: v, x)
        late = tj.ppermute(late, "dp", [(busy, (busy + 1) % 3)])
        return total + late

    x = np.ones(1_000_000, np.float32)
    cluster = Cluster("c", Chip("z", {"float32": 1e9}, 1e9, 1e9), Link("i", 1e-6, 1e8))
    trace = tj.run(program, Mesh(dp=3), x, cluster=cluster).trace
    (summed,) = {(e.start, e.end) for e in trace.events if e.kind == "collective"}
    (sent,) = [e for e in trace.events if e.kind == "send"]
    assert summed[0] == 0 and sent.rank == busy and sent.start == summed[1]
