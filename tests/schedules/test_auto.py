"""The automatic scheduler: within its limits, never worse than the rules, near or at the proven best."""

import inspect
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tplab.errors import ScheduleError
from tplab.schedules import (
    Costs,
    auto,
    auto_schedule,
    check,
    linear,
    one_f_one_b,
    simulate,
    v_half,
    v_shape,
    wrapped,
    zb_h1,
)
from tplab.schedules.rules import stamp
from tplab.schedules.rules.greedy import list_schedule

# F = I = W = 1, p = 4, m = 8: memory in microbatches, proven least makespan, proven least span; None: not known
PROVEN_LINEAR = [(2, 41, 41), (3, 31, 31), (4, 27, 27), (5, 27, 26), (7, 27, 24)]
PROVEN_V = [(2, 29.5), (2.5, 28), (3, 26.5), (3.5, 26), (4, 25.5)]


@pytest.mark.parametrize("slots, makespan, span", PROVEN_LINEAR)
def test_near_the_proven_best_with_one_stage_a_rank(slots, makespan, span):
    schedule = auto_schedule(4, 8, memory_limit=slots)
    check(schedule, memory_limit=slots)
    run = simulate(schedule)
    assert makespan <= run.makespan <= makespan * (1 if slots != 3 else 1.04)
    run = simulate(auto_schedule(4, 8, memory_limit=slots, objective="span"))
    assert span <= run.span <= span * (1 if slots != 3 else 1.04)


@pytest.mark.parametrize("slots, makespan", PROVEN_V)
def test_near_the_proven_best_on_the_v(slots, makespan):
    schedule = auto_schedule(4, 8, memory_limit=slots, placement="v")
    check(schedule, memory_limit=slots)
    assert schedule.placement == v_shape(4)
    assert makespan <= simulate(schedule).makespan <= makespan * (1 if slots != 2.5 else 1.02)


@given(
    p=st.integers(1, 4),
    m=st.integers(1, 7),
    placement=st.sampled_from(["linear", "v", "wrapped"]),
    limit=st.sampled_from([None, 1, 2, 3.5]),
    split=st.booleans(),
    solver=st.sampled_from(["heuristic", "quick"]),
    data=st.data(),
)
@settings(max_examples=15)
def test_it_keeps_its_limits_and_is_no_worse_than_the_rules(p, m, placement, limit, split, solver, data):
    stages = p if placement == "linear" else 2 * p
    times = [data.draw(st.lists(st.integers(1, 6), min_size=stages, max_size=stages)) for _ in range(3)]
    costs = Costs(*times, transfer=data.draw(st.integers(0, 2)))
    options = {"memory_limit": limit, "placement": placement, "split_backward": split}
    schedule = auto_schedule(p, m, costs, solver=solver, **options)
    check(schedule, memory_limit=limit)
    assert split or not schedule.splits_backward
    assert schedule.placement == {"linear": linear(p), "v": v_shape(p), "wrapped": wrapped(p, 2)}[placement]
    run = simulate(schedule, costs)
    assert run.makespan >= run.bounds.makespan - 1e-9
    if placement == "linear" and (limit is None or limit >= p):
        assert run.makespan <= simulate(one_f_one_b(p, m), costs).makespan
        assert not split or run.makespan <= simulate(zb_h1(p, m), costs).makespan
    assert auto_schedule(p, m, costs, solver=solver, **options) == schedule
    if solver == "quick":
        assert run.makespan >= simulate(auto_schedule(p, m, costs, **options), costs).makespan


def test_a_placement_of_ones_own():
    schedule = auto_schedule(2, 4, placement=((0, 1), (2, 3)))
    check(schedule)
    assert schedule.placement == ((0, 1), (2, 3))


@pytest.mark.parametrize(
    "options, words",
    [
        ({"memory_limit": 0.5}, "even one microbatch needs 1"),
        ({"memory_limit": float("nan")}, "it cannot be negative or NaN"),
        ({"memory_limit": [2, -1, 2, 2]}, "it cannot be negative or NaN"),
        ({"placement": "spiral"}, "'linear', 'v', 'wrapped'"),
        ({"placement": ((0,), (0,), (1,), (2,))}, "names every stage once"),
        ({"objective": "beauty"}, "objective is 'beauty'; it must be one of makespan, span"),
        ({"solver": "magic"}, "solver is 'magic'; it must be one of heuristic, quick, exact"),
    ],
)
def test_what_it_cannot_do_it_says(options, words):
    with pytest.raises(ScheduleError, match=words):
        auto_schedule(4, 8, **options)


