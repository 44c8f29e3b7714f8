"""The pipeline lab answers what the simulator says; bad settings and illegal moves are told in words."""

from __future__ import annotations

import csv
import json
from io import StringIO
from xml.etree import ElementTree

import numpy as np
import pytest
import traitlets
from hypothesis import given, settings
from hypothesis import strategies as st

from tplab.errors import ScheduleError
from tplab.schedules import (
    RULES,
    Costs,
    Schedule,
    auto_schedule,
    check,
    dualpipe,
    gpipe,
    one_f_one_b,
    simulate,
    to_csv,
    zb_h1,
    zb_v,
)
from tplab.schedules.action import Action
from tplab.units import plain
from tplab.widgets import gantt, pipeline_lab
from tplab.widgets.paper.frame import MAX_STEPS
from tplab.widgets.paper.letters import about_width
from tplab.widgets.paper.palette import token
from tplab.widgets.paper.pen import text_width
from tplab.widgets.paper.scene import COLOURS
from tplab.widgets.paper.wire import unpack
from tplab.widgets.schedule import lanes, still
from tplab.widgets.schedule.facts import BUBBLE, BUBBLE_OF_EQUAL, PEAK, facts
from tplab.widgets.schedule.still import moments
from tplab.widgets.schedule.workbench import LIMITS

FITTING = {"ranks": 4, "microbatches": 8}


@pytest.mark.parametrize("rule", RULES)
def test_what_is_drawn_is_what_was_simulated(rule: str):
    lab = pipeline_lab(rule)
    run = simulate(RULES[rule](**FITTING), Costs())
    header, columns = unpack(lab.board)
    assert header["runs"][0]["makespan"] == run.makespan == lab.run.makespan
    assert np.array_equal(columns["end.0"], run.end) and np.array_equal(columns["kind.0"], run.schedule.kind)
    held = [columns["stairHeld.0"][a:b].max() for a, b in zip(columns["stair.0"], columns["stair.0"][1:])]
    assert held == pytest.approx(list(run.peak_activations))
    assert lab.sentence.startswith(f"{rule} on 4 ranks with 8 microbatches: makespan {run.makespan:g}")
    assert lab.picture().startswith(b"\x89PNG")


@settings(max_examples=25, deadline=None)
@given(
    p=st.integers(2, 6),
    m=st.integers(1, 20),
    v=st.integers(1, 3),
    rule=st.sampled_from(sorted(BUBBLE)),
    costs=st.tuples(*[st.sampled_from([0.25, 0.5, 1.0, 2.0, 3.0])] * 3),
)
def test_formulas_hold_for_what_they_are_written_beside(
    p: int, m: int, v: int, rule: str, costs: tuple[float, float, float]
):
    """Interleaving takes groups of p microbatches; the others at least p."""
    more = {"virtual_stages": v} if rule in ("interleaved_1f1b", "looped_bfs") else {}
    m = m * p if more else max(m, p)
    run = simulate(RULES[rule](ranks=p, microbatches=m, **more), Costs(*costs))
    counted = run.makespan - run.busy.max()
    assert counted == pytest.approx(BUBBLE[rule].value(p, m, v if more else 1, *costs, sum(costs)))
    assert not any("counted" in fact.note for fact in facts(run))


@pytest.mark.parametrize("rule", sorted(BUBBLE_OF_EQUAL))
@pytest.mark.parametrize("p, m", [(2, 4), (4, 8), (6, 18)])
def test_formulas_that_hold_where_forward_and_backward_are_equal(rule: str, p: int, m: int):
    run = simulate(RULES[rule](ranks=p, microbatches=m), Costs(2.0, 2.0, 2.0))
    v = run.schedule.num_stages // p
    formula = BUBBLE_OF_EQUAL[rule]
    assert run.makespan - run.busy.max() == pytest.approx(formula.value(p, m, v, 2.0, 2.0, 2.0, 6.0))
    note = next(fact.note for fact in facts(run) if fact.name.startswith("bubble"))
    assert note.startswith(formula.text) and "counted" not in note
    run = simulate(run.schedule, Costs(2.0, 1.0, 1.0))
    assert all(formula.text not in fact.note for fact in facts(run))


