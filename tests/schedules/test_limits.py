"""What is too large, or no number, is refused at once and in words; NumPy's whole numbers are whole numbers."""

from typing import Any

import numpy as np
import pytest

from tplab.errors import ScheduleError
from tplab.schedules import RULES, Action, Costs, Schedule, auto_schedule, check, gpipe, linear, simulate, wave


@pytest.mark.parametrize("text", ["0F0,0B0,0F2000000000", "0F0,0B0,2000000000F0"])
def test_a_number_far_from_the_others_is_refused_before_tables_are_made_for_it(text):
    with pytest.raises(ScheduleError, match=r"2,000,000,000.*has 3 actions.*leave none out"):
        Schedule.from_csv(text)


def test_so_is_a_tick():
    with pytest.raises(ScheduleError, match=r"tick 1,000,000,000,000.*1 action"):
        Schedule([[Action("F", 0, 0)]], ticks=[10**12])


def test_a_number_with_gaps_before_it_is_a_fault_like_others():
    with pytest.raises(ScheduleError, match="no rank runs F0 of stage 1"):
        check(Schedule.from_csv("0F0,0B0\n90F0,90B0\n"))


NO_NUMBERS: list[tuple[Any, Any, str]] = [
    (1.5, 0, "stage 1.5"),
    (0, "2", "microbatch '2'"),
    (True, 0, "stage True"),
    (-2, 0, "stage -2"),
    (2**31, 0, "stage 2147483648"),
]


@pytest.mark.parametrize("stage, microbatch, message", NO_NUMBERS)
def test_stages_and_microbatches_are_whole_numbers(stage, microbatch, message):
    with pytest.raises(ScheduleError, match=f"{message}; it must be a whole number from 0 to 2,147,483,647"):
        Action("F", stage, microbatch)


def test_so_they_are_in_text():
    with pytest.raises(
        ScheduleError, match=r"stage 9999999999\.\.\., a number of 20 digits; it must be a whole number"
    ):
        Schedule.from_csv("99999999999999999999F0")


def test_numpys_whole_numbers():
    two: Any = np.uint8(2)
    four: Any = np.int64(4)
    assert repr(Action("F", two, four)) == repr(Action("F", 2, 4))
    for name, rule in RULES.items():
        made = rule(two, four)
        assert made == rule(2, 4)
        assert repr(made.placement) == repr(rule(2, 4).placement), name
    assert auto_schedule(two, four) == auto_schedule(2, 4)
    assert repr(wave(two, four)) == repr(wave(2, 4))


@pytest.mark.parametrize("name", sorted(RULES))
def test_a_rule_makes_no_schedule_of_a_million_ranks_and_a_million_microbatches(name):
    with pytest.raises(ScheduleError, match=r"1,000,000 ranks.*at most 10,000"):
        RULES[name](10**6, 10**6)
    with pytest.raises(ScheduleError, match=r"4 ranks x 1,000,000,000 microbatches.*at most 4,000,000"):
        RULES[name](4, 10**9)


def test_nor_a_placement_of_them():
    with pytest.raises(ScheduleError, match="1,000,000,000 ranks"):
        linear(10**9)
    with pytest.raises(ScheduleError, match="10 ranks x 1,000,000,000 virtual_stages"):
        wave(10, 10**9)


def test_a_memory_limit_for_each_rank_is_one_figure_a_rank():
    for limited in (lambda limit: check(gpipe(2, 4), limit), lambda limit: auto_schedule(2, 4, memory_limit=limit)):
        for limit in ([4, 4, 4], [[4, 4]]):
            with pytest.raises(ScheduleError, match=r"has shape .*; give one number, or one for each of the 2 ranks"):
                limited(limit)
        limited([4, 4])
        for limit in (["a", "b"], "many"):
            with pytest.raises(ScheduleError, match=r"memory_limit is .*; it must be a number"):
                limited(limit)


NO_COSTS = [{"forward": "a"}, {"transfer": None}, {"bandwidth": [1, 2]}, {"forward": [[1], [1, 2]]},
            {"overlap": [0.5, 0.5]}, {"unit": 3}, {"input_grad": 1j}]  # fmt: skip


@pytest.mark.parametrize("cost", NO_COSTS, ids=str)
def test_costs_are_numbers(cost):
    (name,) = cost
    with pytest.raises(ScheduleError, match=f"the cost {name} is "):
        Costs(**cost)


@pytest.mark.parametrize(
    ("cost", "shapes"),
    [
        ({"input_grad_frees": [0.5]}, r"one number, or \[stages\]"),
        ({"activation": [1.0]}, r"one number, \[stages\] or \[stages, microbatches\]"),
    ],
    ids=str,
)
def test_a_cost_of_too_few_stages_says_what_it_may_be(cost, shapes):
    (name,) = cost
    run = simulate(gpipe(2, 4), Costs(**cost))
    with pytest.raises(ScheduleError, match=rf"the cost {name} has shape \(1,\); .* 2 stages .*: give {shapes}$"):
        run.activation_bytes(0)
