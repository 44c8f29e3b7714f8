"""The exercises of lab 10: a rank's row of 1F1B, and puzzles with a limit on time and memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tplab.errors import ScheduleError, TplabError
from tplab.exercises.drawn import Drawn
from tplab.exercises.verdict import Refused, Verdict, check, hint, on, refuse, with_task
from tplab.schedules import RULES, Action, Costs, Schedule, Simulation, faults, one_f_one_b, simulate
from tplab.schedules.action import CODE
from tplab.units import counted

Cells = str | Sequence[str]
Row = Callable[[int, int, int], Cells]
LIBRARY = (*(rule.__name__ for rule in RULES.values()), "auto_schedule")
"""Library functions that would solve a puzzle."""
SIZES = ((2, 3), (4, 8), (3, 7), (4, 2), (1, 4), (5, 5))


@check(not_with=("one_f_one_b",))
def check_one_f_one_b(row: Row) -> Verdict:
    """Check that `row(rank, ranks, microbatches)` gives that rank's row of 1F1B, as text ("F0 F1 ...") or a list."""
    schedules = [_of_rows(_rows(row, *size)) for size in SIZES]
    said = _hint(schedules)
    for (ranks, microbatches), schedule in zip(SIZES, schedules):
        where = f"with {ranks} ranks and {microbatches} microbatches"
        if schedule.num_microbatches != microbatches:
            few = "\nA rank cannot run more forwards ahead than there are microbatches." * (microbatches < ranks)
            refuse(f": {where}, its rows have {_count(schedule.num_microbatches)}.{few}")
        if wrong := faults(schedule, at_most=1):
            raise Refused(Drawn(False, f": {where} it cannot run.\n{wrong[0]}.{said}", schedule))
        best = one_f_one_b(ranks, microbatches)
        if schedule != best:
            mine, theirs = simulate(schedule), simulate(best)
            rank = next(rank for rank in range(ranks) if schedule.by_rank()[rank] != best.by_rank()[rank])
            says = [f"it takes {mine.makespan:g} steps, where 1F1B takes {theirs.makespan:g}"]
            says *= mine.makespan != theirs.makespan
            if (held := mine.peak_activations[rank]) != (least := theirs.peak_activations[rank]):
                says.append(f"rank {rank} holds {_count(held)}, where 1F1B holds {least:g}")
            found = ", and ".join(says) or f"rank {rank} runs its actions in another order"
            text = f": {where} it runs, but it is not 1F1B.\n{found[0].upper()}{found[1:]}.{said}"
            raise Refused(Drawn(False, text, schedule))
    listed = ", ".join(f"{ranks} x {microbatches}" for ranks, microbatches in SIZES)
    shown = _of_rows([row(rank, 4, 8) for rank in range(4)])
    return Drawn(True, f" is right, for ranks x microbatches {listed}. This is 4 x 8:", shown)


def _count(microbatches: float) -> str:
    return f"{microbatches:g} microbatch{'' if microbatches == 1 else 'es'}"


def _rows(row: Row, ranks: int, microbatches: int) -> list[Cells]:
    where = f"with {ranks} ranks and {microbatches} microbatches"
    with on(where):
        rows = [row(rank, ranks, microbatches) for rank in range(ranks)]
        if rows[0] is None:
            refuse(f" returned None {where}; is a `return` missing?")
    return rows


