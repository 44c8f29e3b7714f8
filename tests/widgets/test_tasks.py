"""Tasks of the labs: each can be solved, but not by its start or a trivial state; a refusal says the true numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import traitlets

from tplab.forecast import Forecast, Plan, forecast
from tplab.schedules import RULES, Costs, simulate
from tplab.units import plain
from tplab.widgets import layout_lab, pipeline_lab
from tplab.widgets.layouts.candidates import SIZES
from tplab.widgets.layouts.tasks import TASKS as LAYOUTS
from tplab.widgets.layouts.workbench import Workbench as Layouts
from tplab.widgets.paper.task import Claim, Task, at_least, at_most, below
from tplab.widgets.schedule.tasks import TASKS as PIPELINES
from tplab.widgets.schedule.workbench import LIMITS, Workbench

SOLVED: dict[str, dict[str, Any]] = {
    "tenth": {"microbatches": 28},
    "same-memory": {"rule": "zb_v"},
    "smaller-stages": {"rule": "interleaved_1f1b", "virtual_stages": 4},
    "exchange": {"rule": "dualpipe"},
    "half-of-1f1b": {"rule": "v_min"},
    "even": {"rule": "v_half"},
    "cut": {"stage_costs": "1.25, 1.25, 1.25, 1.25"},
}
"""Changes of the start that solve a task. "one-more-forward" is solved by hand."""

NEAR: list[tuple[str, dict[str, Any], list[str]]] = [
    ("tenth", {"microbatches": 27}, ["the bubble is 10% of the makespan, and it must be below 10%"]),
    ("same-memory", {"rule": "zb_h1"}, ["the bubble is 11.1% of the makespan, and it may be 10% at most"]),
    ("same-memory", {"rule": "dualpipe"}, ["a rank holds 5 microbatches at once, and it may hold 4 at most"]),
    ("smaller-stages", {"rule": "looped_bfs", "virtual_stages": 4}, ["holds 8 microbatches", "may hold 5 at most"]),
    ("smaller-stages", {"rule": "zb_v"}, ["some backward passes are split into I and W"]),
    ("smaller-stages", {"rule": "interleaved_1f1b", "virtual_stages": 3}, ["the bubble is 11.1%"]),
    ("one-more-forward", {"rule": "gpipe"}, ["a rank holds 4 microbatches at once, and it may hold 3 at most"]),
    ("one-more-forward", {"rule": "chimera"}, ["a rank has 2 stages, and it may have one"]),
    ("one-more-forward", {"rule": "zb_h1"}, ["some backward passes are split into I and W"]),
    ("exchange", {"rule": "gpipe"}, ["the makespan is 39 steps, and it must be below GPipe's 39"]),
    ("exchange", {"rule": "zb_h2"}, ["a rank holds 7 microbatches at once, and it may hold 5 at most"]),
    ("half-of-1f1b", {"rule": "v_half"}, ["a rank holds 5 microbatches at once, and it may hold 4 at most"]),
    ("half-of-1f1b", {"rule": "naive"}, ["the makespan is 384 steps, and 1F1B takes 69"]),
    ("even", {"rule": "naive"}, ["the makespan is 96 steps, and 1F1B takes 33"]),
    ("even", {"rule": "zb_v"}, ["a rank holds 4 microbatches at once, and it may hold 3 at most"]),
    ("cut", {"stage_costs": "1, 1, 1, 1"}, ["the stages cost 4 together, and the model costs 5"]),
    ("cut", {"stage_costs": "1.5, 1.5, 1.5, 0.5"}, ["the last stage costs 0.5, and it has the head, which costs 1"]),
    (
        "cut",
        {"stage_costs": "1.3, 1.25, 1.25, 1.2"},
        ["a layer costs 0.25, so no stage of whole layers costs 1.2 or 1.3"],
    ),
    ("cut", {"stage_costs": "1.5, 1.25, 1.25, 1"}, ["and it may take 42 at most"]),
    ("cut", {"stage_costs": ""}, ["4 stages need 4 costs, and 0 are given"]),
]


def bench_of(name: str, **changes: Any) -> Workbench:
    return Workbench({"own": {}, "task": name, **PIPELINES.by_name[name].start, **changes})


def verdict(bench: Workbench | Layouts) -> dict[str, Any]:
    return bench.traits()["verdict"]


# ------------------------------------------------------------------------------------------------------------- claims


@pytest.mark.parametrize(
    ("claim", "expected"),
    [
        (at_most("it is {}%", 10, 10), (True, "it is 10%")),
        (at_most("it is {}%", 14.25, 10, "may be {}%"), (False, "it is 14.3%, and may be 10%")),
        (at_most("it is {}", 10.0004, 10), (False, "it is 10.0004, and it may be 10 at most")),
        (at_most("it is {}", 0.1 + 0.2, 0.3), (True, "it is 0.3")),
        (below("it is {}", 0.1 + 0.2, 0.3), (False, "it is 0.3, and it must be below 0.3")),
        (below("it is {}", 9.9999, 10), (True, "it is 9.9999")),
        (at_least("it is {}", 1024, 131072), (False, "it is 1,024, and it must be 131,072 at least")),
        (at_least("it is {}", 131072, 131072), (True, "it is 131,072")),
    ],
)
def test_a_claim_says_its_numbers_so_that_they_differ(claim: Claim, expected: tuple[bool, str]):
    assert claim == expected


def test_every_task_has_a_name_of_its_own_a_lab_and_hints_and_they_are_in_the_order_of_labs():
    names = [*PIPELINES.by_name, *LAYOUTS.by_name]
    assert len(names) == len({*names}) >= 12
    for tasks in (PIPELINES, LAYOUTS):
        labs = [task.lab for task in tasks.by_name.values()]
        assert labs == sorted(labs)
        for task, shown in zip(tasks.by_name.values(), tasks.shown(), strict=True):
            assert (
                len(task.hints) >= 2
                and task.text.endswith(".")
                and all(hint.endswith((".", "?")) for hint in task.hints)
            )
            assert shown["start"] == task.start and task.keeps.keys() <= task.start.keys()
            assert "counts" not in shown


# ----------------------------------------------------------------------------------------------------------- pipelines


@pytest.mark.parametrize("name", PIPELINES.by_name)
def test_the_start_does_not_solve_a_task_and_says_why(name: str):
    found = verdict(bench_of(name))
    assert (found["task"], found["is_solved"]) == (name, False)
    assert found["text"].startswith("Not yet: ")


@pytest.mark.parametrize("name", SOLVED)
def test_a_task_can_be_solved(name: str):
    found = verdict(bench_of(name, **SOLVED[name]))
    assert found["is_solved"], found
    assert found["text"].startswith("Solved: ")


def test_one_more_forward_is_solved_by_hand_and_not_by_half_of_it():
    bench = bench_of("one-more-forward")
    assert str(bench.schedule).split("\n")[0].split()[:4] == ["F0", "F1", "..", "B0"]
    assert bench.move(0, 3, 2)
    assert "the makespan is 19 steps, and GPipe takes 17" in verdict(bench)["text"]
    assert bench.move(0, 5, 4)
    assert verdict(bench)["is_solved"] and bench.run.makespan == 17
    assert bench.undo() and not verdict(bench)["is_solved"]


def test_no_rule_solves_what_is_to_be_done_by_hand():
    for rule in RULES:
        bench = bench_of("one-more-forward")
        bench.ask({**bench.settings, "rule": rule})
        assert not verdict(bench)["is_solved"], rule


@pytest.mark.parametrize(("name", "changes", "words"), NEAR)
def test_a_near_miss_is_refused_with_its_numbers(name: str, changes: dict[str, Any], words: list[str]):
    found = verdict(bench_of(name, **changes))
    assert not found["is_solved"]
    for text in words:
        assert text in found["text"]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["same-memory", "exchange"])
def test_the_words_are_what_the_simulator_says(name: str, rule: str):
    """Compared with a simulation that this test makes."""
    bench = bench_of(name, rule=rule)
    given = {"ranks": 4, "microbatches": 8}
    run = simulate(bench.schedule, Costs(transfer=bench.settings["transfer"]))
    peak, text = float(run.peak_activations.max()), verdict(bench)["text"]
    if name == "same-memory":
        wrong = [
            100 * run.bubble_fraction > 10,
            peak > float(simulate(RULES["one_f_one_b"](**given)).peak_activations.max()),
        ]
        numbers = [f"{plain(100 * run.bubble_fraction)}%", f"holds {plain(peak)} microbatches"]
    else:
        wrong = [run.makespan >= simulate(RULES["gpipe"](**given), Costs(transfer=1.0)).makespan, peak > 5]
        numbers = [f"is {plain(run.makespan)} steps", f"holds {plain(peak)} microbatches"]
    assert verdict(bench)["is_solved"] is not any(wrong)
    for is_wrong, number in zip(wrong, numbers):
        assert (number in text) is (is_wrong or not any(wrong))


@pytest.mark.parametrize("name", PIPELINES.by_name)
def test_a_task_is_not_solved_by_another_problem(name: str):
    """Neither by one rank, one microbatch or free work, nor by anything else that the task keeps."""
    task = PIPELINES.by_name[name]
    for kept, words in task.keeps.items():
        value = {"rule": "gpipe", "stage_costs": "2, 1, 1, 1"}.get(kept) or LIMITS[kept][1]
        claims = task.claims({**task.start, **SOLVED.get(name, {}), kept: value})  # decided without a simulation
        assert [claim.holds for claim in claims] == [False]
        assert claims[0].words.startswith(f"{words} is set to "), claims
    for trivial in ({"ranks": 1}, {"microbatches": 1}, {"ranks": 1, "microbatches": 1}):
        assert not verdict(bench_of(name, **{"rule": "gpipe", **trivial}))["is_solved"]


def test_a_lab_begins_as_its_task_does_with_what_is_given():
    lab = pipeline_lab(task="one-more-forward")
    assert [lab.settings[name] for name in ("ranks", "microbatches", "transfer")] == [2, 4, 1.0]
    assert "is set to" not in lab.verdict["text"]
    assert pipeline_lab(task="one-more-forward", ranks=3).settings["ranks"] == 3
    assert layout_lab(task="long").settings["gpus"] == 16


def test_the_words_of_tasks_are_about_one_or_several():
    assert at_most("a rank holds {:microbatch}", 1, 0.5).words.startswith("a rank holds 1 microbatch, and")
    assert at_most("a rank holds {:microbatch}", 2, 3).words == "a rank holds 2 microbatches"


def test_an_action_at_the_end_of_its_row_stays():
    lab = pipeline_lab(ranks=2, microbatches=4)
    assert not lab.move(0, 0, -1) and lab.notice == "F0 of stage 0 is already the first action of rank 0"
    assert not lab.move(1, 7, 9) and lab.notice == "B3 of stage 1 is already the last action of rank 1"


def test_a_wrong_cost_is_named_as_its_control_is():
    lab = pipeline_lab(task="cut")
    lab.settings = {**lab.settings, "stage_costs": "1, 2, 3"}
    assert lab.notice.startswith("cost of each stage has 3 figures")


def test_impossible_settings_solve_nothing():
    lab = pipeline_lab("zb_v", task="same-memory")
    assert lab.verdict["is_solved"]
    lab.settings = {**lab.settings, "rule": "dualpipe", "ranks": 3}
    assert lab.verdict == {"task": "same-memory", "is_solved": False, "text": "Not yet: these settings are impossible."}
    assert "3" in lab.notice


def test_the_task_is_a_setting_and_changes_nothing_that_is_shown():
    lab = pipeline_lab()
    assert lab.settings["task"] == "" and lab.verdict == {}
    assert not lab.move(0, 1, 9) and lab.notice  # B1 needs F1
    board, notice = lab.board, lab.notice
    lab.settings = {**lab.settings, "task": "tenth"}
    assert lab.verdict["task"] == "tenth" and (lab.board, lab.notice) == (board, notice)
    assert lab.run.schedule == RULES["one_f_one_b"](ranks=4, microbatches=8)
    with pytest.raises(traitlets.TraitError, match=r"task is 'easy'; it must be one of tenth, .* or empty"):
        lab.settings = {**lab.settings, "task": "easy"}
    with pytest.raises(traitlets.TraitError, match="task is 'few'"):
        pipeline_lab(task="few")  # of the other lab


# ------------------------------------------------------------------------------------------------------------- layouts

OTHERWISE: dict[str, dict[str, int]] = {
    "long": {"sequence": 131072, "batch": 32},
    "few": {"gpus": 16},
    "scale": {"batch": 1024},
}
"""Settings with which a plan solves a task, where it is not one of those that are shown at first."""

EIGHTS = Plan(tp=8, pp=8, recompute="full", sequence_parallel=True)
SOLVES: dict[str, Callable[[Forecast, Forecast], bool]] = {
    "zero-1": lambda one, best: one.plan.zero <= 1 and one.seconds <= 1.1 * best.seconds,
    "long": lambda one, best: one.plan.pp == 1 and one.plan.recompute == "none",
    "few": lambda one, best: True,
    "half-of-fastest": lambda one, best: (
        one.peak.total <= best.peak.total / 2 and one.seconds <= 1.3 * best.seconds
    ),
    "no-pipeline": lambda one, best: one.plan.pp == 1 and one.seconds <= 1.15 * best.seconds,
    "faster": lambda one, best: (
        one.plan.pp > 1 and one.plan.schedule == "1f1b" and one.seconds < forecast(
            "llama3-70b", EIGHTS, "h100-measured", batch=512, sequence=8192, stack="megatron"
        ).seconds
    ),
    "scale": lambda one, best: one.mfu >= 0.5 and one.peak.total <= 60 * 2**30,
    "experts": lambda one, best: one.plan.ep >= 8 and one.seconds <= 1.15 * best.seconds,
}  # fmt: skip
"""What a plan that fits has to be like; written without the task's own words."""


