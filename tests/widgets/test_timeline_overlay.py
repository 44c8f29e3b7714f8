"""`timeline(trace, predicted=...)`: each action where it ran and where it was predicted, a function of the step."""

from __future__ import annotations

import io
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tplab import Mesh, Trace
from tplab.errors import MeshError, ScheduleError
from tplab.schedules import (
    RULES,
    Comparison,
    Costs,
    Schedule,
    Simulation,
    compare,
    dualpipe,
    gpipe,
    measured_costs,
    one_f_one_b,
    simulate,
    zb_h1,
)
from tplab.trace import Recorder
from tplab.widgets import timeline
from tplab.widgets.paper.frame import MAX_STEPS
from tplab.widgets.paper.wire import unpack
from tplab.widgets.schedule.overlay import about, facts, now, overlay, picture, say

COSTS = Costs(1.0, 1.0, 0.5, transfer=0.25)
BEGIN = 2.0  # of the first batch in the traces below


def executed(
    run: Simulation, mesh: Mesh | None = None, slower: float = 1.0, batches: int = 1, clock: str = "modelled"
) -> Trace:
    """The trace of a machine that does what `run` says, every moment `slower` times as late, and batch k after another
    10 k. Before and after each batch, every rank does something else for 0.5."""
    schedule = run.schedule
    mesh = mesh or Mesh(pp=schedule.num_ranks)
    recorder, begin = Recorder(mesh, "step", "torch"), BEGIN
    for batch in range(batches):
        for rank in mesh.ranks:
            row = mesh.index(rank, "pp")
            recorder.add(rank, "compute", "relu", begin - 0.5, begin)
            end = 0.0
            for place in range(schedule.offsets[row], schedule.offsets[row + 1]):
                action, start, end = schedule.action(place), run.start[place] * slower, run.end[place] * slower
                recorder.add(rank, "compute", action.label, begin + start, begin + end, where=f"stage {action.stage}")
            recorder.add(rank, "compute", "mean", begin + end, begin + end + 0.5)
        begin += slower * run.makespan + 10 * (batch + 1)
        slower *= 2
    return recorder.trace(clock, "s" if clock == "measured" else "steps")


def one_by_one(schedule: Schedule) -> Schedule:
    """As an executor runs it: of an overlapped pair, one after the other."""
    rows = [[action.alone() for action in row] for row in schedule.by_rank()]
    return Schedule(rows, schedule.placement, schedule.name)


SCHEDULE = one_f_one_b(2, 2)
PREDICTED = simulate(SCHEDULE, COSTS)


# --- the picture as a function of the step ---------------------------------------------------------------------------


@settings(max_examples=12, deadline=None)
@given(
    rule=st.sampled_from(["gpipe", "one_f_one_b", "interleaved_1f1b", "zb_h1", "zb_v", "dualpipe"]),
    half=st.integers(1, 2),
    slower=st.sampled_from([1.0, 1.5, 0.8]),
)
def test_at_every_step_it_shows_what_runs_and_what_was_due(rule: str, half: int, slower: float):
    schedule = RULES[rule](ranks=2 * half, microbatches=4 * half)
    run = simulate(schedule, COSTS)
    trace = executed(simulate(one_by_one(schedule), COSTS), slower=slower)
    over = overlay(trace, run)
    done = -1
    for step in np.linspace(0, over.num_steps, 2 * over.num_steps + 1).tolist():
        moment = now(over, step)
        late, early = moment.time + 1e-7, moment.time - 1e-7
        for rank in range(2 * half):
            ran = [f"{e.where[6:]}{e.op}" for e in trace.select(rank=rank, kind="compute").events
                   if e.where and e.start - BEGIN <= late and early < e.end - BEGIN - 2e-7]  # fmt: skip
            assert [str(schedule.action(row)) for row in moment.runs[rank]] == ran
            row = range(schedule.offsets[rank], schedule.offsets[rank + 1])
            assert moment.due[rank] == [p for p in row if run.start[p] <= late and early < run.end[p] - 2e-7]
        assert done <= moment.done <= len(schedule)
        done = moment.done
        head, said, far = say(over, moment)
        assert head.startswith("t = ")
        assert far == f"{done} of {len(schedule)} actions done, {moment.were_due} due"
        if slower == 1 and rule != "dualpipe":
            assert " was due" not in said
    assert (now(over, 0).done, now(over, 0).were_due) == (0, 0)
    end = now(over, over.num_steps)
    assert end.done == end.were_due == len(schedule)
    assert say(over, end)[1] == "all ranks are done"
    assert (now(over, -1), now(over, 1e9)) == (now(over, 0), end)