@pytest.mark.parametrize("rule", ["dualpipe", "dualpipe_v"])
@pytest.mark.parametrize("p, m", [(2, 4), (4, 8), (6, 18)])
@pytest.mark.parametrize("overlap", [0.25, 1])
def test_the_formula_of_overlapped_pairs(rule: str, p: int, m: int, overlap: float):
    """It has the F&B that the facts name, and is the idle time of the rank that idles most."""
    run = simulate(RULES[rule](ranks=p, microbatches=m), Costs(2.0, 2.0, 2.0, overlap=overlap))
    pair = 6 - overlap * 2
    found = {fact.name: fact for fact in facts(run)}
    amount = BUBBLE_OF_EQUAL[rule].value(p, m, run.schedule.num_stages // p, 2.0, 2.0, 2.0, pair)
    assert run.idle.max() == pytest.approx(amount)
    note = found["bubble, of the makespan"].note
    assert f"= {plain(amount)} / {plain(run.makespan)}" in note and "counted" not in note
    assert found["overlapped pair, F&B"] == (
        "overlapped pair, F&B", plain(pair), f"F + B − {plain(overlap)} × min(F, B)"
    )  # fmt: skip


def test_dualpipe_is_shown_with_and_without_its_overlap():
    with_, without = (
        {fact.name: (fact.figure, fact.note) for fact in facts(pipeline_lab("dualpipe", overlap=part).run)}
        for part in (1, 0)
    )
    assert (with_["makespan"], without["makespan"]) == (("22", ""), ("26", ""))
    assert with_["without overlap"] == ("26", "bubble 7.69% of the makespan")
    assert without["with overlap 1"] == ("22", "bubble 4.55% of the makespan")
    assert with_["bubble, of the makespan"] == ("4.55%", "(p/2−1)(F&B+B−3W) / T = 1 / 22")
    assert with_["bubble, of the ideal time"] == ("4.76%", "(p/2−1)(F&B+B−3W) / busy time = 1 / 21")
    unequal = {fact.name: fact for fact in facts(pipeline_lab("dualpipe", overlap=0.5, stage_costs=[1, 1, 1, 2]).run)}
    assert unequal["overlapped pair, F&B"].figure == "F + B − 0.5 × min(F, B)"
    assert not any("F&B" in fact.name for fact in facts(simulate(zb_v(4, 8), Costs(overlap=1))))


@pytest.mark.parametrize("rule", sorted(PEAK))
@pytest.mark.parametrize("p, m", [(4, 16), (6, 24)])
def test_formulas_of_the_peak(rule: str, p: int, m: int):
    run = simulate(RULES[rule](ranks=p, microbatches=m))
    v = run.schedule.num_stages // p
    assert run.peak_activations.max() == pytest.approx(PEAK[rule].value(p, m, v))


def test_a_formula_that_does_not_fit_stands_beside_the_count():
    bubble = next(fact for fact in facts(simulate(zb_h1(4, 2))) if fact.name.startswith("bubble"))
    assert "counted" in bubble.note
    assert all("/ T" not in fact.note for fact in facts(simulate(one_f_one_b(4, 8), Costs(transfer=0.5))))


def test_the_lower_bound_is_that_of_schedules_that_keep_the_memory_limit():
    run = simulate(auto_schedule(4, 8, memory_limit=3))
    assert facts(run)[-1] == ("lower bound", "27", f"gap {plain(100 * (run.makespan / 27 - 1))}%")
    gap = plain(100 * (run.makespan / 28 - 1))
    assert facts(run, 3)[-1] == ("lower bound", "28", f"gap {gap}%, holding 3 at most")
    assert facts(run, 2) == facts(run)  # it does not keep this one
    assert unpack(gantt(run, memory_limit=3).board)[0]["runs"][0]["facts"][-1] == list(facts(run, 3)[-1])


def test_settings_answer():
    lab = pipeline_lab("gpipe")
    lab.settings = {**lab.settings, "microbatches": 12, "forward": 2.0, "compare": "zb_v"}
    assert lab.run.makespan == simulate(gpipe(4, 12), Costs(2, 1, 1)).makespan
    assert lab.runs[1].schedule == zb_v(4, 12)
    assert unpack(lab.board)[0]["runs"][1]["name"] == "ZB-V"
    lab.step = lab.num_steps
    lab.settings = {**lab.settings, "microbatches": 2, "compare": None}
    assert lab.step <= lab.num_steps and len(lab.runs) == 1


def test_each_stage_has_a_cost_of_its_own():
    lab = pipeline_lab("one_f_one_b", compare="zb_v", stage_costs=[1, 1, 1, 2])
    assert lab.settings["stage_costs"] == "1, 1, 1, 2"
    assert lab.run.makespan == simulate(one_f_one_b(4, 8), Costs(stage_costs=[1, 1, 1, 2])).makespan == 57
    assert lab.runs[1].makespan == simulate(zb_v(4, 8), Costs(stage_costs=[1, 1, 1, 2])).makespan  # of eight stages
    assert unpack(lab.board)[0]["about"].endswith("F : I : W = 1 : 1 : 1 · stages cost 1 : 1 : 1 : 2")
    assert not any(fact.note.startswith("(p") for fact in facts(lab.run))  # the formulas are those of equal stages
    lab.settings = {**lab.settings, "stage_costs": " 2 2\t2,2 "}
    assert lab.run.makespan == 66
    lab.settings = {**lab.settings, "stage_costs": ""}
    assert lab.run.makespan == 33 and lab.run.costs.stage_costs is None
    auto = pipeline_lab("auto", stage_costs=[1, 1, 1, 2]).run
    assert auto.makespan == auto.bounds.makespan == 51  # three forwards before rank 3 begins, 48 of its work


@pytest.mark.parametrize(
    "text, said",
    [
        ("1, 1, x", "and 'x' is no number; write one number for each stage, such as 1, 1, 1, 2"),
        ("1, 1, 1", "3 figures and the schedule has 4 stages, and neither divides the other; give 4 figures"),
        ("1, 1, 1, -2", "a stage costs -2; it must be a number from 0 to 100"),
        ("nan", "a stage costs nan"),
        ("1, 1, 1, 1e9", "a stage costs 1e9"),
    ],
)
def test_costs_of_stages_that_cannot_be_grey_the_picture_out_and_say_why(text: str, said: str):
    lab = pipeline_lab("one_f_one_b")
    before = lab.board
    lab.settings = {**lab.settings, "stage_costs": text}
    assert said in lab.notice and lab.is_stale and lab.board == before
    lab.settings = {**lab.settings, "stage_costs": "1, 1, 1, 2"}
    assert lab.notice == "" and not lab.is_stale and lab.run.makespan == 57


def test_the_scheduler_answers_for_large_pipelines_too():
    lab = pipeline_lab("auto", ranks=16, microbatches=64, memory_limit=20)
    assert lab.notice == ""
    assert lab.run.makespan == lab.run.bounds.makespan  # its first guesses do here, and take no second


def test_a_rule_that_does_not_fit_is_refused_in_words_and_the_picture_stays():
    lab = pipeline_lab("gpipe")
    before = lab.board
    lab.settings = {**lab.settings, "rule": "dualpipe", "ranks": 3}
    assert "dualpipe needs an even number of ranks" in lab.notice and lab.board == before
    lab.settings = {**lab.settings, "ranks": 4}
    assert lab.notice == "" and lab.schedule.name == "dualpipe"
    with pytest.raises(ScheduleError, match="even number of ranks"):
        pipeline_lab("dualpipe", ranks=3)


def test_memory():
    lab = pipeline_lab("one_f_one_b", memory_limit=3)
    assert "rank 0" in lab.notice and "its limit of 3" in lab.notice
    lab.settings = {**lab.settings, "rule": "auto"}
    assert lab.notice == "" and lab.run.peak_activations.max() <= 3
    assert lab.run.makespan < simulate(one_f_one_b(4, 8)).makespan  # fewer slots, and yet sooner: it splits backward


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"rule": "wonderful"}, "rule is 'wonderful'; it must be one of naive, gpipe"),
        ({"compare": "edited"}, "compare is 'edited'"),
        ({"ranks": 0}, "ranks is 0; it must be a number from 1 to 16"),
        ({"microbatches": 2.5}, "a whole number"),
        ({"transfer": float("nan")}, "transfer is nan"),
        ({"memory_limit": 0}, "memory_limit is 0"),
        ({"memory_limit": True}, "memory_limit is True"),
        ({"memory_limit": float("nan")}, "memory_limit is nan"),
        ({"overlap": 1.5}, "overlap is 1.5; it must be a number from 0 to 1"),
        ({"own": {"mine": 3}}, "own is .*; it must have schedules as CSV"),
        ({"stage_costs": [1, 2]}, r"stage_costs is \[1, 2\]; it must be text"),
        ({"speed": 1}, "there is no setting 'speed'"),
    ],
)
def test_settings_that_no_slider_has(wrong: dict, said: str):
    lab = pipeline_lab()
    with pytest.raises(traitlets.TraitError, match=said):
        lab.settings = {**lab.settings, **wrong}


