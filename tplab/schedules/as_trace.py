"""A simulated schedule as a `Trace`: what every rank did, what was sent, and who waited for what."""

from __future__ import annotations

import numpy as np

from tplab.mesh import Mesh
from tplab.schedules.action import KINDS, F
from tplab.schedules.costs import Costs
from tplab.schedules.schedule import Schedule
from tplab.trace.event import KINDS as EVENT_KINDS
from tplab.trace.trace import Trace


def as_trace(
    schedule: Schedule,
    costs: Costs,
    start: np.ndarray,
    end: np.ndarray,
    sent: np.ndarray,
    waits_for: np.ndarray,
    after: np.ndarray,
) -> Trace:
    """Events of kind compute, send, receive and wait, on a mesh with one axis, `pp`. The columns are a `Simulation`'s.

    op       "F3", or "F3+B1" for an overlapped pair; `where` says which stage
    chunk    the microbatch, so that everything that belongs to it has one colour
    message  one number shared by a send, its receive, and the wait for it
    step     how many hops the microbatch has made so far
    """
    rank = schedule.rank
    names = [f"{kind}{k if k >= 0 else ''}" for kind in KINDS for k in range(-1, schedule.num_microbatches)]
    code = schedule.kind.astype(np.intp) * (schedule.num_microbatches + 1) + schedule.microbatch + 1
    stages = ["", *(f"stage {stage}" for stage in range(schedule.num_stages))]
    stage = schedule.stage.astype(np.intp) + 1
    for second in np.flatnonzero(schedule.joined).tolist():  # a pair is one event: its time counts once
        names.append(f"{names[code[second - 1]]}+{names[code[second]]}")
        stages.append(f"{stages[stage[second - 1]]} + {stages[stage[second]]}")
        code[second - 1], stage[second - 1] = len(names) - 1, len(stages) - 1
    computes = np.flatnonzero(~schedule.joined)
    last = computes + np.append(schedule.joined, False)[computes + 1]  # the second of a pair

    message = schedule.needs.message
    takers = np.flatnonzero(schedule.crosses(message))
    makers = message[takers]
    carrying = costs.carrying(schedule)[makers]
    departs = sent[makers] - (costs.links != "free") * carrying
    arrives = departs + carrying + costs.transfer
    number = np.full(len(schedule), -1)
    number[takers] = np.arange(len(takers))
    hops = np.where(schedule.kind == F, schedule.stage, 2 * schedule.num_stages - 2 - schedule.stage)[makers]

    waiters = np.flatnonzero(waits_for >= 0)
    before = np.zeros(len(waiters))
    inner = ~np.isin(waiters, schedule.offsets[:-1])
    before[inner] = end[waiters[inner] - 1]
    waiters, before = waiters[before < start[waiters]], before[before < start[waiters]]

    event_of = np.tile(np.cumsum(~schedule.joined) - 1, 2)  # of each action, and of its message
    event_of[makers + len(schedule)] = sends = len(computes) + np.arange(len(makers))
    event_of = np.append(event_of, -1)

    def column(*of_kinds: np.ndarray) -> np.ndarray:
        """Of computations, sends, receives and waits."""
        return np.concatenate(of_kinds)

    nothing, no_message = np.full(len(computes), -1), np.full(len(waiters), -1)
    second = np.minimum(waiters + 1, len(number) - 1)  # if a pair waits for its second action's input
    awaited = np.where(message[second] == waits_for[waiters], number[second], -1)
    awaited = np.where(message[waiters] == waits_for[waiters], number[waiters], awaited)
    kinds = np.repeat(
        [EVENT_KINDS.index(kind) for kind in ("compute", "send", "receive", "wait")],
        [len(computes), len(makers), len(takers), len(waiters)],
    )
    sizes = costs.message_sizes(schedule)[makers].astype(np.int64)
    return Trace.from_columns(
        Mesh(pp=schedule.num_ranks),
        title=schedule.name,
        framework="schedule",
        unit=costs.unit,
        chunks=[(int(rank[home]), k) for k, home in enumerate(schedule.needs.forward[0])]
        if schedule.num_stages
        else [],
        rank=column(rank[computes], rank[makers], rank[takers], rank[waiters]),
        kind=(list(EVENT_KINDS), kinds),
        op=(names, column(code[computes], code[makers], code[makers], code[waiters])),
        start=column(start[computes], departs, departs, before),
        end=column(end[last], arrives, arrives, start[waiters]),
        axis="pp",
        peer=column(nothing, rank[takers], rank[makers], rank[waits_for[waiters]]),
        bytes=column(0 * computes, sizes, sizes, 0 * waiters),
        message=column(nothing, number[takers], number[takers], awaited),
        step=column(nothing, hops, hops, no_message),
        chunk=schedule.microbatch[column(computes, makers, makers, waiters)],
        where=(stages, stage[column(computes, makers, takers, waiters)]),
        after=column(
            event_of[after[computes]],
            event_of[after[makers + len(schedule)]],
            sends,
            event_of[waits_for[waiters] + len(schedule)],
        ),
    )