def test_each_step_is_told_beside_the_prediction():
    over = overlay(executed(PREDICTED, slower=2.0), PREDICTED)
    told = [say(over, now(over, step)) for step in (0, 1, 2, 3, over.num_steps - 1)]
    assert told == [
        ("t = 0", "rank 0 runs F0, as predicted", "0 of 8 actions done, 0 due"),
        ("t = 2", "rank 0 runs F1 (nothing was due), rank 1 runs no action (F0 was due)",
         "1 of 8 actions done, 2 due"),
        ("t = 4", "rank 0 runs no action (B0 was due), rank 1 runs F0 (F1 was due)", "2 of 8 actions done, 4 due"),
        ("t = 4.5", "rank 0 runs no action (B0 was due), rank 1 runs B0 (F1 was due)",
         "3 of 8 actions done, 4 due"),
        ("t = 12.5", "no rank runs an action, as predicted", "7 of 8 actions done, 8 due"),
    ]  # fmt: skip


@pytest.mark.parametrize("rule", ["one_f_one_b", "zb_v", "dualpipe"])
def test_the_browser_has_what_is_said_at_any_time(rule: str):
    run = simulate(RULES[rule](ranks=4, microbatches=8), Costs(0.1, 0.1, 0.05, transfer=0.03))
    trace = executed(simulate(one_by_one(run.schedule), Costs(0.1, 0.1, 0.05, transfer=0.04)), slower=1.3)
    over = overlay(trace, run)
    header, columns = unpack(timeline(trace, run).score)
    stops = columns["stops"]
    assert stops[0] == 0 and len(stops) == len(header["said"])
    for position in np.linspace(0, over.num_steps, 3 * over.num_steps + 1).tolist():
        moment = now(over, position)
        stop = np.flatnonzero(stops <= moment.time + 1e-9 * over.times[-1])[-1]  # as in static/timeline.js
        assert tuple(header["said"][stop]) == say(over, moment)[1:]


def test_the_picture_is_a_function_of_the_step():
    over = overlay(executed(PREDICTED, slower=1.5), PREDICTED)
    drawn = [picture(over, step) for step in range(over.num_steps + 1)]
    assert drawn == [picture(over, step) for step in range(over.num_steps + 1)]
    assert len(set(drawn)) == over.num_steps + 1
    sizes = [Image.open(io.BytesIO(data)).size for data in drawn]
    assert sizes[0] < min(sizes[1:])  # with a playhead there is also what happens there
    trace = executed(PREDICTED, slower=1.5)
    assert timeline(trace, PREDICTED, 3).picture() == drawn[3]
    assert timeline(trace, simulate(SCHEDULE, Costs(2.0))).picture() != drawn[0]
    for ranks in (12, 24):
        run = simulate(gpipe(ranks, 2))
        assert len(timeline(executed(run), run).picture()) < 300_000


# --- what is said of it ---------------------------------------------------------------------------------------------


def test_both_makespans_the_residual_and_the_clock_are_told():
    trace = executed(PREDICTED, slower=1.5)
    over = overlay(trace, PREDICTED)
    assert about(over) == "executed 12 · predicted 8 · residual +4"
    assert repr(timeline(trace, PREDICTED)) == (
        "Timeline of 1F1B on Mesh(pp=2): 2 ranks, 8 actions, executed 12, predicted 8, residual +4 "
        "(modelled, unit times)."
    )
    assert [tuple(fact) for fact in facts(over)] == [
        ("makespan, executed", "12", ""),
        ("predicted", "8", ""),
        ("residual", "+4", "50%"),
        ("bubble", "37.5%", "predicted 37.5%"),
        ("largest lag", "+3.25", "B1 of stage 0"),
        ("other work", "0.5", "per rank"),
    ]
    exact = overlay(executed(PREDICTED), PREDICTED)
    assert about(exact) == "executed 8 · predicted 8 · residual 0"
    assert about(overlay(executed(PREDICTED, slower=0.5), PREDICTED)).endswith("residual -4")


def test_measured_times_are_in_the_picture_and_not_in_the_sentence():
    """The sentence is compared when a notebook is run again; measured times are never the same twice."""
    run = simulate(SCHEDULE, Costs(1.0, unit="s"))
    said = {repr(timeline(executed(run, slower=slower, clock="measured"), run)) for slower in (1.0, 1.234)}
    assert said == {
        "Timeline of 1F1B on Mesh(pp=2): 2 ranks, 8 actions, each where it was measured and where it was "
        "predicted (measured)."
    }
    over = overlay(executed(run, slower=1.5, clock="measured"), run)
    assert about(over) == "measured 13.5 s · predicted 9 s · residual +4.5 s"
    assert over.comparison.residual == 4.5


