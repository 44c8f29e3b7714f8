"""The memory strip of a rank that ran a schedule: what it held for its backward passes, on the time of a prediction."""

from __future__ import annotations

import numpy as np

from tplab.errors import ScheduleError
from tplab.schedules.action import COMPUTE, in_words
from tplab.schedules.measured import Held
from tplab.schedules.simulation import Run


def measured_strip(run: Run, rank: int, held: Held) -> tuple[np.ndarray, np.ndarray]:
    """(times, bytes held from then on) of one rank: a staircase that begins at 0.

    The bytes are measured, the times are those of `run`, so that it can be laid over `run.activation_bytes(rank)`,
    which is all predicted. As there, F takes its bytes when it begins, and the others let go when they end.

    held   what `train_batch(held=...)` filled on this rank, for the schedule of `run`
    Raises ScheduleError where it is of another one.
    """
    schedule = run.schedule.compute_only()
    ran = [(action, num_bytes) for action, num_bytes in held if action.is_compute]
    row = schedule.by_rank()[rank]
    for place, (action, (was, _)) in enumerate(zip(row, ran)):
        if action.alone() != was.alone():
            raise ScheduleError(
                f"rank {rank} ran {in_words(was)} as action {place} where the schedule has {in_words(action)}; `held` "
                "must be of a run of this schedule, and of this rank"
            )
    if len(row) != len(ran):
        raise ScheduleError(f"rank {rank} has {len(row)} actions in the schedule and {len(ran)} in `held`")
    computes = np.flatnonzero(run.schedule.kind <= max(COMPUTE))
    places = computes[schedule.offsets[rank] : schedule.offsets[rank + 1]]
    is_forward = np.array([action.kind == "F" for action in row], bool)
    times = np.where(is_forward, run.start[places], run.end[places])
    order = np.argsort(times, kind="stable")
    return np.append(0.0, times[order]), np.append(0.0, np.array([num_bytes for _, num_bytes in ran])[order])
