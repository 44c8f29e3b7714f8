"""A slow simulator, written from the rules alone, that the fast one is held against."""

import numpy as np

from tplab.schedules import Costs, Schedule


def times(schedule: Schedule, costs: Costs) -> dict[tuple[int, int], tuple[float, float]]:
    """(rank, place) -> (start, end): every rank does its row in order, and a message takes its time.

    One action after the other, always the one that can start first; no arrays, no places, only names.
    """
    rows = schedule.by_rank()
    last_stage, share = schedule.num_stages - 1, schedule.num_stages / schedule.num_ranks
    parts = {"F": costs.forward, "I": costs.input_grad, "W": costs.weight_grad, "size": costs.message_bytes}
    cost = {name: float(np.asarray(amount)) for name, amount in parts.items()}
    cost["B"] = cost["I"] + cost["W"]
    carry = cost["size"] / costs.bandwidth
    arrived: dict[tuple, float] = {}  # (what, rank) -> when it is there
    clock, place = [0.0] * len(rows), [0] * len(rows)
    free: dict[tuple[int, int], float] = {}
    found = {}

    def consumer(kind, stage, k):
        """The rank that waits for this result."""
        wanted = {("F", stage + 1)} if kind == "F" else {("B", stage - 1), ("I", stage - 1)}
        for rank, row in enumerate(rows):
            for action in row:
                if (action.kind, action.stage) in wanted and action.microbatch == k:
                    return rank
        return None

    def ready(rank, action):
        if action.kind == "F" and action.stage > 0:
            return arrived.get(("F", action.stage - 1, action.microbatch, rank))
        if action.kind in "BI" and action.stage < last_stage:
            return arrived.get(("B", action.stage + 1, action.microbatch, rank))
        return 0.0

    while True:
        best = None
        for rank, row in enumerate(rows):
            if place[rank] < len(row):
                at = ready(rank, row[place[rank]])
                if at is not None and (best is None or max(at, clock[rank]) < best[0]):
                    best = (max(at, clock[rank]), rank)
        if best is None:
            return found
        start, rank = best
        action = rows[rank][place[rank]]
        end = start + cost[action.kind] / share
        found[rank, place[rank]] = (start, end)
        clock[rank], place[rank] = end, place[rank] + 1
        if action.kind == "W":
            continue
        to = consumer(action.kind, action.stage, action.microbatch)
        if to is None:
            continue
        there = end
        if to != rank:
            leaves = max(end, free.get((rank, to), 0.0)) if costs.links == "queue" else end
            free[rank, to] = leaves + carry
            there = leaves + carry + costs.transfer
        arrived["F" if action.kind == "F" else "B", action.stage, action.microbatch, to] = there
