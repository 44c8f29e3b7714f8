"""What every executor asks of a schedule before it runs it."""

from __future__ import annotations

from tplab.errors import ScheduleError
from tplab.schedules.schedule import Schedule


def require_ranks(schedule: Schedule, num_ranks: int, label: str) -> None:
    """Raise unless it is a schedule, and for as many ranks as there are along the axis of this name."""
    if not isinstance(schedule, Schedule):
        raise TypeError(f"train_batch takes a tplab.schedules.Schedule, as gpipe(4, 8), not {schedule!r}")
    if schedule.num_ranks != num_ranks:
        raise ScheduleError(
            f"{schedule!r} is for {schedule.num_ranks} ranks, and axis {label!r} has {num_ranks}; make the schedule "
            f"with ranks={num_ranks}, or the mesh with {label}={schedule.num_ranks}"
        )