def layouts_of(name: str, **changes: Any) -> Layouts:
    return Layouts({**LAYOUTS.by_name[name].start, "task": name, **changes})


@pytest.mark.parametrize("name", LAYOUTS.by_name)
def test_a_layout_s_task_is_solved_by_the_plans_that_it_asks_for_and_by_no_others(name: str):
    start = layouts_of(name)
    assert not verdict(start)["is_solved"] and verdict(start)["text"].startswith("Not yet: ")
    bench = layouts_of(name, **OTHERWISE.get(name, {}))
    solved = []
    for index in [*range(0, len(bench.shown), 2), *range(12)]:
        bench.choose(index)
        one, best = bench.forecast(index), bench.forecast(bench.best)
        assert verdict(bench)["is_solved"] is (one.surely_fits and SOLVES[name](one, best)), verdict(bench)
        solved.append(verdict(bench)["is_solved"])
        if not one.surely_fits and name != "half-of-fastest":
            assert f"needs {one.peak.total / 2**30:.1f} GiB" in verdict(bench)["text"]
    assert sum(solved) > 0 and (name == "few" or not all(solved))


@pytest.mark.parametrize("name", LAYOUTS.by_name)
def test_a_layout_s_task_is_not_solved_by_another_job(name: str):
    task = LAYOUTS.by_name[name]
    others = {"model": "llama3.2-1b", "cluster": "a100", "stack": "fsdp", "gpus": 8, "batch": 64, "sequence": 1024}
    assert task.keeps.keys() <= others.keys() and others.keys() == {*SIZES, "model", "cluster", "stack"}
    for kept, words in task.keeps.items():
        claims = task.claims({**task.start, kept: others[kept]})  # decided without a forecast
        assert [claim.holds for claim in claims] == [False]
        assert claims[0].words.startswith(f"{words} is set to ")


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("few", {"gpus": 32}, "Not yet: there are plans that fit on fewer GPUs."),
        ("few", {"gpus": 8}, "GiB are sure to be free"),
        ("long", {"sequence": 65536, "batch": 64}, "a sequence has 65,536 tokens, and it must be 131,072 at least"),
        ("long", {"sequence": 131072, "batch": 64}, "a step has 8,388,608 tokens, and it must have 4,194,304"),
        ("scale", {"batch": 2048}, "a step has 2,048 sequences, and it may have 1,024 at most"),
    ],
)
def test_a_near_miss_of_a_layout_is_refused_with_its_numbers(name: str, changes: dict[str, Any], words: str):
    found = verdict(layouts_of(name, **changes))
    assert not found["is_solved"] and words in found["text"]