def test_what_is_sent_to_the_browser():
    trace = executed(PREDICTED, slower=1.5)
    over = overlay(trace, PREDICTED)
    header, columns = unpack(timeline(trace, PREDICTED).score)
    assert header["about"] == about(over)
    assert header["badge"] == "modelled · unit times"
    assert [tuple(fact) for fact in header["facts"]] == facts(over)
    keys = [-1 if mark < 0 else int(columns["key0"][mark]) for mark in columns["mark0"]]
    spans = [
        (key, x, x + w) for key, mark, x, w in zip(keys, columns["mark0"], columns["x0"], columns["w0"]) if mark >= 0
    ]
    ran, due = ([span for span in spans if span[0] >= 0][first::2] for first in (0, 1))
    assert ran == [*zip(range(8), 1.5 * PREDICTED.start, 1.5 * PREDICTED.end)]
    assert due == [*zip(range(8), PREDICTED.start, PREDICTED.end)]
    # What rank 1 does after its last action, while the batch goes on; what is before the batch is no part of it.
    assert [span for span in spans if span[0] < 0] == [(-1, 9.375, 9.875)]
    assert ["", "rank 1: mean, no action of the schedule"] in header["hints"]
    assert timeline(trace, PREDICTED).num_steps == len(header["times"]) - 1


def test_without_a_prediction_nothing_is_different():
    trace = executed(PREDICTED)
    widget = timeline(trace)
    assert widget.comparison is None
    assert repr(widget).startswith("Timeline of step on Mesh(pp=2): 1 step, nothing is sent")
    assert "said" not in unpack(widget.score)[0]


# --- which trace, which batch, which ranks ---------------------------------------------------------------------------


def test_a_run_and_a_comparison_show_the_same():
    trace = executed(PREDICTED, batches=3)
    beside = compare(SCHEDULE, trace, COSTS, batch=1)
    assert isinstance(beside, Comparison)
    assert (beside.batch, beside.num_batches, beside.ranks, beside.busy.sum()) == (1, 3, (0, 1), 20)
    from_run = timeline(trace, PREDICTED, batch=1)
    assert timeline(trace, beside).score == from_run.score
    assert timeline(trace, compare(PREDICTED, trace, batch=1)).score == from_run.score
    assert timeline(trace, beside, batch=0).score == timeline(trace, PREDICTED, batch=0).score


def test_of_several_batches_it_shows_one():
    trace = executed(PREDICTED, batches=3)
    heads = [about(overlay(trace, PREDICTED, batch=batch)) for batch in (0, 1, 2)]
    assert heads == [
        "batch 1 of 3 · executed 8 · predicted 8 · residual 0",
        "batch 2 of 3 · executed 16 · predicted 8 · residual +8",
        "batch 3 of 3 · executed 32 · predicted 8 · residual +24",
    ]
    assert about(overlay(trace, PREDICTED)) == heads[2]
    for batch in (0, 1, 2):
        over = overlay(trace, PREDICTED, batch=batch)
        assert over.actions["start"].min() == over.actions["due_start"].min() == 0


def test_an_axis_of_a_larger_mesh():
    mesh = Mesh(dp=2, pp=2, tp=2)
    over = overlay(executed(PREDICTED, mesh, slower=1.5), PREDICTED)
    assert over.comparison.ranks == (0, 2)
    assert say(over, now(over, 0))[1] == "rank 0 runs F0, as predicted"
    assert "rank 2" in say(over, now(over, 1))[1]
    texts = unpack(timeline(executed(PREDICTED, mesh), PREDICTED).score)[0]["tables"][0]["texts"]
    assert texts[0] == "rank 0" and "rank 2" in texts and "rank 1" not in texts


def test_optimizer_steps_of_the_prediction_are_left_aside():
    run = simulate(SCHEDULE, Costs(1.0, 1.0, 0.5, 0.25, optimizer_step=5.0, gradient_sync=3.0), optimizer="together")
    trace = executed(PREDICTED)
    assert run.makespan > 12
    over = overlay(trace, run)
    assert np.array_equal(over.actions["due_end"], PREDICTED.end)
    assert np.array_equal(over.predicted.waits_for, PREDICTED.waits_for)
    assert about(over) == "executed 8 · predicted 8 · residual 0"


