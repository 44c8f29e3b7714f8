"""Preparations that every executor makes before it runs a schedule."""

from __future__ import annotations

from functools import lru_cache

from tplab.errors import ScheduleError
from tplab.schedules.action import Action
from tplab.schedules.check import check
from tplab.schedules.communication import with_communication
from tplab.schedules.placement import Placement
from tplab.schedules.schedule import Schedule


def require_ranks(schedule: Schedule, num_ranks: int, label: str) -> None:
    """Raise unless `schedule` is a Schedule with one row per rank of the axis that `label` names."""
    if not isinstance(schedule, Schedule):
        raise TypeError(f"train_batch takes a tplab.schedules.Schedule, as gpipe(4, 8), not {schedule!r}")
    if schedule.num_ranks != num_ranks:
        raise ScheduleError(
            f"{schedule!r} is for {schedule.num_ranks} ranks, but axis {label!r} has {num_ranks}; make the schedule "
            f"with ranks={num_ranks}, or the mesh with {label}={schedule.num_ranks}"
        )


def program(schedule: Schedule, is_forward_only: bool = False) -> list[tuple[Action, ...]]:
    """What each rank executes: its row, or only the row's forward passes, with sends and receives written out. Raises
    ScheduleError, as `check` does, if the schedule is not right."""
    ticks = None if schedule.given_ticks is None else schedule.given_ticks.tobytes()
    return _program(schedule, schedule.placement, ticks, is_forward_only)


@lru_cache(maxsize=16)
def _program(
    schedule: Schedule, placement: Placement, ticks: bytes | None, is_forward_only: bool
) -> list[tuple[Action, ...]]:
    """Cached, so it is computed once for all ranks. Schedules compare equal even if their placements and ticks
    differ, so these are part of the cache's key: `check` looks at them."""
    check(schedule)
    if is_forward_only:
        schedule = schedule.forward_only()
    return (schedule if schedule.has_communication else with_communication(schedule)).by_rank()