def test_the_verdict_follows_the_chosen_plan_in_a_kernel():
    lab = layout_lab("llama3-8b", gpus=64, task="half-of-fastest")
    assert not lab.verdict["is_solved"]
    index = next(
        index
        for index, plan in enumerate(lab.shown)
        if SOLVES["half-of-fastest"](lab._bench.forecast(index), lab.best) and plan.zero == 3
    )
    lab.chosen = index
    assert lab.verdict["is_solved"]
    lab.settings = {**lab.settings, "gpus": 67}  # impossible
    assert lab.verdict["text"] == "Not yet: these settings are impossible." and "67" in lab.notice
    lab.settings = {**lab.settings, "task": "", "gpus": 64}
    assert lab.verdict == {}
    with pytest.raises(traitlets.TraitError, match="task is 'tenth'; it must be one of zero-1, "):
        lab.settings = {**lab.settings, "task": "tenth"}


def test_only_what_is_kept_decides_while_it_is_changed():
    def never(run: Any) -> list[Claim]:
        raise AssertionError("what is not kept was looked at")

    task = Task("one", 1, "One", "Do.", {"ranks": 4}, {"ranks": "ranks"}, never, ())
    assert task.verdict({"ranks": 5}, None)["text"] == "Not yet: ranks is set to 5, and this task needs 4."
