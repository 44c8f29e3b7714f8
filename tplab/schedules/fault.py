"""A fault: one thing that is wrong with a schedule, in words."""

from __future__ import annotations

from dataclasses import dataclass

from tplab.schedules.action import in_words
from tplab.schedules.schedule import Schedule


@dataclass(frozen=True)
class Fault:
    """What kind of fault, on which rank, at which place of its row (-1: at none, something is missing), in words."""

    kind: str
    rank: int
    place: int
    message: str

    def __str__(self) -> str:
        return self.message


def fault_at(schedule: Schedule, index: int, kind: str, what: str) -> Fault:
    """The fault that the action at `index` of the columns has; `what` follows "rank 2 (place 5)"."""
    rank, place = int(schedule.rank[index]), place_of(schedule, index)
    return Fault(kind, rank, place, f"rank {rank} (place {place}) {what}")


def place_of(schedule: Schedule, index: int) -> int:
    """Where in its rank's row an action is, from 0."""
    return int(index - schedule.offsets[schedule.rank[index]])


def words(schedule: Schedule, index: int) -> str:
    """ "F3 of stage 2"."""
    return in_words(schedule.action(index))