def test_moves_are_legal_or_the_reason_is_told():
    lab = pipeline_lab("one_f_one_b")
    before = lab.schedule
    assert not lab.move(0, 1, 4)
    assert lab.notice.startswith("not legal: deadlock") and lab.schedule == before
    assert not lab.move(0, 4, 0)
    assert lab.notice.startswith("not legal") and "B0 of stage 0" in lab.notice
    assert not lab.move(7, 0, 0)
    assert "rank 7" in lab.notice
    assert lab.move(rank=0, index=5, to=4) and lab.notice == ""  # F4 before B0: one more in memory, no sooner
    assert lab.settings["rule"] == "edited" and lab.schedule.name == "edited"
    check(lab.schedule)
    assert lab.run.peak_activations[0] == 5
    lab.settings = {**lab.settings, "forward": 2.0}  # the same order at other costs
    assert lab.schedule.by_rank()[0][4].label == "F4" and lab.run.costs.forward == 2.0
    lab.settings = {**lab.settings, "rule": "one_f_one_b"}
    assert lab.schedule == before


def test_what_the_browser_asks_for():
    lab = pipeline_lab("zb_h1")
    sent: list = []
    lab.send = sent.append  # type: ignore[method-assign]
    for kind in ("svg", "csv", "perfetto"):
        lab._on_message(lab, {"export": kind}, [])
    svg, table, trace = sent[:3]
    assert ElementTree.fromstring(svg["text"]).tag.endswith("svg") and svg["file"] == "zb_h1.svg"
    assert next(csv.reader(StringIO(table["text"])))[0] == "0F0"
    names = {event.get("name") for event in json.loads(trace["text"])["traceEvents"]}
    assert {"F0", "I0", "W0"} <= names
    lab._on_message(lab, {"move": [0, 4, 5]}, [])
    assert lab.notice.startswith("not legal")
    lab._on_message(lab, {"settings": True}, [])
    assert sent[3:] == [{"answered": True}] * 2  # so that the browser knows that a kernel runs
    with pytest.raises(ValueError, match="must be one of svg, csv, perfetto"):
        lab.export("gif")


