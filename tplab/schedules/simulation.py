"""A simulation: how long a schedule took, where ranks were idle and why, and what they held in memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from tplab.schedules.action import CODE, Action, B, F, I, W, in_words
from tplab.schedules.as_trace import as_trace
from tplab.schedules.bounds import Bounds, lower_bounds
from tplab.schedules.costs import Costs
from tplab.schedules.schedule import Schedule
from tplab.trace.trace import Trace


@dataclass(frozen=True)
class Idle:
    """A stretch in which a rank does nothing, and why.

    before   the action it comes before; None after the rank's last one
    waits_for, from_rank   the action whose message it waits for, and the rank that runs it; None if there is none
    """

    rank: int
    start: float
    end: float
    before: Action | None
    waits_for: Action | None
    from_rank: int | None

    @property
    def duration(self) -> float:
        return self.end - self.start

    def __str__(self) -> str:
        if self.before is None:
            why = "it is done, the other ranks are not"
        elif self.waits_for is None:
            why = f"the other ranks are not ready for the tick of its {in_words(self.before)}"
        else:
            where = "" if self.from_rank == self.rank else f" from rank {self.from_rank}"
            why = f"its {in_words(self.before)} needs {in_words(self.waits_for)}{where}"
        return f"rank {self.rank} is idle from {self.start:g} to {self.end:g}: {why}"


@dataclass(frozen=True, eq=False)
class Simulation:
    """A simulated schedule. Arrays are in the order of the schedule's columns.

    start, end   of each action
    duration     how long each action occupies its rank; the second of an overlapped pair counts as 0
    sent         when each action's message had left (at the action's end, or later where links queue)
    waits_for    the index of the action whose message decided when this one started; -1 if its own rank did
    after        what held up each action, then what held up each action's message, as an index into this array
                 [2 actions]; -1: nothing did
    lockstep     whether the ranks took each tick together
    """

    schedule: Schedule
    costs: Costs
    start: np.ndarray
    end: np.ndarray
    duration: np.ndarray = field(repr=False)
    sent: np.ndarray = field(repr=False)
    waits_for: np.ndarray = field(repr=False)
    after: np.ndarray = field(repr=False)
    lockstep: bool = False

    # --- time ----------------------------------------------------------------------------------------------------

    @cached_property
    def makespan(self) -> float:
        """From the first start to the last end of all ranks."""
        return float(self.end.max(initial=0.0) - self.start.min(initial=np.inf)) if len(self.end) else 0.0

    @cached_property
    def spans(self) -> np.ndarray:
        """From each rank's own first start to its own last end [ranks]."""
        filled = np.diff(self.schedule.offsets) > 0
        spans = np.zeros(self.schedule.num_ranks)
        first, last = self.schedule.offsets[:-1][filled], self.schedule.offsets[1:][filled] - 1
        spans[filled] = self.end[last] - self.start[first]
        return spans

    @property
    def span(self) -> float:
        """The longest of the ranks' own spans: what the zero-bubble papers report."""
        return float(self.spans.max())

    @cached_property
    def busy(self) -> np.ndarray:
        """Time each rank works [ranks]."""
        return np.bincount(self.schedule.rank, self.duration, self.schedule.num_ranks)

    @property
    def idle(self) -> np.ndarray:
        """Time each rank idles within the makespan [ranks]."""
        return self.makespan - self.busy

    @property
    def bubble_fraction(self) -> float:
        """idle / (ranks x makespan)."""
        return float(self.idle.mean() / self.makespan) if self.makespan else 0.0

    @property
    def bubble_over_ideal(self) -> float:
        """idle / (ranks x ideal time), the other metric in use; the ideal time is the time without bubbles."""
        return float(self.idle.sum() / self.busy.sum()) if self.busy.sum() else 0.0

    @cached_property
    def bounds(self) -> Bounds:
        """The lower bounds for schedules of this shape, given these costs."""
        return lower_bounds(self.schedule, self.costs)

    @property
    def gap(self) -> float:
        """How far the makespan is above its proven lower bound: 0.1 is ten percent."""
        return self.makespan / self.bounds.makespan - 1 if self.bounds.makespan else 0.0

    # --- why -----------------------------------------------------------------------------------------------------

    def idles(self) -> list[Idle]:
        """Every stretch in which a rank idles, rank by rank, in order of time, with its reason."""
        schedule, found = self.schedule, []
        first, last = float(self.start.min(initial=0.0)), float(self.end.max(initial=0.0))
        for rank in range(schedule.num_ranks):
            rows = np.arange(len(schedule))[schedule.rows[rank]]
            begins = np.append(self.start[rows], last)
            ends = np.maximum.accumulate(np.append(first, self.end[rows]))
            for gap in np.flatnonzero(begins > ends).tolist():
                row = int(rows[gap]) if gap < len(rows) else None
                cause = -1 if row is None else int(self.waits_for[row])
                found.append(
                    Idle(
                        rank,
                        float(ends[gap]),
                        float(begins[gap]),
                        None if row is None else schedule.action(row),
                        None if cause < 0 else schedule.action(cause),
                        None if cause < 0 else int(schedule.rank[cause]),
                    )
                )
        return found

    def critical_path(self) -> list[Action]:
        """The chain of actions that sets the makespan, first to last: shorten any of them and the step is shorter."""
        return [self.schedule.action(index) for index in self.critical_indices()]

    def critical_indices(self) -> list[int]:
        """The critical path as indices into the schedule's columns."""
        if not len(self.end):
            return []
        path = [int(np.argmax(self.end))]
        while (before := int(self.after[path[-1]])) >= 0:
            path.append(before)
        return [index for index in path[::-1] if index < len(self.end)]

    # --- memory --------------------------------------------------------------------------------------------------

    @cached_property
    def peak_activations(self) -> np.ndarray:
        """The most activations each rank holds at once, in microbatches (a virtual stage's count 1/v) [ranks].

        F adds them, W or B frees them.
        """
        return peak_activations(self.schedule)

    @cached_property
    def peak_bytes(self) -> np.ndarray:
        """The same in bytes of `costs.activation`, of which I frees its part [ranks]."""
        return _peaks(self.schedule, self._bytes())

    def activations(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """(times, microbatches held from then on) of one rank: a staircase that begins at 0."""
        return self._staircase(rank, activation_changes(self.schedule) / self.schedule.stages_per_rank)

    def activation_bytes(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """(times, bytes held from then on) of one rank: I frees a part, W the rest."""
        return self._staircase(rank, self._bytes())

    def _staircase(self, rank: int, change: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rows = self.schedule.rows[rank]
        change, takes = change[rows], change[rows] > 0
        times = np.where(takes, self.start[rows], self.end[rows])  # allocated when F begins, freed when W ends
        rows_that_change = np.flatnonzero(change)
        order = rows_that_change[np.argsort(times[rows_that_change], kind="stable")]
        return np.append(0.0, times[order]), np.append(0.0, np.cumsum(change[order]))

    def _bytes(self) -> np.ndarray:
        kept, part = (self.costs.of_actions(name, self.schedule) for name in ("activation", "input_grad_frees"))
        kind = self.schedule.kind
        return np.select(
            [kind == F, kind == B, kind == I, kind == W], [kept, -kept, -part * kept, (part - 1) * kept], 0.0
        )

    # --- reporting -----------------------------------------------------------------------------------------------

    @cached_property
    def trace(self) -> Trace:
        """The simulation as a `Trace`: what every rank did, what was sent, and who waited."""
        return as_trace(self.schedule, self.costs, self.start, self.end, self.sent, self.waits_for, self.after)

    def table(self) -> str:
        """One line per rank: busy, idle, span, peak activations, and what it waited for longest."""
        lines = [f"{'rank':>4} {'busy':>9} {'idle':>9} {'span':>9} {'peak':>6}  waits longest"]
        longest: dict[int, Idle] = {}
        for idle in self.idles():
            if idle.rank not in longest or idle.duration > longest[idle.rank].duration:
                longest[idle.rank] = idle
        for rank in range(self.schedule.num_ranks):
            why = str(longest[rank]).split(" ", 2)[2] if rank in longest else ""
            figures = (self.busy[rank], self.idle[rank], self.spans[rank])
            lines.append(
                f"{rank:>4} "
                + " ".join(f"{x:>9.4g}" for x in figures)
                + f" {self.peak_activations[rank]:>6.4g}  {why}".rstrip()
            )
        return "\n".join(lines)

    def __repr__(self) -> str:
        return (
            f"{self.schedule.name or 'schedule'}: makespan {self.makespan:g}, span {self.span:g}, "
            f"bubble {self.bubble_fraction:.4f} of the makespan ({self.bubble_over_ideal:.4f} of the ideal time), "
            f"peak {self.peak_activations.max():g} microbatches"
        )


def peak_activations(schedule: Schedule) -> np.ndarray:
    """The most microbatches whose activations each rank holds at once [ranks]; the order of its row decides it."""
    return _peaks(schedule, activation_changes(schedule)) / schedule.stages_per_rank


def activation_changes(schedule: Schedule) -> np.ndarray:
    """+1 where a stage's activations are allocated, -1 where they are freed [actions]."""
    change = np.zeros(max(CODE.values()) + 1, np.intp)
    change[[F, B, W]] = 1, -1, -1
    return change[schedule.kind]


def _peaks(schedule: Schedule, change: np.ndarray) -> np.ndarray:
    """The largest running sum of `change` on each rank, or 0 [ranks]."""
    total = np.cumsum(change)
    peaks = np.zeros(schedule.num_ranks)
    filled = np.flatnonzero(np.diff(schedule.offsets))
    if filled.size:
        first = schedule.offsets[filled]
        before = total[first] - change[first]
        peaks[filled] = np.maximum(np.maximum.reduceat(total, first) - before, 0)
    return peaks
