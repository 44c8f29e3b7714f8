"""A schedule that was executed: its measured times and bytes as costs, and its timeline beside the predicted one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from tplab.errors import ScheduleError
from tplab.mesh import Axis
from tplab.schedules.action import COMPUTE, Action, B, F, I, W, in_words
from tplab.schedules.costs import Costs
from tplab.schedules.schedule import Schedule
from tplab.schedules.simulate import simulate
from tplab.schedules.simulation import Simulation
from tplab.trace.trace import Trace


def measured_costs(schedule: Schedule, trace: Trace, *, axis: Axis = "pp", batch: int = -1) -> Costs:
    """The measured times and bytes of a run of `train_batch`, as costs for `simulate`: how long each action took, the
    bytes of each stage's activations, and the part of them that I frees.

    Every message is taken to last as long as the fastest one: the others may have waited for their receiver.

    trace   the trace of the run; if it holds several batches, `batch` says which one
    axis    the axis of the pipeline; if the mesh has more axes, the group of rank 0 is measured
    """
    took = _times(schedule, trace, axis, batch)
    tables = {kind: np.zeros((schedule.num_stages, schedule.num_microbatches)) for kind in (F, B, I, W)}
    duration = took.busy
    for kind, table in tables.items():
        rows = np.flatnonzero(took.schedule.kind == kind)
        table[took.schedule.stage[rows], took.schedule.microbatch[rows]] = duration[rows]
    activation, part_freed = _bytes(took)
    messages = trace.select(kind="send", op="send", axis=axis)
    travel = messages.column("end") - messages.column("start")
    return Costs(
        tables[F],
        tables[I],
        tables[W],
        float(travel.min()) if len(travel) else 0.0,
        full_backward=tables[B] if bool(np.any(schedule.kind == B)) else None,
        unit=trace.unit,
        activation=activation,
        input_grad_frees=part_freed,
    )


def compare(
    schedule: Schedule | Simulation, trace: Trace, costs: Costs | None = None, *, axis: Axis = "pp", batch: int = -1
) -> Comparison:
    """The executed schedule beside the predicted one. The prediction uses `costs`, by default the measured ones.

    With measured costs, only the waiting is left to predict, so the residual is what the simulation does not model.
    With other costs, it also includes their errors.

    schedule   the one that was executed; or its simulation by `simulate`, which is then the prediction. The executors
               run an overlapped pair one after the other, so it is predicted that way unless `costs` gives an overlap
    axis, batch   as in `measured_costs`

    A JAX program runs in lock-step: pass simulate(schedule, costs, lockstep=True).
    Raises ScheduleError if the trace is of another schedule, or measures time in another unit.
    """
    if isinstance(schedule, Simulation):
        if costs is not None:
            raise ScheduleError("this run was simulated with costs of its own; for other costs, give the schedule")
        predicted, took = _actions_only(schedule), _times(schedule.schedule, trace, axis, batch)
    else:
        costs = measured_costs(schedule, trace, axis=axis, batch=batch) if costs is None else costs
        took = _times(schedule, trace, axis, batch)
        predicted = simulate(took.schedule if costs.overlap else _one_by_one(took.schedule), costs)
    if predicted.costs.unit != trace.unit:
        raise ScheduleError(
            f"the prediction counts its time in {_UNITS[predicted.costs.unit]}, and the trace in {_UNITS[trace.unit]}; "
            f"predict with measured_costs(schedule, trace), or with Costs(..., unit={trace.unit!r})"
        )
    return Comparison(**vars(took), predicted=predicted)


_UNITS = {"s": "seconds", "steps": "steps"}


def measured_strip(
    run: Simulation, rank: int, trace: Trace, *, axis: Axis = "pp", batch: int = -1
) -> tuple[np.ndarray, np.ndarray]:
    """(times, bytes held from then on) of the rank at position `rank` of `axis`: a staircase that begins at 0.

    The bytes come from `trace` and the times from `run`, so you can draw it over `run.activation_bytes(rank)`, whose
    bytes are predicted too. As there, F allocates its bytes when it begins, and the others free theirs when they end.

    trace, axis, batch   as in `measured_costs`
    Raises ScheduleError if the trace is of another schedule than `run`.
    """
    took = _times(run.schedule, trace, axis, batch)
    if (took.held < 0).any():
        raise ScheduleError("the trace does not say what its ranks held; it must be of a run of train_batch")
    own = took.schedule.rows[rank]
    indices = np.flatnonzero(run.schedule.kind <= max(COMPUTE))[own]
    times = np.where(took.schedule.kind[own] == F, run.start[indices], run.end[indices])
    order = np.argsort(times, kind="stable")
    return np.append(0.0, times[order]), np.append(0.0, took.held[own][order])


@dataclass(frozen=True, eq=False)
class _Times:
    """What was measured of a `Comparison`, whose docstring explains it; held: the bytes that the rank then held."""

    schedule: Schedule
    start: np.ndarray
    end: np.ndarray
    busy: np.ndarray
    held: np.ndarray
    origin: float
    ranks: tuple[int, ...]
    axis: Axis
    batch: int
    num_batches: int


@dataclass(frozen=True, eq=False)
class Comparison(_Times):
    """When each action of a schedule ran: predicted, and measured (counted from the first start). Arrays are in the
    order of the schedule's columns.

    busy     how long the rank computed within each action: less than end - start if it waited for a message
    origin   the time of the first start in the trace
    ranks    the ranks that ran the schedule's rows, along `axis` of the trace's mesh
    batch    which of the trace's `num_batches` batches of this schedule it is, from 0
    """

    predicted: Simulation

    @property
    def makespan(self) -> float:
        """The measured makespan."""
        return float(self.end.max() - self.start.min())

    @property
    def residual(self) -> float:
        """Measured makespan - predicted makespan."""
        return self.makespan - self.predicted.makespan

    @cached_property
    def lag(self) -> np.ndarray:
        """How much later than predicted each action started [actions]."""
        return self.start - (self.predicted.start - self.predicted.start.min())

    def __str__(self) -> str:
        """One line per rank: its end, predicted and measured; then the makespan."""
        schedule = self.predicted.schedule
        origin = self.predicted.start.min()
        lines = [f"{'rank':>4} {'predicted':>10} {'measured':>10} {'residual':>10}"]
        for rank in range(schedule.num_ranks):
            last = int(schedule.offsets[rank + 1]) - 1
            if last < schedule.offsets[rank]:
                continue  # it has nothing to do
            lines.append(_line(str(rank), self.predicted.end[last] - origin, self.end[last]))
        return "\n".join([*lines, _line("all", self.predicted.makespan, self.makespan)])

    def __repr__(self) -> str:
        return (
            f"{self.predicted.schedule.name or 'schedule'}: predicted {self.predicted.makespan:.4g}, measured "
            f"{self.makespan:.4g}, residual {self.residual:+.4g}"
        )


def _times(schedule: Schedule, trace: Trace, axis: Axis, batch: int) -> _Times:
    """Follow each rank's row through the trace, once per batch if there are several."""
    schedule = schedule.compute_only()
    group = trace.mesh.group(0, axis)
    if len(group) != schedule.num_ranks:
        raise ScheduleError(f"the trace has {len(group)} ranks along {axis!r}, and the schedule {schedule.num_ranks}")
    columns = np.zeros((4, len(schedule)))
    start, end, busy, held = columns
    if not len(schedule):
        raise ScheduleError("the schedule has no actions, so there are no times to compare")
    num_batches = 0
    for rank, row in enumerate(schedule.by_rank()):
        runs = list(_batches(row, trace, group[rank]))
        if not row:
            continue
        if not -len(runs) <= batch < len(runs):
            raise ScheduleError(
                f"the trace has {len(runs)} batches of this schedule on rank {group[rank]}, so there is no batch "
                f"{batch}; it must be the trace of a run of train_batch with it"
            )
        columns[:, schedule.rows[rank]] = np.transpose(runs[batch])
        num_batches = max(num_batches, len(runs))
    origin, num_batches = float(start.min()), max(num_batches, 1)
    return _Times(
        schedule, start - origin, end - origin, busy, held, origin, group, axis, batch % num_batches, num_batches
    )


