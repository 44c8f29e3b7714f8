"""Checks: every fault is found, and told in words: which action, on which rank, misses what."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.schedule_oracle import times
from tplab.errors import ScheduleError
from tplab.schedules import (
    RULES,
    Action,
    Costs,
    Schedule,
    check,
    dualpipe_v,
    faults,
    gpipe,
    one_f_one_b,
    simulate,
    v_min,
    with_communication,
    zb_h1,
)


def told(schedule, **options):
    return [str(fault) for fault in faults(schedule, **options)]


def test_nothing_is_wrong_with_a_right_schedule():
    for schedule in (one_f_one_b(4, 8), zb_h1(3, 5), v_min(4, 6), dualpipe_v(2, 5)):
        assert faults(schedule) == []
        check(schedule)
        check(with_communication(schedule))


BROKEN = {
    "a forward is missing": ("0B0\n", [
        "rank 0 never runs F0 of stage 0",
        "rank 0 (index 0) runs B0 of stage 0, and no rank runs F0 of stage 0, which it needs"]),
    "a backward is missing": ("0F0\n1F0,1B0\n", ["rank 0 never runs B0 of stage 0, nor I0: its backward is missing"]),
    "a weight gradient is missing": ("0F0,0I0\n", [
        "rank 0 runs I0 of stage 0 and never W0: its weights get no gradient"]),
    "a forward twice": ("0F0,0F0,0B0\n", ["rank 0 (index 1) runs F0 of stage 0 again: rank 0 has run it at index 0"]),
    "torch lets this pass": ("0F0,0B0,0B0\n", [
        "rank 0 (index 2) runs B0 of stage 0 again: rank 0 has run it at index 1"]),
    "B and I": ("0F0,0B0,0I0,0W0\n", ["rank 0 runs B0 and I0 of stage 0: the input gradient is computed twice"]),
    "B and W": ("0F0,0B0,0W0\n", ["rank 0 runs W0 of stage 0, and B0 has done that already"]),
    "W before I": ("0F0,0W0,0I0\n", [
        "rank 0 (index 1) runs W0 of stage 0 before I0 of stage 0, which it needs and which comes at index 2"]),
    "the backward elsewhere": ("0F0\n0B0\n", [
        "rank 1 (index 0) runs B0 of stage 0, which needs what F0 of stage 0 has left on rank 0"]),
    "a whole stage is missing": ("0F0,0B0\n2F0,2B0\n", [
        "no rank runs F0 of stage 1",
        "no rank runs B0 of stage 1, nor I0: its backward is missing",
        "rank 0 (index 1) cannot run B0 of stage 0 before B0 of stage 1, which no rank runs",
        "rank 1 (index 0) cannot run F0 of stage 2 before F0 of stage 1, which no rank runs"]),
    "two ranks wait for each other": ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", [
        "deadlock: rank 0 (index 1) cannot run B0 of stage 0 before B0 of stage 1, which rank 1 runs only after "
        "F1 of stage 1; rank 1 (index 1) cannot run F1 of stage 1 before F1 of stage 0, which rank 0 runs only after "
        "B0 of stage 0"]),
    "a rank waits for itself": ("1F0,0F0,1B0,0B0\n", [
        "deadlock: rank 0 (index 0) cannot run F0 of stage 1 before F0 of stage 0, which comes later in its own row"]),
    "something behind the step": ("0F0,STEP,0B0\n", ["rank 0 (index 1) takes its optimizer step before B0 of stage 0"]),
    "gradients summed too early": ("0F0,0I0,0REDUCE_GRAD,0W0\n", [
        "rank 0 (index 2) sums the gradients of stage 0 before W0 of stage 0, which adds to them"]),
    "a pair that needs itself": ("(0F0;0B0)OVERLAP_F_B\n", [
        "rank 0 (index 1) overlaps B0 of stage 0 with F0 of stage 0: the second needs the first"]),
    "no stage": ("F0\n", ["rank 0 (index 0) runs F0, which names no stage or microbatch"]),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_faults_in_words(name):
    text, messages = BROKEN[name]
    assert told(Schedule.from_csv(text)) == messages
    with pytest.raises(ScheduleError, match="is not right"):
        check(Schedule.from_csv(text))


def test_a_stage_on_the_wrong_rank():
    schedule = Schedule([[Action("F", 1, 0), Action("B", 1, 0)], [Action("F", 0, 0), Action("B", 0, 0)]], ((0,), (1,)))
    assert told(schedule)[0] == "rank 0 (index 0) runs F0 of stage 1, a stage that it does not hold; it holds 0"


def test_a_picture_in_which_something_comes_too_early():
    right = Schedule.parse("F0 .. .. B0\n.. F0 B0 ..")
    check(right)
    early = Schedule.parse("F0 .. B0\n.. F0 B0")
    assert told(early) == [
        "rank 0 (index 1) runs B0 of stage 0 at tick 2, but B0 of stage 1, which it needs, is run by rank 1 at tick 2; "
        "tick 3 is the first possible"
    ]
    assert early == right  # the order is right: only its time is not
    twice = Schedule([[Action("F", 0, 0), Action("B", 0, 0)]], ticks=[1, 1])
    assert told(twice) == ["rank 0 (index 1) runs B0 of stage 0 at tick 1, not after F0 of stage 0 at tick 1"]


def test_memory_limits():
    check(one_f_one_b(4, 8), memory_limit=[4, 3, 2, 1])
    assert told(one_f_one_b(4, 8), memory_limit=3) == [
        "rank 0 (index 3) holds more microbatches than its limit of 3 from F3 of stage 0 on; its peak is 4"
    ]
    assert len(told(gpipe(4, 8), memory_limit=7)) == 4
    check(v_min(4, 8), memory_limit=2)


def test_communication_in_order():
    rows = [
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1",
        "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1",
    ]
    crossed = Schedule.from_csv("\n".join(rows))  # a real trap: each end is sensible by itself
    assert told(crossed) == [
        "rank 0 (index 3) does not meet the other end as number 1 of what ranks 0 and 1 exchange: rank 0 has SEND_F1 "
        "of stage 0 and rank 1 has SEND_B0 of stage 1; so they wait for each other forever"
    ]
    check(with_communication(crossed.compute_only()))
    assert "rank 1 has nothing" in told(Schedule.from_csv("0F0,0SEND_F0,0B0\n1F0,1B0\n"))[-1]
    assert told(Schedule.from_csv("0F0,0SEND_F0,0RECV_B0,0B0\n1F0,1RECV_F0,1B0,1SEND_B0\n")) == [
        "rank 1 (index 0) runs F0 of stage 1 before RECV_F0 of stage 1, which it needs and which comes at index 1"
    ]
    deaf = told(Schedule.from_csv("0F0,0SEND_F0,0B0\n1F0,1B0\n"))
    assert "rank 1 (index 0) runs F0 of stage 1 and never receives its input" in deaf
    mute = told(Schedule.from_csv("0F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n"))
    assert "rank 1 (index 1) cannot run F0 of stage 1 before F0 of stage 0, which no rank sends" in mute


def test_many_faults_are_cut_short():
    schedule = Schedule.from_csv("".join(f"{stage}F0,{stage}F1\n" for stage in range(9)))
    with pytest.raises(ScheduleError, match=r"- and more$"):
        check(schedule)
    assert len(faults(schedule, at_most=3)) == 3


@given(
    data=st.data(),
    name=st.sampled_from(["one_f_one_b", "zb_h1", "zb_v", "v_half", "hanayo", "interleaved_1f1b"]),
    p=st.integers(1, 4),
    m=st.integers(1, 5),
)
def test_a_shuffled_row_is_right_exactly_if_the_slow_oracle_can_run_it(data, name, p, m):
    schedule = RULES[name](p, m)
    rank = data.draw(st.integers(0, p - 1))
    length = len(schedule.by_rank()[rank])
    for _ in range(data.draw(st.integers(1, 3))):
        a, b = data.draw(st.integers(0, length - 1)), data.draw(st.integers(0, length - 1))
        schedule = schedule.moved(rank, a, b)
    runs = len(times(schedule, Costs())) == len(schedule)
    seen: set[str] = set()
    in_order = True
    for action in schedule.by_rank()[rank]:
        needs = {"B": "F", "I": "F", "W": "I"}.get(action.kind)
        in_order &= needs is None or f"{action.stage}{needs}{action.microbatch}" in seen
        seen.add(str(action))
    assert (faults(schedule) == []) == (runs and in_order)
    if runs and in_order:
        check(with_communication(schedule))
    else:
        with pytest.raises(ScheduleError, match="cannot run"):
            simulate(schedule)


@given(data=st.data(), name=st.sampled_from(sorted(RULES)), p=st.integers(1, 4), m=st.integers(1, 8))
def test_an_action_left_out_or_repeated_is_always_found(data, name, p, m):
    p += name in ("chimera", "dualpipe") and p % 2
    m = 2 * (p + m) if name.startswith("dualpipe") else m
    rows = [list(row) for row in RULES[name](p, m).by_rank()]
    rank = data.draw(st.integers(0, p - 1))
    place = data.draw(st.integers(0, len(rows[rank]) - 1))
    if data.draw(st.booleans()):
        action = rows[rank].pop(place)
        rows[rank] = [other.alone() for other in rows[rank]]
    else:
        action = rows[rank][place]
        rows[rank].append(action.alone())
    found = [str(fault) for fault in faults(Schedule(rows)) if fault.kind in ("missing", "twice")]
    assert any(f"{action.microbatch} of stage {action.stage}" in text for text in found)
