"""Schedules as data: actions, grids, pictures, torch's text."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tplab.errors import ScheduleError
from tplab.schedules import (
    RULES,
    Action,
    Schedule,
    check,
    chimera,
    dualpipe,
    dualpipe_v,
    gpipe,
    hanayo,
    interleaved_1f1b,
    interleaved_zb,
    linear,
    looped_bfs,
    naive,
    one_f_one_b,
    to_csv,
    two_way,
    v_half,
    v_min,
    v_shape,
    wave,
    with_communication,
    with_optimizer_step,
    wrapped,
    zb_h1,
    zb_h2,
    zb_v,
)

PICTURES = {
    "naive": (
        naive(ranks=2, microbatches=2),
        """\
F0 .. .. B0 F1 .. .. B1
.. F0 B0 .. .. F1 B1 ..""",
    ),
    "gpipe": (
        gpipe(ranks=3, microbatches=3),
        """\
F0 F1 F2 .. .. .. .. B0 B1 B2
.. F0 F1 F2 .. .. B0 B1 B2 ..
.. .. F0 F1 F2 B0 B1 B2 .. ..""",
    ),
    "one_f_one_b": (
        one_f_one_b(ranks=3, microbatches=4),
        """\
F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3
.. F0 F1 .. B0 F2 B1 F3 B2 .. B3 ..
.. .. F0 B0 F1 B1 F2 B2 F3 B3 .. ..""",
    ),
    "interleaved_1f1b": (
        interleaved_1f1b(ranks=2, microbatches=2, virtual_stages=2),
        """\
0F0 0F1 2F0 2F1 ... 2B0 ... 2B1 0B0 0B1
... 1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1 ...""",
    ),
    "looped_bfs": (
        looped_bfs(ranks=2, microbatches=2, virtual_stages=2),
        """\
0F0 0F1 2F0 2F1 ... ... 2B0 2B1 0B0 0B1
... 1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1 ...""",
    ),
    "zb_h1": (
        zb_h1(ranks=3, microbatches=4),
        """\
F0 F1 F2 .. .. I0 W0 F3 I1 W1 I2 W2 I3 W3
.. F0 F1 .. I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
.. .. F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3""",
    ),
    "zb_h2": (
        zb_h2(ranks=2, microbatches=4),
        """\
F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3 ..
.. F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3""",
    ),
    "interleaved_zb": (
        interleaved_zb(ranks=2, microbatches=2, virtual_stages=2),
        """\
0F0 0F1 2F0 2F1 ... 2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1
... 1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1""",
    ),
    "zb_v": (
        zb_v(ranks=2, microbatches=3),
        """\
0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2 ...
... 1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2""",
    ),
    "v_min": (
        v_min(ranks=2, microbatches=2),
        """\
0F0 0F1 ... 3F0 3I0 3F1 3W0 0I0 3I1 0W0 3W1 0I1 0W1
... 1F0 2F0 1F1 2F1 2I0 1I0 2W0 1W0 2I1 1I1 2W1 1W1""",
    ),
    "v_half": (
        v_half(ranks=3, microbatches=2),
        """\
0F0 0F1 ... ... ... 5F0 5I0 5F1 5I1 5W0 5W1 0I0 0W0 0I1 0W1 ...
... 1F0 1F1 ... 4F0 ... 4F1 4I0 4W0 4I1 1I0 4W1 1I1 1W0 1W1 ...
... ... 2F0 3F0 2F1 3F1 ... ... 3I0 2I0 3I1 2I1 3W0 2W0 3W1 2W1""",
    ),
    "dualpipe": (
        dualpipe(ranks=2, microbatches=4),
        """\
0F0 1F2 0F1 1B2 1F3+0B0 1B3 0I1 0W1
0F2 1F0 0F3 1B0 1F1+0B2 1B1 0I3 0W3""",
    ),
    "dualpipe_v": (
        dualpipe_v(ranks=2, microbatches=4),
        """\
