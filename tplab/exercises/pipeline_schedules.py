"""The exercises of lab 10: a rank's row of 1F1B, and two puzzles with a limit on time and memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tplab.errors import TplabError
from tplab.exercises.check import Verdict, untouched
from tplab.schedules import Action, Costs, Schedule, faults, one_f_one_b, simulate

Row = Callable[[int, int, int], str]
SIZES = ((2, 3), (4, 8), (3, 7), (4, 2), (1, 4), (5, 5))


def check_one_f_one_b(row: Row) -> Verdict:
    """Whether `row(rank, ranks, microbatches)` gives that rank's row of 1F1B, as text: "F0 F1 B0 ..."."""
    name = "one_f_one_b"
    for ranks, microbatches in SIZES:
        where = f"{ranks} ranks and {microbatches} microbatches"
        try:
            rows = [row(rank, ranks, microbatches) for rank in range(ranks)]
            if rows[0] is None or rows[0] is ...:
                return untouched(name)
            schedule = _of_rows(rows)
        except Exception as error:
            return Verdict(False, f"{name}: {type(error).__name__} with {where}: {error}")
        if schedule.num_microbatches != microbatches:
            return Verdict(False, f"{name}: with {where} its rows name {schedule.num_microbatches} microbatches.")
        wrong = faults(schedule, at_most=1)
        if wrong:
            return Verdict(False, f"{name}: with {where} it cannot run.\n{wrong[0]}{_hint(schedule)}")
        right = one_f_one_b(ranks, microbatches)
        if schedule != right:
            held, best = simulate(schedule).peak_activations, simulate(right).peak_activations
            rank = next(rank for rank in range(ranks) if schedule.by_rank()[rank] != right.by_rank()[rank])
            return Verdict(
                False,
                f"{name}: with {where} it runs, in {simulate(schedule).makespan:g} steps where 1F1B takes "
                f"{simulate(right).makespan:g}, and rank {rank} holds {held[rank]:g} microbatches where "
                f"{best[rank]:g} would do.{_hint(schedule)}",
            )
    listed = ", ".join(f"{ranks} x {microbatches}" for ranks, microbatches in SIZES)
    return Verdict(True, f"{name} is right, for ranks x microbatches {listed}.")


def _hint(schedule: Schedule) -> str:
    """What the numbers of forwards before the first backward say."""
    ranks, microbatches = schedule.num_ranks, schedule.num_microbatches
    ahead = [next((i for i, a in enumerate(row) if a.kind != "F"), len(row)) for row in schedule.by_rank()]
    known = {
        "Rank r runs r forwards ahead. Who waits longest for its first gradient, the first rank or the last?":
            [min(rank, microbatches - 1) + 1 for rank in range(ranks)],
        "One forward too many before the first backward: the last rank needs none ahead of its pair.":
            [min(ranks - rank, microbatches - 1) + 1 for rank in range(ranks)],
        "Every rank runs as many forwards ahead. The last one can send a gradient back at once.":
            [min(ranks - 1, microbatches - 1) + 1] * ranks,
        "All forwards come first: that is GPipe.": [microbatches] * ranks,
        "No forwards run ahead: each microbatch waits for the one before it to come back.": [1] * ranks,
    }  # fmt: skip
    return next((f"\n{hint}" for hint, pattern in known.items() if ahead == pattern and ranks > 1), "")


@dataclass(frozen=True)
class Puzzle:
    """A schedule is wanted for so many ranks and microbatches, F = I = W = 1 (B is I and W), whose makespan is at most
    `makespan`, and of whose ranks none holds more than `slots` microbatches."""

    name: str
    ranks: int
    microbatches: int
    makespan: float
    slots: float
    hint: str


TWO_RANKS = Puzzle(
    "two_ranks", 2, 3, 10, 3,
    "1F1B takes 12. Split each B of rank 1 into I and W, and let rank 0 have its gradients sooner.",
)  # fmt: skip
THREE_SLOTS = Puzzle(
    "three_slots", 4, 8, 32, 3,
    "1F1B takes 33 and holds 4 on rank 0. With a split backward, a rank that waits can run a W, which frees its slot. "
    "For the last step: I before F where both could run, and put a W off for as long as its slot is not needed.",
)  # fmt: skip


def check_two_ranks(fn: Callable[[], Any]) -> Verdict:
    """Whether `fn()` is a schedule, or the picture of one, for 2 ranks and 3 microbatches in 10 steps."""
    return solve(fn, TWO_RANKS)


def check_three_slots(fn: Callable[[], Any]) -> Verdict:
    """Whether `fn()` is a schedule, or the picture of one, that is sooner than 1F1B with 3 microbatches a rank."""
    return solve(fn, THREE_SLOTS)


def solve(fn: Callable[[], Any], puzzle: Puzzle) -> Verdict:
    """Compare what `fn` returns with a puzzle. Never raises."""
    name = puzzle.name
    try:
        given = fn()
        if given is None or given is ...:
            return untouched(name)
        schedule = _read(given) if isinstance(given, str) else given
        if not isinstance(schedule, Schedule):
            return Verdict(False, f"{name}: it must return a schedule, or its picture as text, and returned {given!r}.")
        shape = (schedule.num_ranks, schedule.num_microbatches, schedule.num_stages)
        if shape != (puzzle.ranks, puzzle.microbatches, puzzle.ranks):
            return Verdict(
                False,
                f"{name}: it has {shape[0]} ranks, {shape[1]} microbatches and {shape[2]} stages; asked for are "
                f"{puzzle.ranks}, {puzzle.microbatches} and one stage per rank.",
            )
        wrong = faults(schedule, memory_limit=puzzle.slots, at_most=1)
        if wrong:
            return Verdict(False, f"{name}: {wrong[0]}.")
    except TplabError as error:
        return Verdict(False, f"{name}: {error}")
    except Exception as error:
        return Verdict(False, f"{name}: {type(error).__name__}: {error}")
    run = simulate(schedule, Costs())
    if run.makespan > puzzle.makespan:
        text = f"{name}: it is legal, and takes {run.makespan:g} steps; {puzzle.makespan:g} can be done."
        return Verdict(False, f"{text}\n{puzzle.hint}")
    bound = "the best there is" if run.gap < 1e-9 else f"the bound is {run.bounds.makespan:g}"
    return Verdict(
        True,
        f"{name} is solved: {run.makespan:g} steps ({bound}), {run.peak_activations.max():g} microbatches held.",
    )


def _read(text: str) -> Schedule:
    """A picture; without a dot in it only the order of each row is meant, and each action runs as soon as it can."""
    return Schedule.parse(text) if "." in text else _of_rows(text.strip().splitlines())


def _of_rows(rows: list[str]) -> Schedule:
    """A schedule of one stage per rank, from texts such as "F0 B0"."""
    return Schedule([[Action.parse(f"{rank}{cell}") for cell in row.split()] for rank, row in enumerate(rows)])
