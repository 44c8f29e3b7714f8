"""Simulation: when each action of a schedule starts and ends, under given costs."""

from __future__ import annotations

import numpy as np

from tplab.errors import ScheduleError, one_of
from tplab.schedules.action import CODE, MESSAGES
from tplab.schedules.check import require_runnable
from tplab.schedules.communication import with_optimizer_step
from tplab.schedules.costs import Costs
from tplab.schedules.relax import MISSING, NOTHING, Links, relax
from tplab.schedules.schedule import Schedule
from tplab.schedules.simulation import Simulation


def simulate(
    schedule: Schedule, costs: Costs | None = None, *, lockstep: bool = False, optimizer: str | None = None
) -> Simulation:
    """Run `schedule` on paper: every rank does its row in order, each action as soon as its inputs have arrived.

    costs       times and sizes; by default F = I = W = 1 and messages take no time
    lockstep    as in one SPMD program: all ranks take each tick together, so a tick lasts as long as its slowest
                action, and then the messages of that tick travel. This changes which schedule is faster: with p=4,
                m=8, F=1, B=2, GPipe takes 33 and 1F1B takes 40
    optimizer   None: the schedule ends with its last action. "own": each rank takes its optimizer step when its own
                row is done. "together": when all ranks' rows are done (as for a global gradient norm)

    Sends and receives that are written out are ignored: `costs` says how long messages take.
    Raises ScheduleError if the schedule cannot run, and says why.
    """
    costs = Costs() if costs is None else costs
    one_of("optimizer", optimizer, (None, "own", "together"), ScheduleError)
    if schedule.has_communication:
        schedule = schedule.select(~np.isin(schedule.kind, MESSAGES))
    if optimizer is not None:
        schedule = with_optimizer_step(schedule.compute_only(), sync=costs.gradient_sync > 0)
    if lockstep:
        return _in_lockstep(schedule, costs, optimizer)

    needs, duration, links = [schedule.needs.message], costs.durations(schedule), None
    leader = np.arange(len(schedule))  # the first of each action's pair
    if bool(schedule.joined.any()):
        leader, duration = _paired(schedule, duration, costs.overlap)
        needs.append(schedule.needs.partner)
    crosses, carrying = [schedule.crosses(need) for need in needs], costs.carrying(schedule)
    if costs.links == "free":
        way = costs.transfer + carrying
        lags = [crossing * way[np.maximum(need, 0)] for crossing, need in zip(crosses, needs)]
    else:
        lags = [crossing * costs.transfer for crossing in crosses]
        links = _links(schedule, carrying, costs.links == "port")
    end, sent = relax(schedule.offsets, needs, lags, duration, links)
    if not bool(np.isfinite(end).all()) or not _own_rows_in_order(schedule):
        require_runnable(schedule)

    arrival, waits_for = np.full(len(schedule), -np.inf), np.full(len(schedule), NOTHING)
    for need, lag in zip(needs, lags):
        there = np.where(need < 0, -np.inf, sent[np.maximum(need, 0)] + lag)
        waits_for = np.where(there > arrival, need, waits_for)
        np.maximum(arrival, there, out=arrival)
    before = _end_before(schedule, end)
    start = np.maximum(before, arrival)
    waits_for = np.where(arrival > before, waits_for, NOTHING)
    start, waits_for = start[leader], waits_for[leader]
    after = _what_held_up(schedule, links, end, sent, waits_for)
    if optimizer == "together" and len(end):
        steps, others = schedule.kind == CODE["STEP"], schedule.kind != CODE["STEP"]
        after[np.flatnonzero(steps)] = np.argmax(np.where(others, end, -1.0)) if others.any() else -1
        start[steps] = end[others].max(initial=0.0)
        end[steps] = start[steps] + costs.optimizer_step
    return Simulation(schedule, costs, start, end, duration, sent, waits_for, after)


def _end_before(schedule: Schedule, end: np.ndarray) -> np.ndarray:
    """When the previous action of the same rank ended; 0 for the first action of a row [actions]."""
    before = np.empty(len(schedule))
    before[1:] = end[:-1]
    before[schedule.offsets[:-1][np.diff(schedule.offsets) > 0]] = 0.0
    return before