def test_without_the_extra_package_the_exact_solver_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ortools.sat.python", None)
    with pytest.raises(ScheduleError, match=r"pip install ortools; or use solver='heuristic'"):
        auto_schedule(2, 2, solver="exact")


def test_the_exact_solver_proves_the_table():
    pytest.importorskip("ortools", reason="OR-Tools is not installed")
    for slots, makespan, _ in PROVEN_LINEAR[1:3]:
        schedule = auto_schedule(4, 8, memory_limit=slots, solver="exact", seconds=60)
        check(schedule, memory_limit=slots)
        assert (schedule.name, simulate(schedule).makespan) == ("exact", makespan)
    costs = Costs([2, 3, 1], [1, 4, 2], [2, 1, 3], transfer=0.5)
    best = auto_schedule(3, 4, costs, memory_limit=2, solver="exact", seconds=60)
    check(best, memory_limit=2)
    assert best.name == "exact"
    assert simulate(best, costs).makespan <= simulate(auto_schedule(3, 4, costs, memory_limit=2), costs).makespan
    unsplit = auto_schedule(3, 4, solver="exact", split_backward=False, seconds=60)
    assert simulate(unsplit).makespan == (4 + 3 - 1) * 3
    with pytest.raises(ScheduleError, match="links that queue"):
        auto_schedule(2, 2, Costs(links="queue"), solver="exact")


def test_the_guesses_for_a_large_pipeline_are_few(monkeypatch):
    placed = []

    def counted(held, microbatches, *more, **options):
        placed.append(3 * sum(map(len, held)) * microbatches)
        return list_schedule(held, microbatches, *more, **options)

    monkeypatch.setattr(auto, "list_schedule", counted)
    auto_schedule(12, 12)
    assert len(placed) > 20
    placed.clear()
    monkeypatch.setattr(auto, "_MANY", 400)
    schedule = auto_schedule(12, 12)
    check(schedule)
    assert simulate(schedule).gap == 0
    assert set(placed) == {len(schedule)} and len(placed) <= 6
    limited = auto_schedule(12, 24, placement="wrapped", memory_limit=7)  # no rule fits: a building block does
    check(limited, memory_limit=7)
    guessed = auto_schedule(12, 24, placement="wrapped", memory_limit=7, solver="quick")
    assert simulate(limited).makespan < simulate(guessed).makespan


@pytest.mark.parametrize(
    "ranks, microbatches, words",
    [
        (1000, 1000, r"3,000,000 actions \(1,000 ranks x 1,000 microbatches\).*at most 250,000: take at most 83 micro"),
        (10_000, 400, r"12,000,000 actions .*at most 250,000: take at most 8 microbatches.*or take a rule, such as zb"),
    ],
)
@pytest.mark.parametrize("solver", ["heuristic", "quick", "exact"])
def test_what_would_take_minutes_is_refused_before_any_work(ranks, microbatches, words, solver, monkeypatch):
    monkeypatch.setattr(auto, "_candidates", None)
    with pytest.raises(ScheduleError, match=words):
        auto_schedule(ranks, microbatches, solver=solver)


def test_the_work_of_stamping_a_block_is_linear_in_its_actions():
    """Counted in lines of Python; each move looks for its slot in one call, however far that is."""
    file = inspect.getfile(stamp)

    def lines(p: int) -> float:
        num_lines = 0

        def tracer(frame, event, argument):
            nonlocal num_lines
            if frame.f_code.co_filename != file:
                return None
            num_lines += event == "line"
            return tracer

        before = sys.gettrace()
        sys.settrace(tracer)
        try:
            v_half(p, p)
        finally:
            sys.settrace(before)
        return num_lines / (6 * p * p)

    assert lines(24) < 1.15 * lines(8)
