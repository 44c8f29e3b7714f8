"""Checks: everything that can be wrong with a schedule, in words; and what an executor runs of a right one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice, zip_longest

import numpy as np

from tplab.errors import ScheduleError
from tplab.schedules.action import CODE, Action, B, F, I, W, in_words
from tplab.schedules.communication import transfers, with_communication
from tplab.schedules.costs import memory_limits
from tplab.schedules.placement import Placement
from tplab.schedules.relax import MISSING, NOTHING
from tplab.schedules.schedule import Schedule
from tplab.schedules.simulation import activation_changes, peak_activations

_SHOWN = 10


@dataclass(frozen=True)
class Fault:
    """A fault of a schedule: its kind, its rank, its index in that row (-1 if something is missing), and its words."""

    kind: str
    rank: int
    index: int
    message: str

    def __str__(self) -> str:
        return self.message


Found = Iterator[Fault | tuple[int, str]]
"""Faults; or of each an action's index in the columns, and what continues a sentence that begins "rank 2 (index 5)"."""


def check(schedule: Schedule, memory_limit: float | Sequence[float] | None = None) -> None:
    """Raise ScheduleError unless `schedule` is right; the message lists each fault: which action, on which rank.

    A schedule is right if each stage's forward and backward (B, or I and W) run exactly once per microbatch, both on
    the same rank, and that rank holds the stage; if no action runs before what it needs, on its own rank or another;
    if no ranks wait for each other; and if sends and receives, where written out, have the same order at both ends.

    memory_limit   the most microbatches whose activations a rank may hold (one figure, or one per rank)
    """
    found = faults(schedule, memory_limit, at_most=_SHOWN + 1)
    if found:
        shown = [f"- {fault}" for fault in found[:_SHOWN]] + (["- and more"] if len(found) > _SHOWN else [])
        raise ScheduleError(f"{schedule.name or 'the schedule'} is not right:\n" + "\n".join(shown))


def faults(schedule: Schedule, memory_limit: float | Sequence[float] | None = None, at_most: int = 100) -> list[Fault]:
    """The first `at_most` faults for which `check` would raise; an empty list if the schedule is right."""
    finders: dict[Callable[[Schedule], Found], str] = {
        _strangers: "stranger",
        _miscounted: "twice",
        _misplaced: "misplaced",
        _own_order: "order",
        _pairs: "pair",
        _deadlocks: "deadlock",
        _ticks: "tick",
        _transfers: "transfer",
        _last_things: "order",
    }
    if memory_limit is not None:
        finders[partial(_memory, limit=memory_limit)] = "memory"
    return list(islice(_faults(schedule, finders), at_most))


def require_runnable(schedule: Schedule) -> None:
    """Raise ScheduleError if some rank cannot run its row to the end, and say why."""
    for fault in _faults(schedule, {_own_order: "order", _misplaced: "misplaced", _deadlocks: "deadlock"}):
        raise ScheduleError(f"{schedule.name or 'the schedule'} cannot run: {fault}")


def _faults(schedule: Schedule, finders: Mapping[Callable[[Schedule], Found], str]) -> Iterator[Fault]:
    """What each finder finds, in turn; its value is the kind of its faults."""
    for find, kind in finders.items():
        for found in find(schedule):
            if isinstance(found, Fault):
                yield found
            else:
                rank, own = int(schedule.rank[found[0]]), schedule.index_in_row(found[0])
                yield Fault(kind, rank, own, f"rank {rank} (index {own}) {found[1]}")


def _strangers(schedule: Schedule) -> Found:
    """Actions that need a stage or a microbatch but name none."""
    nameless = (schedule.kind <= CODE["RECV_B"]) & ((schedule.stage < 0) | (schedule.microbatch < 0))
    for index in np.flatnonzero(nameless).tolist():
        yield index, f"runs {schedule.action(index)}, which names no stage or microbatch"


