"""Deadlocks: ranks that wait for each other, or for something that never comes, followed until the circle closes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tplab.schedules.action import B, I
from tplab.schedules.fault import Fault, fault_at, place_of, words
from tplab.schedules.needs import MISSING, NOTHING
from tplab.schedules.relax import earliest_ticks, pair_needs
from tplab.schedules.schedule import Schedule


def deadlocks(schedule: Schedule) -> Iterator[Fault]:
    """A fault for each rank whose input never comes, and one for a circle of ranks that wait for each other."""
    ticks = earliest_ticks(schedule)
    if bool(np.all(ticks >= 0)):
        return
    stuck: dict[int, int] = {}  # rank -> its first action that never runs
    for rank in range(schedule.num_ranks):
        late = np.flatnonzero(ticks[schedule.offsets[rank] : schedule.offsets[rank + 1]] < 0)
        if late.size:
            stuck[rank] = int(schedule.offsets[rank] + late[0])
    awaited = {rank: _awaited(schedule, ticks, head) for rank, head in stuck.items()}

    for rank, head in stuck.items():
        if awaited[rank] == MISSING:
            back = schedule.kind[head] in (B, I)
            stage = schedule.stage[head] + (1 if back else -1)
            needed = f"{'B' if back else 'F'}{schedule.microbatch[head]} of stage {stage}"
            does = "sends" if schedule.has_communication else "runs"
            yield fault_at(schedule, head, "deadlock", f"waits with {words(schedule, head)} for {needed}, "
                           f"which no rank {does}")  # fmt: skip

    rank, seen = next((rank for rank in stuck if awaited[rank] >= 0), -1), []
    while rank >= 0 and rank not in seen:  # each stuck rank waits for one other
        seen.append(rank)
        rank = int(schedule.rank[awaited[rank]]) if awaited[rank] >= 0 else -1
    if rank < 0:
        return
    parts = []
    for member in seen[seen.index(rank) :]:
        owner = int(schedule.rank[awaited[member]])
        when = f"rank {owner} runs only after {words(schedule, stuck[owner])}"
        if owner == member:
            when = "comes later in its own row"
        parts.append(
            f"rank {member} (place {place_of(schedule, stuck[member])}) waits with {words(schedule, stuck[member])} "
            f"for {words(schedule, awaited[member])}, which {when}"
        )
    yield Fault("deadlock", rank, place_of(schedule, stuck[rank]), "deadlock: " + "; ".join(parts))


def _awaited(schedule: Schedule, ticks: np.ndarray, head: int) -> int:
    """What an action that never runs waits for: its own input, or that of the one it is overlapped with."""
    for needs in (schedule.needs.message, pair_needs(schedule)):
        need = int(needs[head])
        if need == MISSING or (need != NOTHING and ticks[need] < 0):
            return need
    return NOTHING
