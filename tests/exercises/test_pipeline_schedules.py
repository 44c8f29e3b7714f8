"""Lab 10's exercises: right answers pass, known mistakes get their hint, and nothing raises."""

from __future__ import annotations

from typing import Any, cast

import pytest

from tplab.exercises.pipeline_schedules import check_one_f_one_b, check_three_slots, check_two_ranks
from tplab.schedules import auto_schedule, gpipe, one_f_one_b, simulate, zb_h1


def row_with(ahead_of):
    """1F1B with another number of forwards ahead."""

    def row(rank: int, ranks: int, microbatches: int) -> str:
        ahead = min(ahead_of(rank, ranks, microbatches), microbatches)
        cells = [f"F{k}" for k in range(ahead)]
        for k in range(microbatches - ahead):
            cells += [f"F{ahead + k}", f"B{k}"]
        return " ".join([*cells, *(f"B{k}" for k in range(microbatches - ahead, microbatches))])

    return row


def test_the_right_row():
    verdict = check_one_f_one_b(row_with(lambda rank, ranks, microbatches: ranks - 1 - rank))
    assert verdict.passed, verdict


@pytest.mark.parametrize(
    "ahead, said",
    [
        (lambda rank, ranks, m: rank, "deadlock(.|\n)*Who waits longest"),
        (lambda rank, ranks, m: ranks - rank, "One forward too many"),
        (lambda rank, ranks, m: ranks - 1, "as many forwards ahead"),
        (lambda rank, ranks, m: m, "that is GPipe"),
        (lambda rank, ranks, m: 0, "No forwards run ahead"),
    ],
)
def test_known_mistakes_in_the_row(ahead, said: str):
    import re

    verdict = check_one_f_one_b(row_with(ahead))
    assert verdict.passed is False and re.search(said, verdict.text), verdict


def test_rows_that_are_none():
    assert check_one_f_one_b(cast(Any, lambda rank, ranks, m: ...)).passed is None
    assert "AttributeError" in check_one_f_one_b(cast(Any, lambda rank, ranks, m: 7)).text
    assert "is no action" in check_one_f_one_b(lambda rank, ranks, m: "forward").text
    assert "its rows name 1 microbatches" in check_one_f_one_b(lambda rank, ranks, m: "F0 B0").text
    assert "cannot run" in check_one_f_one_b(lambda rank, ranks, m: " ".join(f"F{k}" for k in range(m))).text


TEN = """\
F0 F1 F2 I0 W0 I1 W1 I2 W2 ..
.. F0 I0 F1 I1 F2 I2 W0 W1 W2"""


def test_puzzles_solved():
    assert check_two_ranks(lambda: TEN).passed and "the best there is" in check_two_ranks(lambda: TEN).text
    assert check_two_ranks(lambda: zb_h1(2, 3)).passed
    assert check_two_ranks(lambda: TEN.replace(" ..", "").replace(".. ", "")).passed  # the order alone
    found = auto_schedule(4, 8, memory_limit=3)
    assert simulate(found).makespan <= 32
    assert check_three_slots(lambda: found).passed


@pytest.mark.parametrize(
    "answer, said",
    [
        (lambda: one_f_one_b(2, 3), "takes 12 steps; 10 can be done"),
        (lambda: one_f_one_b(4, 8), "it has 4 ranks, 8 microbatches and 4 stages; asked for are 2, 3"),
        (lambda: TEN.replace("W2 ..", ".. .."), "never W2"),
        (lambda: "F0 what", "two_ranks:"),
        (lambda: 7, "it must return a schedule"),
        (lambda: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_puzzles_not_solved(answer, said: str):
    verdict = check_two_ranks(answer)
    assert verdict.passed is False and said in verdict.text, verdict


def test_three_slots_are_three():
    assert "holds more than the 3 microbatches" in check_three_slots(lambda: zb_h1(4, 8)).text
    assert "holds more than the 3 microbatches" in check_three_slots(lambda: gpipe(4, 8)).text
    assert check_three_slots(lambda: ...).passed is None
