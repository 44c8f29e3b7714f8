"""Adds sends, receives and optimizer steps to a schedule that only computes; writes either as torch's text."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from tplab.errors import ScheduleError, one_of
from tplab.schedules.action import MESSAGES, Action, write_csv
from tplab.schedules.schedule import Schedule

Transfer = tuple[str, int, int]
"""The contents of a message: ("F" or "B", the stage that sends, the microbatch)."""


def with_communication(schedule: Schedule) -> Schedule:
    """The schedule with every send and receive written out, in an order that cannot deadlock.

    Actions are taken in the order of their ticks. A send comes right after its action, and its receive is posted at
    that moment on the other rank, after what that rank has done so far. So any two ranks have their transfers in the
    same order, which is all that in-order communication requires. (torch lowers its schedules in the same way.)
    """
    schedule = schedule.select(~np.isin(schedule.kind, MESSAGES)) if schedule.has_communication else schedule
    message = schedule.needs.message
    goes_to = {int(message[row]): row for row in np.flatnonzero(message >= 0).tolist()}
    actions = [action for row in schedule.by_rank() for action in row]
    rows: list[list[Action]] = [[] for _ in range(schedule.num_ranks)]
    posted: list[list[Action]] = [[] for _ in range(schedule.num_ranks)]
    for index in np.lexsort((schedule.rank, schedule.ticks)).tolist():
        rank, action, consumer = int(schedule.rank[index]), actions[index], goes_to.get(index)
        if not action.joined:  # nothing may come between the two of a pair
            rows[rank] += posted[rank]
            posted[rank] = []
        rows[rank].append(action)
        if consumer is not None and schedule.rank[consumer] != rank:
            letter = "F" if action.kind == "F" else "B"
            posted[rank].append(Action(f"SEND_{letter}", action.stage, action.microbatch))
            receive = Action(f"RECV_{letter}", actions[consumer].stage, action.microbatch)
            posted[int(schedule.rank[consumer])].append(receive)
    rows = [row + left for row, left in zip(rows, posted)]
    return Schedule(rows, schedule.placement, schedule.name)


def transfers(schedule: Schedule) -> dict[tuple[int, int], list[tuple[Transfer, int]]]:
    """(rank, other rank) -> what the first exchanges with the second, in its own order, with each action's index."""
    found: dict[tuple[int, int], list[tuple[Transfer, int]]] = defaultdict(list)
    needs = schedule.needs
    for index in np.flatnonzero(np.isin(schedule.kind, MESSAGES)).tolist():
        action = schedule.action(index)
        way, letter = action.kind.split("_")
        away = 1 if (way == "SEND") == (letter == "F") else -1  # the other end's stage, seen from this one
        table = needs.forward if letter == "F" else needs.backward
        other = action.stage + away
        partner = int(table[other, action.microbatch]) if 0 <= other < schedule.num_stages else -1
        peer = int(schedule.rank[partner]) if partner >= 0 else -1
        sender = action.stage if way == "SEND" else other
        found[int(schedule.rank[index]), peer].append(((letter, sender, action.microbatch), index))
    return dict(found)


def with_optimizer_step(schedule: Schedule, sync: bool = False) -> Schedule:
    """The schedule with a STEP at the end of each row that has none.

    sync    also add a REDUCE_GRAD of each stage, right after the last B or W that adds to its gradients
    """
    rows = []
    for row in schedule.by_rank():
        done = {action.stage for action in row if action.kind == "REDUCE_GRAD"}
        last = {action.stage: index for index, action in enumerate(row) if action.kind in ("B", "W")}
        made: list[Action] = []
        for index, action in enumerate(row):
            made.append(action)
            pair_follows = index + 1 < len(row) and row[index + 1].joined
            finished = [action, row[index - 1]] if action.joined else [action]
            if sync and not pair_follows:
                made += [
                    Action("REDUCE_GRAD", one.stage)
                    for one in reversed(finished)
                    if last.get(one.stage) == index - (one is not action) and one.stage not in done
                ]
        rows.append(made if made and made[-1].kind == "STEP" else [*made, Action("STEP")])
    return Schedule(rows, schedule.placement, schedule.name)


def to_csv(schedule: Schedule, form: str = "compute_only") -> str:
    """The text that torch.distributed.pipelining reads: one line per rank.

    compute_only    one cell per tick, blank where a rank is idle: "2F0" is stage 2, forward, microbatch 0
    compute_comms   no blanks, with sends, receives and gradient sums, for example "2F0,2SEND_F0,2RECV_B0"

    An overlapped pair is one cell, "(0F3;7B1)OVERLAP_F_B". Torch has no word for an optimizer step, so it is left out.
    """
    one_of("form", form, ("compute_only", "compute_comms"), ScheduleError)
    if form == "compute_comms":
        schedule = schedule if schedule.has_communication else with_communication(schedule)
        return write_csv(schedule.by_rank(), None)
    schedule = schedule.compute_only()
    return write_csv(schedule.by_rank(), schedule.ticks_by_rank())