def test_a_move_is_answered_with_what_it_did():
    lab = pipeline_lab("one_f_one_b", ranks=2, microbatches=4, transfer=1.0)
    sent: list = []
    lab.send = sent.append  # type: ignore[method-assign]
    for move in ([0, 3, 2], [0, 5, 4], [0, 0, 7]):
        lab._on_message(lab, {"move": move}, [])
    assert [answer.get("did") for answer in sent] == [
        "Rank 0 now runs F2 of stage 0 after F1 of stage 0. The makespan stays 19.",
        "Rank 0 now runs F3 of stage 0 after B0 of stage 0. The makespan goes from 19 to 17.",
        None,
    ]
    assert lab.notice.startswith("not legal") and lab.run.makespan == 17


def test_gantt_of_two():
    card = gantt(simulate(one_f_one_b(4, 8)), zb_v(4, 8), memory_limit=4, step=3)
    assert card.step == 3 and "beside it zb_v" in repr(card)
    svg = ElementTree.fromstring(card.to_svg())
    assert (svg.get("role"), svg[0].text) == ("img", repr(card))
    with pytest.raises(traitlets.TraitError):
        card.step = card.num_steps + 1


def test_actions_other_than_passes_are_named_in_words():
    rows = [[*row, Action("REDUCE_GRAD", rank), Action("STEP")] for rank, row in enumerate(one_f_one_b(2, 1).by_rank())]
    header, _ = unpack(gantt(Schedule(rows)).board)
    assert header["runs"][0]["names"][-3:] == ["B0 of stage 1", "gradient sum of stage 1", "step"]
    assert {"gradient sum", "step"} <= {*header["tables"][0]["texts"]}


@pytest.mark.parametrize("by", ["kind", "microbatch", "stage"])
def test_the_page_has_the_looks_of_every_meaning_of_colours(by: str):
    runs = [simulate(zb_v(4, 8)), simulate(dualpipe(4, 8))]
    header, columns = unpack(gantt(*runs, colour=by).board)
    looks, marks = columns.get(f"look.{by}0", columns["look0"]), columns["mark0"]
    alone = lanes.draw(runs, None, still.WIDTH, [by])
    found = [look for look, mark in zip(looks, marks) if mark >= 0]
    wanted = [look for look, mark in alone.codes[:, [0, 3]].tolist() if mark >= 0]
    assert len(found) > sum(len(run.schedule) for run in runs)
    sent = [header["tables"][0]["looks"][look] for look in found]
    every = list(alone.looks.found)
    for one, look in zip(sent, wanted, strict=True):
        method, said = every[look]
        assert one == {"is": method, **{name: token(value) if name in COLOURS else value for name, value in said}}


