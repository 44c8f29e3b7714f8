"""A slow simulator, written from the rules alone, to compare the fast one with."""

import numpy as np

from tplab.schedules import Costs, Schedule


def times(schedule: Schedule, costs: Costs) -> dict[tuple[int, int], tuple[float, float]]:
    """(rank, place) -> (start, end): every rank runs its row in order, and messages take time.

    Simulates one action after the other, always the one that can start first; no arrays, only names.
    """
    rows = schedule.by_rank()
    last_stage, share = schedule.num_stages - 1, schedule.num_stages / schedule.num_ranks
    amounts = {"F": costs.forward, "I": costs.input_grad, "W": costs.weight_grad, "size": costs.message_bytes}
    cost = {name: float(np.asarray(amount)) for name, amount in amounts.items()}
    cost["B"] = cost["I"] + cost["W"]
    carry = cost["size"] / costs.bandwidth
    parts_of_model = costs.stage_costs or [1.0]
    arrived: dict[tuple, float] = {}  # (result, rank) -> when it has arrived
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

    def takes(action):
        """The duration of an action, from the stage's part of the model."""
        num, stages, total = len(parts_of_model), schedule.num_stages, 0.0
        for part, figure in enumerate(parts_of_model):
            begin, end = max(part / num, action.stage / stages), min((part + 1) / num, (action.stage + 1) / stages)
            total += figure * max(0.0, end - begin)
        return total * stages * cost[action.kind] / share

    def together(rank):
        """The actions that the rank begins at once: its next one, or its next pair."""
        at = place[rank]
        return rows[rank][at : at + 2 if at + 1 < len(rows[rank]) and rows[rank][at + 1].joined else at + 1]

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
                there = [at for action in together(rank) if (at := ready(rank, action)) is not None]
                if len(there) == len(together(rank)) and (best is None or max(*there, clock[rank]) < best[0]):
                    best = (max(*there, clock[rank]), rank)
        if best is None:
            return found
        start, rank = best
        actions = together(rank)
        lasts = [takes(action) for action in actions]
        end = start + sum(lasts) - (costs.overlap * min(lasts) if len(lasts) == 2 else 0.0)
        clock[rank] = end
        for action in actions:
            found[rank, place[rank]] = (start, end)
            place[rank] += 1
            if action.kind == "W":
                continue
            to = consumer(action.kind, action.stage, action.microbatch)
            if to is None:
                continue
            there = end
            if to != rank:
                link = (rank, to) if costs.links == "queue" else (rank, -1)
                leaves = end if costs.links == "free" else max(end, free.get(link, 0.0))
                free[link] = leaves + carry
                there = leaves + carry + costs.transfer
            arrived["F" if action.kind == "F" else "B", action.stage, action.microbatch, to] = there
