"""Lab 10's exercises: right answers pass, known mistakes get their hint, and nothing raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from tplab.exercises.pipeline_schedules import PUZZLES, SIZES, check_one_f_one_b, check_puzzle
from tplab.schedules import auto_schedule, gpipe, one_f_one_b, zb_h1


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
        (lambda rank, ranks, m: rank, "deadlock(.|\n)*Which rank waits longest"),
        (lambda rank, ranks, m: ranks - rank, "Rank 0 holds 3 microbatches, where 1F1B holds 2.\nOne forward too many"),
        (lambda rank, ranks, m: ranks - 1, "the same number of forwards ahead"),
        (lambda rank, ranks, m: m, "that is GPipe"),
        (lambda rank, ranks, m: 0, "No forwards run ahead"),
        (lambda rank, ranks, m: 2 * (ranks - 1 - rank), "twice as many forwards ahead as it needs"),
    ],
)
def test_known_mistakes_in_the_row(ahead, said: str):
    """Each is drawn, also where it cannot run."""
    import re

    verdict = check_one_f_one_b(row_with(ahead))
    assert verdict.passed is False and re.search(said, verdict.text), verdict
    assert verdict.text.startswith("row: with 2 ranks") and "1 microbatches" not in verdict.text
    data, metadata = verdict._repr_mimebundle_()
    assert data["image/png"] and metadata["image/png"]["alt"] == verdict.text


def test_backwards_in_the_wrong_order_and_too_many_forwards_for_few_microbatches():
    right = row_with(lambda rank, ranks, microbatches: ranks - 1 - rank)

    def last_first(rank: int, ranks: int, microbatches: int) -> str:
        kept, cells = list[str](), list[str]()
        for cell in right(rank, ranks, microbatches).split():
            if cell[0] == "F":
                kept.append(cell[1:])
            cells.append(cell if cell[0] == "F" else f"B{kept.pop()}")
        return " ".join(cells)

    said = check_one_f_one_b(last_first).text
    assert "Each F and B is where 1F1B has one, but of another microbatch." in said, said

    def always_ahead(rank: int, ranks: int, microbatches: int) -> str:
        ahead = ranks - 1 - rank
        steady = [f"F{ahead + k} B{k}" for k in range(microbatches - ahead)]
        back = range(max(0, microbatches - ahead), max(ahead, microbatches))
        return " ".join([*(f"F{k}" for k in range(ahead)), *steady, *(f"B{k}" for k in back)])

    said = check_one_f_one_b(always_ahead).text
    assert "with 4 ranks and 2 microbatches, its rows have 3 microbatches.\nA rank cannot run more forwards" in said, (
        said
    )


def test_rows_that_are_none():
    assert check_one_f_one_b(cast(Any, lambda rank, ranks, m: ...)).passed is None
    assert "TypeError" in check_one_f_one_b(cast(Any, lambda rank, ranks, m: 7)).text
    assert "is not an action" in check_one_f_one_b(lambda rank, ranks, m: "forward").text
    assert "its rows have 1 microbatch." in check_one_f_one_b(lambda rank, ranks, m: "F0 B0").text
    assert "cannot run" in check_one_f_one_b(lambda rank, ranks, m: " ".join(f"F{k}" for k in range(m))).text


TEN = """\
F0 F1 F2 I0 W0 I1 W1 I2 W2 ..
.. F0 I0 F1 I1 F2 I2 W0 W1 W2"""


def in_order(ranks: int, microbatches: int, slots: int, *orders: str) -> str:
    """Each rank runs, of what it can run, the first in its order, "IFW" or "FWI"; all take one step."""
    done: dict[tuple[str, int, int], int] = {}
    rows: list[list[str]] = [[] for _ in range(ranks)]
    ran = [dict.fromkeys("FIW", 0) for _ in range(ranks)]
    for now in range(100):
        chosen = []
        for rank, num in enumerate(ran):
            last = rank == ranks - 1
            ready = {
                "F": num["F"] < microbatches
                and num["F"] - num["W"] < slots
                and (rank == 0 or done.get(("F", rank - 1, num["F"]), 100) <= now),
                "I": num["I"] < num["F"] and (last or done.get(("I", rank + 1, num["I"]), 100) <= now),
                "W": num["W"] < num["I"],
            }
            kind = next((kind for kind in orders[rank] if ready[kind]), "")
            if kind:
                chosen.append((rank, kind))
        for rank, kind in chosen:
            rows[rank].append(f"{kind}{ran[rank][kind]}")
            done[kind, rank, ran[rank][kind]] = now + 1
            ran[rank][kind] += 1
    return "\n".join(map(" ".join, rows))


def given(answer: Any) -> Callable[[], Any]:
    """An answer that a function of the library has made elsewhere."""
    return lambda: answer


SOLVED = {
    1: given(one_f_one_b(2, 2)),
    2: lambda: TEN,
    3: given(zb_h1(2, 4)),
    4: given(str(zb_h1(3, 6))),
    5: lambda: in_order(4, 8, 3, "FIW", "FIW", "FIW", "IFW"),
    6: lambda: in_order(4, 8, 3, "FWI", "IFW", "IFW", "IFW"),
}


@pytest.mark.parametrize("number", PUZZLES)
def test_puzzles_solved(number: int):
    verdict = check_puzzle(number, SOLVED[number])
    assert verdict.passed, verdict
    data, _ = verdict._repr_mimebundle_()
    assert data["image/png"]  # the learner's own schedule


def test_empty_lines_are_no_ranks_and_a_missing_return_is_told():
    assert check_puzzle(1, lambda: "\nF0 F1 B0 B1\n\nF0 B0 F1 B1\n").passed
    assert check_puzzle(2, lambda: "\n" + TEN.replace("\n", "\n\n")).passed
    assert "is a `return` missing?" in check_one_f_one_b(cast(Any, lambda rank, ranks, m: print(end=""))).text


def test_rows_may_be_a_list():
    assert check_puzzle(1, lambda: [["F0", "F1", "B0", "B1"], ("F0", "B0", "F1", "B1")]).passed
    assert check_puzzle(1, lambda: ["F0 F1 B0 B1", "F0 B0 F1 B1"]).passed
    assert check_one_f_one_b(
        cast(Any, lambda *sizes: row_with(lambda rank, ranks, m: ranks - rank - 1)(*sizes).split())
    ).passed


def test_the_order_alone_will_do():
    assert check_puzzle(2, lambda: TEN.replace(" ..", "").replace(".. ", "")).passed
    assert "No schedule can be shorter." in check_puzzle(2, lambda: TEN).text


W_AT_ONCE = "F0 F1 I0 W0 F2 I1 W1 F3 I2 W2 I3 W3\nF0 I0 W0 F1 I1 W1 F2 I2 W2 F3 I3 W3"


def test_a_schedule_that_a_search_would_find_too():
    found = auto_schedule(4, 8, memory_limit=3)
    assert check_puzzle(5, lambda: found).passed and check_puzzle(5, lambda: str(found)).passed


@pytest.mark.parametrize(
    "number, answer, said",
    [
        (2, given(one_f_one_b(2, 3)), "it runs, in 12 steps. 10 are possible."),
        (
            2,
            given(one_f_one_b(4, 8)),
            "your schedule has 4 ranks, 8 microbatches and 4 stages. It should have 2 ranks",
        ),
        (2, lambda: TEN.replace("W2 ..", ".. .."), "never W2"),
        (2, lambda: "F0 what", "puzzle 2:"),
        (2, lambda: TEN.replace(".. F0", "F0 ..", 1), "Without dots, it runs as soon as it can"),
        (
            1,
            lambda: "F0 B0 F1 B1\nF0 B0 F1 B1",
            "9 are possible.\nRank 0 waits for B0 from step 1 to step 4. What else",
        ),
        (1, lambda: "F0 F1 B1 B0\nF0 B0 F1 B1", "\nRank 0 waits for B1 from step 2 to step 7. What else"),
        (
            3,
            lambda: W_AT_ONCE,
            "Rank 1 could run F3 sooner, but runs W2 first.",
        ),
        (2, lambda: 7, "return a schedule, or its picture as text. It returned 7."),
        (2, lambda: 1 / 0, "ZeroDivisionError"),
        (2, lambda: "B0 F0\nF0 B0", "puzzle 2:"),
        (3, given(one_f_one_b(2, 4)), "it runs, in 15 steps. 13 are possible."),
        (5, given(zb_h1(4, 8)), "holds more microbatches than its limit of 3"),
        (5, given(gpipe(4, 8)), "holds more microbatches than its limit of 3"),
        (5, lambda: in_order(4, 8, 3, *["IFW"] * 4), "\nSplitting B helps"),
        (5, lambda: auto_schedule(4, 8, memory_limit=3), "`auto_schedule` does the work"),
        (1, lambda: one_f_one_b(2, 2), "`one_f_one_b` does the work"),
        (3, lambda: str(zb_h1(2, 4)), "`zb_h1` does the work"),
        (6, lambda: SOLVED[5](), "in 32 steps. 31 are possible."),
        (7, lambda: TEN, "There is no puzzle 7"),
    ],
)
def test_puzzles_not_solved(number: int, answer, said: str):
    verdict = check_puzzle(number, answer)
    assert verdict.passed is False and said in verdict.text, verdict
    verdict._repr_mimebundle_()


def test_an_untouched_puzzle_says_what_it_asks_for():
    verdict = check_puzzle(5, lambda: ...)
    assert verdict.passed is None
    assert "4 ranks, 8 microbatches: at most 32 steps and 3 microbatches held per rank" in verdict.text


def test_a_row_may_have_dots_and_a_wrong_cell_is_named_as_it_was_written():
    def row(rank, ranks, microbatches):
        return " ".join([".."] * rank + [a.label for a in one_f_one_b(ranks, microbatches).by_rank()[rank]])

    rows = {(ranks, m): [row(rank, ranks, m) for rank in range(ranks)] for ranks, m in SIZES}
    assert check_one_f_one_b(lambda rank, ranks, m: rows[ranks, m][rank]).passed
    small = check_one_f_one_b(lambda rank, ranks, m: rows[ranks, m][rank].lower())
    assert small.passed is False and "'f0' is not an action; write a letter and a microbatch" in small.text