0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3+3B1 3F2+0B0 3B2 ... 3F3+0B1 3B3 0I2 0W2 0I3 0W3
... 1F0 2F0 1F1 2F1 1F2 2B0 2F2+1B0 1F3+2B1 2F3+1B1 2B2 1B2 ... 2I3 1I3 2W3 1W3""",
    ),
    "chimera": (
        chimera(ranks=4, microbatches=4),
        """\
0F0 0F1 ... 3F2 3B2 3F3 3B3 0B0 ... 0B1
... 1F0 2F2 1F1 2F3 2B2 1B0 2B3 1B1 ...
... 1F2 2F0 1F3 2F1 2B0 1B2 2B1 1B3 ...
0F2 0F3 ... 3F0 3B0 3F1 3B1 0B2 ... 0B3""",
    ),
    "hanayo": (
        hanayo(ranks=2, microbatches=2, virtual_stages=2),
        """\
0F0 0F1 ... 3F0 3B0 3F1 3B1 0B0 ... 0B1
... 1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1 ...""",
    ),
}


@pytest.mark.parametrize("name", PICTURES)
def test_a_rule_is_its_picture(name):
    schedule, picture = PICTURES[name]
    assert str(schedule) == picture
    assert schedule.name == name
    check(schedule)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_the_drawing_in_a_rules_docstring_is_what_it_makes(rule):
    lines = [line.strip() for line in (rule.__doc__ or "").splitlines()]
    picture = [line for line in lines if re.fullmatch(r"((\d*[FBIW]\d+|\.+)[ +]?)+", line)]
    drawn = Schedule.parse("\n".join(picture))
    assert str(rule(drawn.num_ranks, drawn.num_microbatches)) == "\n".join(picture)


@pytest.mark.parametrize("name", PICTURES)
def test_every_text_reads_back(name):
    schedule, picture = PICTURES[name]
    assert Schedule.parse(picture) == schedule
    assert Schedule.from_csv(to_csv(schedule, "compute_only")) == schedule
    lowered = with_communication(schedule)
    assert Schedule.from_csv(to_csv(schedule, "compute_comms")) == lowered
    assert lowered.compute_only() == schedule
    assert Schedule(schedule.by_rank(), schedule.placement) == schedule


def test_the_grid_by_rank_and_by_tick_is_the_same_grid():
    schedule = one_f_one_b(ranks=2, microbatches=2)
    assert [[str(action) for action in row] for row in schedule.by_rank()] == [
        ["0F0", "0F1", "0B0", "0B1"],
        ["1F0", "1B0", "1F1", "1B1"],
    ]
    grid = schedule.by_tick()
    assert [tuple(map(str, cells)) for cells in grid[:3]] == [("0F0", "None"), ("0F1", "1F0"), ("None", "1B0")]
    table = schedule.table()
    assert table.shape == (len(grid), 2, 3)
    for tick, cells in enumerate(grid):
        for rank, action in enumerate(cells):
            kind, stage, microbatch = table[tick, rank]
            if action is None:
                assert (kind, stage, microbatch) == (-1, -1, -1)
            else:
                assert (action.stage, action.microbatch) == (stage, microbatch)


def test_sizes_and_ranks():
    schedule = interleaved_1f1b(ranks=4, microbatches=8, virtual_stages=2)
    assert (schedule.num_ranks, schedule.num_stages, schedule.num_microbatches, len(schedule)) == (4, 8, 8, 128)
    assert schedule.stages_per_rank == 2
    assert schedule.placement == wrapped(4, 2)
    assert schedule.rank_of(stage=5) == 1
    assert repr(schedule) == "Schedule interleaved_1f1b: 4 ranks, 8 microbatches, 8 stages (wrapped), 128 actions"
    both_ways = chimera(ranks=4, microbatches=4)
    assert both_ways.stages_per_rank == 1
    assert (both_ways.rank_of(0, microbatch=0), both_ways.rank_of(0, microbatch=2)) == (0, 3)
    with pytest.raises(ScheduleError, match="no rank runs F0 of stage 9"):
        schedule.rank_of(9)


def test_placements():
    assert linear(3) == ((0,), (1,), (2,))
    assert wrapped(2, 3) == ((0, 2, 4), (1, 3, 5))
    assert v_shape(3) == ((0, 5), (1, 4), (2, 3))
    assert wave(2, 3) == ((0, 3, 4), (1, 2, 5))
    assert two_way(2) == ((0, 1), (1, 0))


def test_a_schedule_cannot_be_written_to():
    schedule = gpipe(2, 2)
    with pytest.raises(ValueError, match="read-only"):
        schedule.stage[0] = 1
    assert hash(schedule) == hash(gpipe(2, 2))
    assert schedule != gpipe(2, 3)


@given(st.sampled_from(["F", "B", "I", "W", "SEND_F", "RECV_B"]), st.integers(0, 99), st.integers(0, 9999))
def test_an_action_reads_back(kind, stage, microbatch):
    action = Action(kind, stage, microbatch)
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize("text", ["", "F-1", "2X0", "2f0", "2F0 3F0"])
def test_what_is_no_action_says_how_to_write_one(text):
    with pytest.raises(ScheduleError, match="write stage, kind, microbatch"):
        Action.parse(text)


def test_torchs_text_in_both_forms():
    schedule = dualpipe_v(ranks=1, microbatches=2)
    assert to_csv(schedule) == "0F0,1F0,0F1,1B0,(1F1;0B0)OVERLAP_F_B,,1B1,0I1,0W1\n"
    pair = Schedule.from_csv("0F0,(0F3;7B1)OVERLAP_F_B,0REDUCE_GRAD,0UNSHARD\n").by_rank()[0]
    assert pair == (
        Action("F", 0, 0),
        Action("F", 0, 3),
        Action("B", 7, 1, joined=True),
        Action("REDUCE_GRAD", 0),
        Action("UNSHARD", 0),
    )
    assert to_csv(one_f_one_b(2, 1), "compute_comms") == ("0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n")
    with pytest.raises(ScheduleError, match="compute_only"):
        to_csv(schedule, "json")
    with pytest.raises(ScheduleError, match="not an overlapped pair"):
        Schedule.from_csv("(0F0;1B0)TOGETHER\n")


def test_optimizer_steps_and_gradient_sums_are_written_in():
    schedule = with_optimizer_step(zb_h1(ranks=2, microbatches=1), sync=True)
    assert [[str(action) for action in row] for row in schedule.by_rank()] == [
        ["0F0", "0I0", "0W0", "0REDUCE_GRAD", "STEP"],
        ["1F0", "1I0", "1W0", "1REDUCE_GRAD", "STEP"],
    ]
    check(schedule)
    assert schedule.compute_only() == zb_h1(2, 1)
    assert with_optimizer_step(schedule, sync=True) == schedule
    paired = with_optimizer_step(dualpipe_v(2, 4), sync=True)
    check(paired)
    for row in paired.by_rank():
        assert sum(action.kind == "REDUCE_GRAD" for action in row) == 2


def test_moving_an_action_is_legal_or_says_why_not():
    schedule = zb_h1(ranks=2, microbatches=2)
    later = schedule.moved(rank=0, index=3, to=4)
    check(later)
    assert [str(action) for action in later.by_rank()[0]] == ["0F0", "0F1", "0I0", "0I1", "0W0", "0W1"]
    with pytest.raises(ScheduleError, match=r"rank 0 \(index 2\) runs W0 of stage 0 before I0 of stage 0"):
        check(schedule.moved(rank=0, index=3, to=2))
    with pytest.raises(ScheduleError, match="has no actions 9 and 0"):
        schedule.moved(rank=0, index=9, to=0)


def test_what_cannot_run_is_still_drawn():
    schedule = Schedule.from_csv("1F0,0F0,0B0,1B0\n")
    assert str(schedule).splitlines()[0] == "1F0 0F0 0B0 1B0"
    assert "cannot run: rank 0 (index 0) waits for what F0 of stage 1 needs, which never comes" in str(schedule)


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, "2"])
def test_counts_are_whole_numbers(bad):
    for rule in (naive, gpipe, one_f_one_b, zb_h1, zb_h2, zb_v, v_half, v_min, dualpipe, dualpipe_v, chimera):
        with pytest.raises(ScheduleError, match="whole number, 1 or more"):
            rule(ranks=2, microbatches=bad)
        with pytest.raises(ScheduleError, match="whole number, 1 or more"):
            rule(ranks=bad, microbatches=8)
    for rule in (interleaved_1f1b, looped_bfs, interleaved_zb, hanayo):
        with pytest.raises(ScheduleError, match="whole number, 1 or more"):
            rule(ranks=2, microbatches=2, virtual_stages=bad)


def test_what_a_rule_cannot_do_it_says_with_the_way_out():
    with pytest.raises(ScheduleError, match=r"take 4$"):
        chimera(ranks=3, microbatches=4)
    with pytest.raises(ScheduleError, match="take 4 ranks and 8 microbatches"):
        dualpipe(ranks=3, microbatches=7)
    with pytest.raises(ScheduleError, match="needs at least 8 microbatches"):
        dualpipe_v(ranks=4, microbatches=7)
    with pytest.raises(ScheduleError, match=r"take 4$"):
        hanayo(ranks=2, microbatches=2, virtual_stages=3)


def test_bad_rows():
    with pytest.raises(ScheduleError, match="at least one rank"):
        Schedule([])
    with pytest.raises(ScheduleError, match="joined to the one before"):
        Schedule([[Action("F", 0, 0, joined=True)]])
    with pytest.raises(ScheduleError, match="one of F, B, I, W"):
        Action("X", 0, 0)
    with pytest.raises(ScheduleError, match="2 ticks for 1 actions"):
        Schedule([[Action("F", 0, 0)]], ticks=[0, 1])
    with pytest.raises(ScheduleError, match="placement names 2 ranks"):
        Schedule([[Action("F", 0, 0)]], placement=((0,), (1,)))
    with pytest.raises(ScheduleError, match="picture is empty"):
        Schedule.parse("\n")
    empty = Schedule([[], []])
    assert (len(empty), empty.num_stages, empty.num_ticks, str(empty)) == (0, 0, 0, "\n")
    assert np.array_equal(empty.table(), np.empty((0, 2, 3)))


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n"])
def test_tables_of_every_system(end):
    """Lines end in a carriage return in some spreadsheets' tables."""
    schedule = Schedule.from_csv(end.join(["0F0,,,0B0", ",1F0,1B0", ""]))
    assert str(schedule) == "F0 .. .. B0\n.. F0 B0 .."
    assert str(Schedule.from_csv(end.join(['"0F0', '",0B0']))) == "F0 B0"


@pytest.mark.parametrize("read", [Schedule.parse, Schedule.from_csv])
@pytest.mark.parametrize(
    "text, why",
    [
        (
            "F" + "9" * 5000,
            "microbatch 9999999999..., a number of 5,000 digits; it must be a whole number",
        ),
        ("9" * 11 + "F0", "stage 9999999999..., a number of 11 digits"),
        ("9" * 10 + "F0", "stage 9999999999; it must be"),
        ("x" * 10_000, r"'x{100}...' is not an action"),
        ("F0\x00", "is not an action"),
    ],
)
def test_texts_that_are_no_schedule(read, text, why):
    with pytest.raises(ScheduleError, match=why):
        read(text)


def test_long_texts_that_are_schedules():
    assert str(Schedule.parse("F" + "0" * 5000)) == "F0"
    with pytest.raises(ScheduleError, match=r"this is not a table of torch's .*; write one line per rank: 0F0,0F1"):
        Schedule.from_csv("x" * 200_000)
