"""Lower bounds: no schedule is faster, whatever its costs and whatever it overlaps; and the bound says why."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tplab.schedules import (
    Action,
    Costs,
    Schedule,
    faults,
    gpipe,
    interleaved_1f1b,
    linear,
    lower_bounds,
    simulate,
    two_way,
    v_half,
    v_shape,
    wrapped,
    zb_h1,
    zb_v,
)


def keeps_its_bounds(run):
    """Whether neither time of a run lies under its bound."""
    return run.makespan >= run.bounds.makespan - 1e-9 and run.span >= run.bounds.span - 1e-9


def ready(placement, microbatches, split):
    """Every action of a schedule of this shape -> what it needs. With two directions each takes half of them."""
    num_stages = max(map(max, placement)) + 1
    needs = {}
    for k in range(microbatches):
        for s in range(num_stages):
            needs["F", s, k] = [("F", s - 1, k)] if s else []
            back = "I" if split(s, k) else "B"
            needs[back, s, k] = [("F", s, k)]
            if s < num_stages - 1:
                needs[back, s, k].append(("I" if split(s + 1, k) else "B", s + 1, k))
            if back == "I":
                needs["W", s, k] = [("I", s, k)]
    return needs


@st.composite
def schedules(draw):
    """A right schedule: its actions in any order that their needs allow, neighbours of any kind joined to pairs."""
    p = draw(st.sampled_from([1, 1, 2, 3]))
    placement = draw(st.sampled_from([linear(p), v_shape(p), wrapped(p, 2), two_way(p)]))
    microbatches, kind = draw(st.integers(1, 4)), draw(st.sampled_from(["B", "I", "mixed"]))
    random = draw(st.randoms(use_true_random=False))
    split = {(s, k): kind == "I" or (kind == "mixed" and random.random() < 0.5) for s in range(2 * p) for k in range(4)}
    needs = ready(placement, microbatches, lambda s, k: split[s, k])
    rows, done = [[] for _ in placement], set()
    while len(done) < len(needs):
        one = random.choice([a for a in needs if a not in done and all(need in done for need in needs[a])])
        homes = [rank for rank, held in enumerate(placement) if one[1] in held]
        rows[homes[one[2] % len(homes)]].append(Action(*one))
        done.add(one)
    for rank, row in enumerate(rows):
        for index in range(1, len(row)):
            if row[index - 1].joined or random.random() < 0.2:
                continue
            rows[rank] = [*row[:index], Action(row[index].kind, row[index].stage, row[index].microbatch, True),
                          *row[index + 1 :]]  # fmt: skip
            if faults(Schedule(rows, placement), at_most=1):
                rows[rank] = row
            row = rows[rank]
    return Schedule(rows, placement)


@given(
    schedule=schedules(),
    times=st.lists(st.integers(0, 4), min_size=3, max_size=3),
    transfer=st.integers(0, 2),
    overlap=st.sampled_from([0.5, 1]),
    links=st.sampled_from(["free", "queue"]),
)
def test_no_schedule_with_pairs_of_any_kinds_is_faster(schedule, times, transfer, overlap, links):
    costs = Costs(*times, transfer=transfer, overlap=overlap, links=links, message_bytes=1, bandwidth=2)
    assert faults(schedule) == []
    assert keeps_its_bounds(simulate(schedule, costs))
    assert keeps_its_bounds(simulate(schedule, costs, lockstep=True))


def test_two_forwards_at_once_hide_one_of_them():
    row = [Action(kind, 0, k, joined=k == 1) for kind in "FIW" for k in range(2)]
    run = simulate(Schedule([row]), Costs(overlap=1))
    assert (run.makespan, run.bounds.makespan, run.gap) == (3, 3, 0)
    uneven = simulate(Schedule([row]), Costs([[5, 1]], [[2, 4]], [[3, 3]], overlap=1))
    assert uneven.makespan == 5 + 4 + 3
    assert uneven.bounds.makespan == 5 + 3 + 2  # 5 hides 4, 3 hides 3, 2 hides 1


def test_bounds_say_why():
    assert str(lower_bounds(gpipe(4, 8))) == (
        "makespan >= 33, span >= 26: rank 3 has 3 before its first input, 24 of work, 6 behind its last backward"
    )
    assert lower_bounds(zb_h1(4, 8)).makespan == 27
    assert lower_bounds(zb_v(4, 8)).makespan == 25.5
    limited = lower_bounds(zb_h1(4, 8), memory_limit=3)
    assert limited.makespan == 28  # rank 0: pF + (p-1)I - MF = 4
    assert "4 in which only forwards could run" in limited.reason
    assert lower_bounds(interleaved_1f1b(4, 1, 2)).reason == "one microbatch takes 4 forward and 8 backward"
    assert str(lower_bounds(zb_v(4, 1))) == (
        "makespan >= 8.5, span >= 6: one microbatch takes 4 forward and 4 backward, and then the first stage's W 0.5"
    )
    assert simulate(v_half(4, 8)).gap == pytest.approx(1 / 25.5)