def _what_held_up(
    schedule: Schedule, links: Links | None, end: np.ndarray, sent: np.ndarray, waits_for: np.ndarray
) -> np.ndarray:
    """What held up each action, then each action's message [2 actions], as an index into the same array. An action is
    held up by the message it waited for, or else by the previous action of its rank; a message by its action, or by
    the previous message on its link."""
    indices = np.arange(len(schedule))
    before = np.where(np.isin(indices, schedule.offsets[:-1]), NOTHING, indices - 1)
    action = np.where((waits_for < 0) | schedule.joined, before, waits_for + len(schedule))
    message = indices.copy()
    if links is not None:
        order = np.argsort(links.link, kind="stable")  # each link's messages, in the order of its rank's row
        first, second = order[:-1], order[1:]
        queues = (links.link[first] == links.link[second]) & (sent[first] > end[second])
        message[second[queues]] = first[queues] + len(schedule)
    return np.concatenate([action, message])


def _paired(schedule: Schedule, duration: np.ndarray, overlap: float) -> tuple[np.ndarray, np.ndarray]:
    """(the first of each action's pair, durations): the first of a pair lasts as long as both, the second no time."""
    second = np.flatnonzero(schedule.joined)
    leader = np.arange(len(schedule))
    leader[second] = second - 1
    duration = duration.copy()
    both = duration[second - 1] + duration[second] - overlap * np.minimum(duration[second - 1], duration[second])
    duration[second - 1], duration[second] = both, 0.0
    return leader, duration


def _links(schedule: Schedule, carrying: np.ndarray, is_port: bool) -> Links:
    """The link of each action's message: one per direction between two ranks, or one per rank that sends; none if it
    stays on its rank.

    Only one rank sends on a link, in the order of its row. So messages leave in the order in which they are ready, even
    where `relax` does not advance the ranks in the order of time.
    """
    message = schedule.needs.message
    consumer = np.flatnonzero(message >= 0)
    producer = message[consumer]
    goes_to = schedule.rank.astype(np.intp).copy()
    goes_to[producer] = schedule.rank[consumer]
    stays = goes_to == schedule.rank
    way = schedule.rank * 2 + stays if is_port else schedule.rank * schedule.num_ranks + goes_to
    _, link = np.unique(way, return_inverse=True)
    return Links(link, np.where(stays, 0.0, carrying))


def _own_rows_in_order(schedule: Schedule) -> bool:
    """Whether each action comes after what its own rank must have run before it."""
    indices = np.arange(len(schedule))
    for own in schedule.needs.own:
        if bool(np.any((own > indices) | (own == MISSING) | schedule.crosses(own))):
            return False
    return True


def _in_lockstep(schedule: Schedule, costs: Costs, optimizer: str | None) -> Simulation:
    """Every tick lasts as long as its slowest action, and then as its slowest message."""
    if not _own_rows_in_order(schedule) or bool(np.any(schedule.earliest < 0)):
        require_runnable(schedule)
    ticks, duration = schedule.ticks.copy(), costs.durations(schedule)
    if optimizer is not None:  # one program: the optimizer step is one tick, the last, for all ranks
        steps = schedule.kind == CODE["STEP"]
        ticks[steps] = ticks[~steps].max(initial=-1) + 1
    ticks = np.unique(ticks, return_inverse=True)[1]  # an empty tick takes no time
    message = schedule.needs.message
    producer = message[schedule.crosses(message)]
    num_ticks = int(ticks.max(initial=-1)) + 1
    length, travel = np.zeros(num_ticks), np.zeros(num_ticks)
    np.maximum.at(length, ticks, duration)
    carrying = costs.carrying(schedule)
    way = costs.transfer + carrying
    np.maximum.at(travel, ticks[producer], way[producer])
    begin = np.concatenate([[0.0], np.cumsum(length + travel)])
    start = begin[ticks]
    end = start + duration
    waits_for = np.where((message >= 0) & (start > _end_before(schedule, end)), message, NOTHING)
    sent = (begin[:-1] + length)[ticks] + (costs.links != "free") * carrying
    slowest, last = np.full((2, num_ticks), NOTHING)  # the slowest action of each tick, and what ends it
    order = np.argsort(duration, kind="stable")
    slowest[ticks[order]] = last[ticks[order]] = order
    order = producer[np.argsort(way[producer], kind="stable")]
    last[ticks[order]] = np.where(way[order] > 0, order + len(schedule), last[ticks[order]])
    after = np.concatenate([np.append(NOTHING, last)[ticks], slowest[ticks]])
    return Simulation(schedule, costs, start, end, duration, sent, waits_for, after, lockstep=True)