def _hint(schedules: Sequence[Schedule]) -> str:
    """A hint from the numbers of forwards before the first backward, or from the microbatches of the backwards, if all
    schedules agree with it."""
    ahead, known = list[int](), dict[str, list[Any]]()
    for schedule, (ranks, microbatches) in zip(schedules, SIZES):
        ahead += [next((i for i, a in enumerate(row) if a.kind != "F"), len(row)) for row in schedule.by_rank()]
        rank = np.arange(ranks)
        guesses = {
            "Rank r runs r forwards ahead. Which rank waits longest for its first gradient, the first or the last?":
                rank,
            "One forward too many before the first backward: the last rank can run B0 right after F0.":
                ranks - rank,
            "Rank r runs twice as many forwards ahead as it needs.": 2 * (ranks - 1 - rank),
            "Every rank runs the same number of forwards ahead. The last one could send a gradient back at once.":
                rank * 0 + ranks - 1,
            "All forwards come first: that is GPipe.": rank * 0 + microbatches,
            "No forwards run ahead: each microbatch waits for the one before it to come back.": rank * 0,
        }  # fmt: skip
        for why, guess in guesses.items():
            known.setdefault(why, []).extend(np.minimum(guess, microbatches - 1) + 1)
    rows = [(row, ours) for schedule, size in zip(schedules, SIZES)
            for row, ours in zip(one_f_one_b(*size).by_rank(), schedule.by_rank())]  # fmt: skip
    if all([a.kind for a in row] == [a.kind for a in ours] for row, ours in rows):
        return "\nEach F and B is where 1F1B has one, but of another microbatch. Which one comes back first?"
    said = hint(ahead, known)
    return f"\n{said}" if said else ""


@dataclass(frozen=True)
class Puzzle:
    """A puzzle: find a schedule for this many ranks and microbatches, with F = I = W = 1 (B is I and W), whose makespan
    is at most `makespan`, and in which no rank ever holds more than `slots` microbatches."""

    ranks: int
    microbatches: int
    makespan: float
    slots: int
    hint: str

    def __str__(self) -> str:
        return (
            f"{self.ranks} ranks, {_count(self.microbatches)}: at most {self.makespan:g} steps and "
            f"{_count(self.slots)} held per rank"
        )


PUZZLES = {
    1: Puzzle(2, 2, 9, 2, ""),
    2: Puzzle(2, 3, 10, 3, "1F1B takes 12. If each B is split into I and W, rank 0 waits for I, but no rank for W."),
    3: Puzzle(2, 4, 13, 2, "A rank that holds two microbatches must free a place before its next F. A W frees one."),
    4: Puzzle(3, 6, 20, 3, "How long must rank 2 wait for its first F? If it never idles after that, what is the sum?"),
    5: Puzzle(
        4, 8, 32, 3,
        "Splitting B helps: with the rule 'I if it can run, else F, else W' no rank waits long, and that takes 33 "
        "steps.\nAll other ranks wait for the forwards of rank 0. What should rank 0 prefer?",
    ),
    6: Puzzle(
        4, 8, 31, 3,
        "31 is the proven optimum. When rank 0 is full, a W makes room for its next F. How early can it run that F?",
    ),
}  # fmt: skip


def check_puzzle(number: int, fn: Callable[[], Any]) -> Verdict:
    """Check that `fn()` is a schedule, or the picture of one, that solves puzzle `number`. Never raises."""
    if number not in PUZZLES:
        return Verdict(False, f"There is no puzzle {number!r}; there are {', '.join(map(str, PUZZLES))}.")
    puzzle, name = PUZZLES[number], f"puzzle {number}"
    return with_task(check(name, LIBRARY)(_solves)(fn, puzzle), puzzle)