def test_the_playhead_rests_at_ends_and_not_at_too_many():
    run = simulate(one_f_one_b(2, 2))
    assert moments([run]).tolist() == [0, 1, 2, 4, 5, 6, 7, 9]
    long = simulate(one_f_one_b(8, 300), Costs(1, 0.77, 0.31))
    assert len(moments([long])) == MAX_STEPS + 1 and moments([long])[-1] == pytest.approx(long.makespan)


def test_every_slider_has_a_setting():
    assert set(LIMITS) < set(pipeline_lab().settings)


def test_moves_are_taken_back_one_by_one_or_all():
    lab = pipeline_lab("one_f_one_b")
    before = lab.schedule
    assert not lab.undo() and not lab.reset()
    assert lab.move(0, 4, 3)  # the fifth thing of rank 0 before the fourth
    once = lab.schedule
    assert lab.move(1, 3, 2) and lab.num_edits == 2 and lab.settings["rule"] == "edited"
    assert lab.undo() and lab.schedule == once and lab.num_edits == 1
    assert lab.move(1, 3, 2) and lab.reset()
    assert lab.schedule == before and lab.num_edits == 0 and lab.settings["rule"] == "one_f_one_b"
    assert lab.move(0, 4, 3)
    lab.settings = {**lab.settings, "rule": "gpipe"}  # another rule: there is nothing left to take back
    assert lab.num_edits == 0 and not lab.undo() and lab.schedule.name == "gpipe"


def test_settings_hold_what_was_made_by_hand_and_can_be_undone_from_there():
    lab, other = pipeline_lab("dualpipe", overlap=1), pipeline_lab()
    assert lab.move(0, 1, 2) and lab.move(1, 3, 4)
    other.settings = lab.settings
    assert other.schedule == lab.schedule and other.board == lab.board and other.num_edits == 0
    assert other.move(2, 1, 2) and other.undo() and other.schedule == lab.schedule and not other.undo()
    assert lab.reset() and lab.settings["own"] == {} and lab.settings["rule"] == "dualpipe"


def test_settings_that_cannot_be_make_the_picture_stale():
    lab = pipeline_lab("gpipe")
    lab.settings = {**lab.settings, "rule": "dualpipe", "ranks": 3}
    assert lab.is_stale and "even number of ranks" in lab.notice
    lab.settings = {**lab.settings, "ranks": 4}
    assert not lab.is_stale and lab.notice == ""
    lab.move(0, 5, 0)  # a move that is not legal leaves what is shown as it is
    assert not lab.is_stale


CSV = "0F0,0F1,,,,0B0,0B1\n,1F0,1B0,1F1,1B1,,\n"


def test_a_schedule_that_is_pasted_is_shown_and_edited_like_any_other():
    lab = pipeline_lab("one_f_one_b", compare="gpipe", forward=2.0)
    before = lab.schedule
    assert lab.paste(CSV) and lab.notice == ""
    assert lab.schedule.by_rank() == Schedule.from_csv(CSV).by_rank() and lab.run.costs.forward == 2.0
    assert (lab.settings["rule"], lab.settings["ranks"], lab.settings["microbatches"]) == ("edited", 2, 2)
    assert lab.runs[1].schedule.num_ranks == 2  # what is beside it has its size
    assert Schedule.from_csv(lab.export("csv")).by_rank() == lab.schedule.by_rank()
    assert not lab.move(0, 2, 0) and lab.notice.startswith("not legal") and lab.num_edits == 1  # B0 before F0
    assert lab.move(0, 3, 2) and lab.num_edits == 2  # B1 before B0
    assert lab.undo() and lab.settings["rule"] == "edited"
    assert lab.undo() and lab.schedule == before and lab.settings["ranks"] == 4