def _miscounted(schedule: Schedule) -> Found:
    """Actions that are missing, and actions that appear twice."""
    shape = (schedule.num_stages, schedule.num_microbatches)
    named = (schedule.stage >= 0) & (schedule.microbatch >= 0)
    key = schedule.stage.astype(np.intp) * shape[1] + schedule.microbatch
    count = [np.bincount(key[named & (schedule.kind == kind)], minlength=shape[0] * shape[1]) for kind in (F, B, I, W)]
    wrong = (count[F] != 1) | (count[B] + count[I] != 1) | (count[W] != count[I])
    holders = {stage: rank for rank, held in enumerate(schedule.placement) for stage in held}
    for cell in np.flatnonzero(wrong).tolist():
        stage, k = divmod(cell, shape[1])
        for kind in (F, B, I, W):
            ran = np.flatnonzero(named & (schedule.kind == kind) & (key == cell)).tolist()
            for index in ran[1:]:
                first = f"rank {schedule.rank[ran[0]]} has run it at index {schedule.index_in_row(ran[0])}"
                yield index, f"runs {schedule.in_words(index)} again: {first}"
        forward = int(schedule.needs.forward[stage, k])
        rank = int(schedule.rank[forward]) if forward >= 0 else holders.get(stage, -1)
        who, never = (f"rank {rank}", "never runs") if rank >= 0 else ("no rank", "runs")
        f, b, i, w = (int(counts[cell]) for counts in count)
        done = f"B{k} has done that already" if b else f"there is no I{k} before it"
        for is_so, kind, what in (
            (not f, "missing", f"{never} F{k} of stage {stage}"),
            (not b + i, "missing", f"{never} B{k} of stage {stage}, nor I{k}: its backward is missing"),
            (b and i, "twice", f"runs B{k} and I{k} of stage {stage}: the input gradient is computed twice"),
            (i and not w, "missing", f"runs I{k} of stage {stage} and never W{k}: its weights get no gradient"),
            (w and not i, "twice", f"runs W{k} of stage {stage}, and {done}"),
        ):
            if is_so:
                yield Fault(kind, rank, -1, f"{who} {what}")


def _misplaced(schedule: Schedule) -> Found:
    """Actions on a rank that does not hold their stage, and backwards away from their forward."""
    for index in np.flatnonzero((schedule.slot < 0) & (schedule.stage >= 0)).tolist():
        held = ", ".join(map(str, schedule.placement[schedule.rank[index]])) or "none"
        yield index, f"runs {schedule.in_words(index)}, a stage that it does not hold; it holds {held}"
    own = schedule.needs.own[0]
    for index in np.flatnonzero(schedule.crosses(own)).tolist():
        left = f"{schedule.in_words(own[index])} has left on rank {schedule.rank[own[index]]}"
        yield index, f"runs {schedule.in_words(index)}, which needs what {left}"


def _own_order(schedule: Schedule) -> Found:
    """Actions that come before, or without, something that their own rank must have done first."""
    indices = np.arange(len(schedule))
    for own in schedule.needs.own:
        for index in np.flatnonzero((own > indices) & ~schedule.crosses(own)).tolist():
            later = f"which it needs and which comes at index {schedule.index_in_row(own[index])}"
            yield index, f"runs {schedule.in_words(index)} before {schedule.in_words(own[index])}, {later}"
    for index in np.flatnonzero(schedule.needs.own[0] == MISSING).tolist():
        action = schedule.action(index)
        letter = {"B": "F", "I": "F", "W": "I", "SEND_F": "F", "SEND_B": "B"}[action.kind]
        needed = f"{letter}{action.microbatch} of stage {action.stage}, which it needs"
        yield index, f"runs {in_words(action)}, and no rank runs {needed}"
    for index in np.flatnonzero(schedule.needs.own[1] == MISSING).tolist():
        yield index, f"runs {schedule.in_words(index)} and never receives its input"


def _pairs(schedule: Schedule) -> Found:
    """Overlapped pairs that cannot overlap."""
    for index in np.flatnonzero(schedule.joined).tolist():
        first, second = schedule.action(index - 1), schedule.action(index)
        same = (first.stage, first.microbatch) == (second.stage, second.microbatch)
        if same or schedule.needs.message[index] == index - 1:
            why = "the second needs the first"
        elif first.joined or not first.is_compute or not second.is_compute:
            why = "a pair is two computations"
        else:
            continue
        yield index, f"overlaps {in_words(second)} with {in_words(first)}: {why}"


def _deadlocks(schedule: Schedule) -> Found:
    """A fault for each rank whose input never arrives, and one for a cycle of ranks that wait for each other."""
    ticks = schedule.earliest
    never = np.flatnonzero(ticks < 0)
    ranks, first = np.unique(schedule.rank[never], return_index=True)
    stuck = dict(zip(ranks.tolist(), never[first].tolist()))  # rank -> its first action that never runs
    awaited = {rank: _awaited(schedule, ticks, head) for rank, head in stuck.items()}

    for rank, head in stuck.items():
        if awaited[rank] == MISSING:
            back = schedule.kind[head] in (B, I)
            stage = schedule.stage[head] + (1 if back else -1)
            needed = f"{'B' if back else 'F'}{schedule.microbatch[head]} of stage {stage}"
            does = "sends" if schedule.has_communication else "runs"
            yield head, f"cannot run {schedule.in_words(head)} before {needed}, which no rank {does}"

    rank, seen = next((rank for rank in stuck if awaited[rank] >= 0), -1), []
    while rank >= 0 and rank not in seen:  # each stuck rank waits for one other
        seen.append(rank)
        rank = int(schedule.rank[awaited[rank]]) if awaited[rank] >= 0 else -1
    if rank < 0:
        return
    parts = []
    for member in seen[seen.index(rank) :]:
        owner = int(schedule.rank[awaited[member]])
        when = f"rank {owner} runs only after {schedule.in_words(stuck[owner])}"
        if owner == member:
            when = "comes later in its own row"
        parts.append(
            f"rank {member} (index {schedule.index_in_row(stuck[member])}) cannot run "
            f"{schedule.in_words(stuck[member])} before {schedule.in_words(awaited[member])}, which {when}"
        )
    yield Fault("deadlock", rank, schedule.index_in_row(stuck[rank]), "deadlock: " + "; ".join(parts))