def test_what_takes_no_time_and_many_actions():
    nothing = simulate(SCHEDULE, Costs(0.0, 0.0, 0.0, transfer=1.0))
    over = overlay(executed(nothing), nothing)
    assert [now(over, step).done for step in range(over.num_steps + 1)] == [2, 6, 8]
    assert "bubble" not in {fact.name for fact in facts(over)}
    assert picture(over, 1)
    still = simulate(SCHEDULE, Costs(0.0, 0.0, 0.0))
    assert timeline(executed(still), still).num_steps == 1
    many = simulate(gpipe(4, 200))
    assert timeline(executed(many, slower=1.01), many).num_steps == MAX_STEPS


def test_wrong_use_is_told_in_words():
    trace = executed(PREDICTED, batches=2)
    for wrong, message in (
        (simulate(gpipe(2, 2), COSTS), "rank 1 ran B0 of stage 1 where the schedule has F1 of stage 1; the trace must"),
        (simulate(one_f_one_b(4, 2), COSTS), "the trace has 2 ranks along 'pp', and the schedule 4"),
        (simulate(one_f_one_b(2, 1), COSTS), "rank 0 ran F1 of stage 0 where the schedule has B0 of stage 0"),
        (simulate(zb_h1(2, 2), COSTS), "rank 0 ran B0 of stage 0 where the schedule has I0 of stage 0"),
        (
            simulate(SCHEDULE, Costs(unit="s")),
            r"counts its time in seconds, and the trace in steps; predict with "
            r"measured_costs\(schedule, trace\), or with Costs\(..., unit='steps'\)",
        ),
    ):
        with pytest.raises(ScheduleError, match=message):
            timeline(trace, wrong)
    with pytest.raises(ScheduleError, match="2 batches of this schedule on rank 0, so there is no batch 2"):
        timeline(trace, PREDICTED, batch=2)
    with pytest.raises(MeshError, match="'stages'"):
        timeline(trace, PREDICTED, axis="stages")
    with pytest.raises(TypeError, match=r"predicted is a Schedule; give a run, simulate\(schedule, costs\)"):
        timeline(trace, SCHEDULE)  # type: ignore
    other = executed(PREDICTED, slower=1.25, batches=2)
    with pytest.raises(ScheduleError, match="the comparison is of another trace"):
        timeline(trace, compare(SCHEDULE, other, COSTS))
    with pytest.raises(ScheduleError, match="give predicted= as well"):
        timeline(trace, batch=0)
    with pytest.raises(ScheduleError, match="this run was simulated with costs of its own"):
        compare(PREDICTED, trace, COSTS)


def test_a_longer_schedule_that_begins_as_another_is_not_it():
    """GPipe with four microbatches would be found in the trace of eight, if one looked for its actions only."""
    with pytest.raises(ScheduleError, match="rank 0 ran F4 of stage 0 where the schedule has B0 of stage 0"):
        timeline(executed(simulate(gpipe(2, 8))), simulate(gpipe(2, 4)))


# --- a real run ------------------------------------------------------------------------------------------------------


def test_real_runs_over_their_predictions():
    torch = pytest.importorskip("torch")
    from tplab.torch import axis_index, run, train_batch

    def step(schedule: Schedule, **options):
        def program():
            x = torch.ones(4, 8)
            stages = {stage: torch.nn.Linear(8, 8) for stage in schedule.placement[axis_index("pp")]}
            for _ in range(2):
                batch = [(x, x)] * schedule.num_microbatches
                train_batch(schedule, stages, batch, torch.nn.functional.mse_loss, **options)

        return program

    schedule = zb_h1(2, 3)
    trace = run(step(schedule), Mesh(pp=2), clock="measured").trace
    widget = timeline(trace, simulate(schedule, measured_costs(schedule, trace)))
    assert re.fullmatch(r"batch 2 of 2 · measured .*s · predicted .*s · residual .+", about(widget.of))  # type: ignore
    assert widget.comparison and widget.comparison.residual >= -1e-9
    trace = run(step(dualpipe(2, 4)), Mesh(dp=2, pp=2), cluster="h100").trace
    widget = timeline(trace, compare(dualpipe(2, 4), trace))
    assert "modelled, h100, data sheet" in repr(widget)
    assert widget.comparison and (widget.comparison.lag >= -1e-12).all()  # pairs run one after the other
    trace = run(step(schedule, costs=Costs(2, 1, 1)), Mesh(pp=2)).trace
    widget = timeline(trace, simulate(schedule, Costs(2, 1, 1, transfer=1)))
    assert "residual 0 (modelled, unit times)" in repr(widget)