def _solves(fn: Callable[[], Any], puzzle: Puzzle) -> Verdict:
    given = fn()
    if isinstance(given, list | tuple):  # rows as texts, or as lists of their parts
        given = "\n".join(row if isinstance(row, str) else " ".join(map(str, row)) for row in given)
    try:
        schedule = _read(given) if isinstance(given, str) else given
    except TplabError as error:
        refuse(f": {error}")
    if not isinstance(schedule, Schedule):
        refuse(f": return a schedule, or its picture as text. It returned {given!r}.")
    shape = (schedule.num_ranks, schedule.num_microbatches, schedule.num_stages)
    limit, text = puzzle.slots, ""
    if shape != (puzzle.ranks, puzzle.microbatches, puzzle.ranks):
        limit = None
        text = (
            f": your schedule has {counted(shape[0], 'rank')}, {_count(shape[1])} and {counted(shape[2], 'stage')}. "
            f"It should have {puzzle.ranks} ranks, {_count(puzzle.microbatches)} and one stage per rank."
        )
    elif wrong := faults(schedule, memory_limit=puzzle.slots, at_most=1):
        late = "\nWith dots, an action is one column wide. Without dots, it runs as soon as it can, as drawn here."
        text = f": {wrong[0]}.{late if wrong[0].kind == 'tick' else ''}"
    elif (run := simulate(schedule, Costs())).makespan > puzzle.makespan:
        says = [
            f": it runs, in {run.makespan:g} steps. {puzzle.makespan:g} are possible.",
            _first_wait(run, puzzle.slots),
        ]
        text = "\n".join(filter(None, [*says, puzzle.hint]))
    else:
        whole = " that keeps B whole" if any(a.kind == "B" for row in schedule.by_rank() for a in row) else ""
        best = f" No schedule{whole} can be shorter." if run.gap < 1e-9 else ""
        held = _count(run.peak_activations.max())
        return Drawn(True, f" is solved: {run.makespan:g} steps, {held} held.{best}", schedule, limit=limit)
    return Drawn(False, text, schedule, limit=limit)


def _first_wait(run: Simulation, slots: int) -> str:
    """In words, the first wait in which the rank could run a later action of its row, or that a rank causes by running
    another action first; "" if there is none."""
    schedule, needs = run.schedule, run.schedule.needs

    def ready(index: int) -> float:
        wanted = np.array([needs.message[index], *(own[index] for own in needs.own)])
        return float(run.end[wanted[wanted >= 0]].max(initial=0.0))

    def has_place(index: int, at: int) -> bool:
        """Whether the rank would have a free slot for action `index` if it ran before the action `at` of its row."""
        kinds = schedule.kind[schedule.offsets[schedule.rank[at]] : at]
        kept = np.sum(kinds == CODE["F"]) - np.sum((kinds == CODE["B"]) | (kinds == CODE["W"]))
        return bool(schedule.kind[index] != CODE["F"] or kept < slots)

    for index in np.argsort(run.start, kind="stable").tolist():
        rank = int(schedule.rank[index])
        first, last = (int(end) for end in schedule.offsets[rank : rank + 2])
        if run.waits_for[index] < 0 or index == first:
            continue
        cause = int(run.waits_for[index])
        awaited = schedule.action(cause).label
        begin, end = run.end[index - 1], run.start[index]
        wait = f"Rank {rank} waits for {awaited} from step {begin:g} to step {end:g}."
        for later in range(index + 1, last):
            if max(begin, ready(later)) + run.duration[later] <= end and has_place(later, index):
                return f"{wait} What else could it run meanwhile?"
        while cause >= 0 and (run.waits_for[cause] >= 0 or cause not in schedule.offsets):
            if run.waits_for[cause] < 0 and ready(cause) <= run.start[cause - 1] and has_place(cause, cause - 1):
                one, other = (schedule.action(at).label for at in (cause - 1, cause))
                return f"{wait} Rank {schedule.rank[cause]} could run {other} sooner, but runs {one} first."
            cause = int(run.waits_for[cause]) if run.waits_for[cause] >= 0 else cause - 1
    return ""


def _read(text: str) -> Schedule:
    """Read a picture. If it has no dots, only the order of each row counts, and each action runs as soon as it can."""
    rows = [row for row in text.splitlines() if row.strip()]
    return Schedule.parse("\n".join(rows)) if "." in text else _of_rows(rows)


def _of_rows(rows: Sequence[Cells]) -> Schedule:
    """A schedule of one stage per rank, from texts such as "F0 B0", or their parts."""
    cells = [[cell for cell in (row.split() if isinstance(row, str) else row) if cell.strip(".")] for row in rows]
    for cell in (cell for row in cells for cell in row):
        if not re.fullmatch(r"[FBIW]\d+", cell):
            raise ScheduleError(f"{cell!r} is not an action; write a letter and a microbatch, such as F0, B0, I0 or W0")
    return Schedule([[Action.parse(f"{rank}{cell}") for cell in row] for rank, row in enumerate(cells)])