def _one_by_one(schedule: Schedule) -> Schedule:
    if not schedule.joined.any():
        return schedule
    rows = [[action.alone() for action in row] for row in schedule.by_rank()]
    return Schedule(rows, schedule.placement, schedule.name)


def _actions_only(run: Simulation) -> Simulation:
    """The simulation without gradient sums and optimizer steps: a trace has only the F, B, I and W of a batch."""
    keep = run.schedule.kind <= max(COMPUTE)
    if keep.all():
        return run
    index = np.append(np.where(keep, np.cumsum(keep) - 1, -1), -1)  # the last one is for "none"
    columns = {name: getattr(run, name)[keep] for name in ("start", "end", "duration", "sent")}
    both = np.tile(keep, 2)  # of actions and of messages
    after = np.append(np.where(both, np.cumsum(both) - 1, -1), -1)[run.after[both]]
    columns |= {"waits_for": index[run.waits_for[keep]], "after": after}
    return replace(run, schedule=run.schedule.compute_only(), **columns)


_ACTION = re.compile(r"[FBIW]\d+")


def _batches(row: Sequence[Action], trace: Trace, rank: int) -> Iterator[list[tuple[float, float, float, int]]]:
    """(start, end, busy, held) of each action of a row, for each time the whole row was run. An action may be several
    events."""
    names = [(action.label, f"stage {action.stage}") for action in row]
    made = []
    for event in trace.select(rank=rank, kind="compute").events:
        name = event.op, event.where
        if not (_ACTION.fullmatch(event.op) and event.where.startswith("stage ")):
            continue  # other work of this rank
        if made and name == names[len(made) - 1]:
            made[-1] = made[-1][0], event.end, made[-1][2] + event.duration, event.held
            continue
        if len(made) == len(row):
            yield made
            made = []
        if not row or name != names[len(made)]:
            has = in_words(row[len(made)]) if row else "nothing"
            raise ScheduleError(
                f"rank {rank} ran {event.op} of {event.where} where the schedule has {has}; the trace must be of this "
                "schedule"
            )
        made.append((event.start, event.end, event.duration, event.held))
    if made and len(made) == len(row):
        yield made


def _bytes(took: _Times) -> tuple[list[float] | float, list[float] | float]:
    """Bytes that F of each stage keeps (the mean over microbatches), and the part that I frees."""
    schedule = took.schedule
    if (took.held < 0).any():  # a trace of something other than train_batch
        return 1.0, 0.0
    change = np.diff(took.held, prepend=0.0)  # each rank begins and ends with nothing
    means = []
    for kind, sign in ((F, 1), (I, -1)):
        rows = np.flatnonzero(schedule.kind == kind)
        count = np.bincount(schedule.stage[rows], minlength=schedule.num_stages)
        means.append(np.bincount(schedule.stage[rows], sign * change[rows], schedule.num_stages) / np.maximum(count, 1))
    kept, freed = means
    return kept.tolist(), (freed / np.maximum(kept, 1)).tolist()


def _line(who: str, predicted: float, measured: float) -> str:
    return f"{who:>4} {predicted:>10.4g} {measured:>10.4g} {measured - predicted:>+10.4g}"