def _awaited(schedule: Schedule, ticks: np.ndarray, head: int) -> int:
    """What an action that never runs waits for: its own input, or that of the action overlapped with it."""
    for needs in (schedule.needs.message, schedule.needs.partner):
        need = int(needs[head])
        if need == MISSING or (need != NOTHING and ticks[need] < 0):
            return need
    return NOTHING


def _ticks(schedule: Schedule) -> Found:
    """If ticks are part of the schedule: two actions in one tick, or an action before its input has arrived."""
    ticks, message = schedule.given_ticks, schedule.needs.message
    if ticks is None:
        return
    same_row = schedule.rank[1:] == schedule.rank[:-1]
    for index in (np.flatnonzero(same_row & (np.diff(ticks) <= 0)) + 1).tolist():
        before = f"not after {schedule.in_words(index - 1)} at tick {ticks[index - 1]}"
        yield index, f"runs {schedule.in_words(index)} at tick {ticks[index]}, {before}"
    for index in np.flatnonzero((message >= 0) & (ticks <= ticks[np.maximum(message, 0)])).tolist():
        needed = int(message[index])
        when = f"is run by rank {schedule.rank[needed]} at tick {ticks[needed]}"
        needs = f"{schedule.in_words(needed)}, which it needs, {when}; tick {ticks[needed] + 1} is the first possible"
        yield index, f"runs {schedule.in_words(index)} at tick {ticks[index]}, but {needs}"


def _transfers(schedule: Schedule) -> Found:
    """Sends and receives that do not match: between two ranks they must have the same order at both ends."""
    ends = transfers(schedule) if schedule.has_communication else {}
    for a, b in sorted({(min(pair), max(pair)) for pair in ends}):
        for number, (mine, theirs) in enumerate(zip_longest(ends.get((a, b), []), ends.get((b, a), []))):
            if mine is None or theirs is None or mine[0] != theirs[0]:
                texts = [f"rank {rank} has {schedule.in_words(end[1]) if end else 'nothing'}"
                         for rank, end in ((a, mine), (b, theirs)) if rank >= 0]  # fmt: skip
                what = f"number {number} of what ranks {a} and {b} exchange: {' and '.join(texts)}"
                index = next(end[1] for end in (mine, theirs) if end)
                yield index, f"does not meet the other end as {what}; so they wait for each other forever"
                break


def _last_things(schedule: Schedule) -> Found:
    """Anything after an optimizer step, and gradient sums before the last gradient."""
    for index in np.flatnonzero(schedule.kind == CODE["STEP"]).tolist():
        if index + 1 < schedule.offsets[schedule.rank[index] + 1]:
            yield index, f"takes its optimizer step before {schedule.in_words(index + 1)}"
    for index in np.flatnonzero(schedule.kind == CODE["REDUCE_GRAD"]).tolist():
        rest = np.arange(index + 1, int(schedule.offsets[schedule.rank[index] + 1]))
        late = rest[(schedule.stage[rest] == schedule.stage[index]) & np.isin(schedule.kind[rest], (B, W))]
        if late.size:
            before = f"{schedule.in_words(int(late[0]))}, which adds to them"
            yield index, f"sums the gradients of stage {schedule.stage[index]} before {before}"


def _memory(schedule: Schedule, limit: float | Sequence[float]) -> Found:
    """Ranks that hold more activations than they may."""
    limits = memory_limits(limit, schedule.num_ranks)
    peaks = peak_activations(schedule)
    for rank in np.flatnonzero(peaks > limits + 1e-9).tolist():
        held = np.cumsum(activation_changes(schedule)[schedule.rows[rank]]) / schedule.stages_per_rank
        index = int(schedule.offsets[rank] + np.argmax(held > limits[rank] + 1e-9))
        since = f"from {schedule.in_words(index)} on; its peak is {peaks[rank]:g}"
        yield index, f"holds more microbatches than its limit of {limits[rank]:g} {since}"


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