@pytest.mark.parametrize(
    "text, said",
    [
        (" \n", "nothing was pasted; a schedule has one line per rank"),
        ("F0 B0", "F0"),
        ("0F0,0B0\n1F0", "not a schedule that can run: "),
        ("0B0,0F0\n", "not a schedule that can run: "),
        (
            "\n".join(f"{rank}F0,{rank}B0" for rank in range(17)),
            "has 17 ranks, and the lab shows 1 to 16; gantt(Schedule",
        ),
        (
            ",".join([f"{stage}F0" for stage in range(9)] + [f"{stage}B0" for stage in reversed(range(9))]),
            "has 9 stages on a rank, and the lab shows 1 to 8",
        ),
    ],
)
def test_what_is_wrong_with_a_pasted_schedule_is_told(text: str, said: str):
    lab = pipeline_lab("gpipe")
    before, board = lab.schedule, lab.board
    assert not lab.paste(text)
    assert said in lab.notice and lab.schedule == before and lab.board == board and lab.num_edits == 0
    assert lab.settings["rule"] == "gpipe" and not lab.is_stale


def test_what_was_pasted_stays_to_be_compared_with():
    lab = pipeline_lab("one_f_one_b")
    assert lab.paste(CSV) and {*lab.settings["own"]} == {"pasted", "edited"}
    pasted = lab.schedule
    assert lab.move(0, 3, 2)
    lab.settings = {**lab.settings, "compare": "pasted"}
    assert lab.schedule != pasted and lab.runs[1].schedule == pasted and lab.runs[1].schedule.name == "pasted"
    lab.settings = {**lab.settings, "rule": "pasted", "compare": None}
    assert lab.schedule == pasted and (lab.num_edits, lab.settings["ranks"]) == (0, 2)


class OfTorch:
    """What `Schedule.from_torch` reads of torch's schedules."""

    pipeline_order = {0: ["0F0", "0F1", None, "0B0", "0B1"], 1: [None, "1F0", "1B0", "1F1", "1B1"]}


def test_schedules_of_ones_own_and_of_torch_are_edited_and_compared():
    mine = zb_h1(4, 8).moved(0, 4, 3).named("mine")
    lab = pipeline_lab(mine, compare="zb_h1", forward=2.0)
    assert lab.schedule == mine and lab.schedule.name == lab.settings["rule"] == "mine"
    assert lab.run.makespan == simulate(mine, Costs(2, 1, 1)).makespan and lab.runs[1].schedule == zb_h1(4, 8)
    assert lab.move(0, 3, 4) and lab.schedule == zb_h1(4, 8) and lab.undo() and lab.schedule == mine
    lab.settings = {**lab.settings, "ranks": 6}
    assert (lab.settings["ranks"], lab.schedule) == (4, mine)  # it has the size that it has
    both = pipeline_lab(OfTorch(), compare=dualpipe(2, 4), overlap=1.0)
    assert [run.schedule.name for run in both.runs] == ["OfTorch", "yours"]  # dualpipe is the name of a rule
    assert both.runs[1].schedule == dualpipe(2, 4) and both.runs[1].makespan == 11
    two = pipeline_lab(gpipe(2, 2), compare=one_f_one_b(3, 3))
    assert [run.schedule.name for run in two.runs] == ["yours", "yours, 2"]
    assert two.runs[1].schedule.num_ranks == 3
    with pytest.raises(ScheduleError, match="cannot run"):
        pipeline_lab(Schedule.from_csv("0B0,0F0"))
    with pytest.raises(ScheduleError, match="int is not a schedule of torch"):
        pipeline_lab(3)


def test_a_schedule_of_your_own_keeps_its_size_whatever_is_set():
    lab = pipeline_lab("gpipe")
    assert lab.paste(CSV)
    lab.settings = {**lab.settings, "ranks": 6, "forward": 2.0}
    assert (lab.settings["ranks"], lab.schedule.num_ranks, lab.run.costs.forward) == (2, 2, 2.0)


def test_edits_are_taken_back_also_where_nothing_fits_beside_them():
    lab = pipeline_lab("one_f_one_b", ranks=3, microbatches=6)
    assert lab.paste(to_csv(one_f_one_b(2, 4)))
    lab.settings = {**lab.settings, "compare": "dualpipe"}  # fits 2 ranks, and not 3
    assert lab.notice == ""
    assert lab.undo() and lab.is_stale and "even number of ranks" in lab.notice


def test_letters_are_about_as_wide_as_their_font_says():
    for text in ("microbatches held, up to 4", "F : I : W = 1 : 1 : 1", "interleaved 1F1B", "rank 0 waits for F0"):
        for bold in (False, True):
            assert about_width(text, 11, bold) == pytest.approx(text_width(text, 11, bold), rel=0.04)
        assert about_width(text, 9.5, mono=True) == pytest.approx(text_width(text, 9.5, mono=True), rel=0.02)
