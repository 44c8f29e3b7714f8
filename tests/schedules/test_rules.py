"""Every rule: right for all sizes it takes, and as long and as heavy as its closed form says."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tplab.schedules import (
    RULES,
    Costs,
    check,
    chimera,
    dualpipe,
    dualpipe_v,
    faults,
    gpipe,
    hanayo,
    interleaved_1f1b,
    interleaved_zb,
    looped_bfs,
    lower_bounds,
    naive,
    one_f_one_b,
    simulate,
    v_block,
    v_half,
    v_min,
    with_communication,
    zb_h1,
    zb_h2,
    zb_v,
)

ranks_ = st.integers(1, 8)
microbatches_ = st.integers(1, 20)
virtual_ = st.integers(1, 4)
time_ = st.integers(1, 9)
MORE = {"interleaved_1f1b", "looped_bfs", "interleaved_zb", "hanayo"}


def made(name, p, m, v):
    """The rule's schedule for these sizes, or for the next ones that it takes."""
    if name in ("chimera", "dualpipe"):
        p += p % 2
    if name.startswith("dualpipe"):
        m = 2 * p + m - (m % 2 if name == "dualpipe" else 0)
    if name == "hanayo":
        v = 2 * v
    return RULES[name](p, m, v) if name in MORE else RULES[name](p, m)


@pytest.mark.parametrize("name", RULES)
@given(p=ranks_, m=microbatches_, v=virtual_)
@example(p=1, m=1, v=1)
@example(p=7, m=20, v=3)
@settings(max_examples=20)
def test_every_rule_is_right_for_all_sizes(name, p, m, v):
    schedule = made(name, p, m, v)
    assert faults(schedule) == []
    lowered = with_communication(schedule)
    assert faults(lowered) == []
    assert lowered.compute_only() == schedule
    run = simulate(schedule)
    closed(run.busy.sum(), 3 * schedule.num_microbatches * schedule.num_ranks)


def closed(got, want):
    assert got == pytest.approx(want, rel=1e-12)


@given(p=ranks_, m=microbatches_, f=time_, b=time_)
def test_naive_gpipe_and_1f1b(p, m, f, b):
    costs = Costs(forward=f, full_backward=b)
    closed(simulate(naive(p, m), costs).makespan, m * p * (f + b))
    for rule in (gpipe, one_f_one_b):
        run = simulate(rule(p, m), costs)
        closed(run.makespan, (m + p - 1) * (f + b))
        closed(run.bubble_over_ideal, (p - 1) / m)
        closed(run.bubble_fraction, (p - 1) / (m + p - 1))
        closed(run.gap, 0)  # neither can be beaten in time
    assert simulate(gpipe(p, m)).peak_activations.tolist() == [m] * p
    assert simulate(one_f_one_b(p, m)).peak_activations.tolist() == [min(m, p - r) for r in range(p)]


@given(p=ranks_, more=microbatches_, v=virtual_, f=time_, b=time_)
def test_interleaved_and_breadth_first(p, more, v, f, b):
    m = p + more - 1
    costs = Costs(forward=f, full_backward=b)
    for rule in (interleaved_1f1b, looped_bfs):
        run = simulate(rule(p, m, v), costs)
        closed(run.makespan, m * (f + b) + (p - 1) * (f + b) / v)
        closed(run.gap, 0)
    assert simulate(looped_bfs(p, m, v)).peak_activations.tolist() == [m] * p
    if m % p == 0 and m > p:
        closed(simulate(interleaved_1f1b(p, m, v)).peak_activations[0], min(m, p + (p - 1) / v))


@given(p=st.integers(2, 8), m=microbatches_, v=virtual_)
@settings(max_examples=20)
def test_interleaving_multiplies_the_transfers(p, m, v):
    def transfers(schedule):
        return sum(action.kind.startswith("SEND") for row in with_communication(schedule).by_rank() for action in row)

    assert transfers(one_f_one_b(p, m)) == transfers(zb_h1(p, m)) == 2 * m * (p - 1)
    for rule in (interleaved_1f1b, looped_bfs, interleaved_zb):
        assert transfers(rule(p, m, v)) == 2 * m * (p * v - 1)
    assert transfers(zb_v(p, m)) == 2 * m * (2 * p - 2)  # the turn of the V needs none


@given(p=ranks_, m=microbatches_, w=st.integers(1, 5), more=st.tuples(st.integers(0, 4), st.integers(0, 4)))
def test_zb_h1_and_zb_h2(p, m, w, more):
    f, i = w + more[0], w + more[1]  # a W fits into every gap that an F or an I leaves
    costs = Costs(f, i, w)
    if m >= p:
        run = simulate(zb_h1(p, m), costs)
        closed(run.makespan, m * (f + i + w) + (p - 1) * (f + i - w))
        assert run.peak_activations.tolist() == [p] * p
    if m >= 2 * p - 1:
        run = simulate(zb_h2(p, m), costs)
        closed(run.span, m * (f + i + w) + (p - 1) * (f + i - 2 * w))
        assert run.peak_activations.max() == 2 * p - 1
        if f == i == w:
            closed(run.makespan, simulate(zb_h1(p, m), costs).makespan)  # the false belief
            closed(run.span, run.bounds.span)


@given(p=ranks_, m=microbatches_, v=virtual_, t=time_)
def test_interleaved_zero_bubble_and_zb_v_reach_the_bound(p, m, v, t):
    costs = Costs(t, t, t)
    if m >= p:
        run = simulate(interleaved_zb(p, m, v), costs)
        closed(run.makespan, 3 * m * t + (p - 1) * t / v)
        closed(run.gap, 0)
        if m % p == 0:
            assert run.peak_activations.max() == p
    if m >= 2 * p - 1:
        run = simulate(zb_v(p, m), costs)
        closed(run.makespan, 3 * m * t + (p - 1) * t / 2)
        closed(run.span, 3 * m * t)
        closed(run.gap, 0)
        assert run.peak_activations.max() == p


@given(p=st.integers(1, 12), m=st.integers(1, 30))
@example(p=12, m=30)
@settings(max_examples=30)
def test_v_shapes_hold_what_they_promise(p, m):
    for rule, most in ((v_half, (p + 2) // 2), (v_min, (p + 4) // 3)):
        check(rule(p, m), memory_limit=most)
    if m >= 2 * p:
        assert simulate(v_half(p, m)).makespan <= simulate(v_min(p, m)).makespan


def test_a_building_block_of_ones_own():
    block = v_block([0, 1], [3, 2], [4, 5], [7, 6])
    schedule = block.schedule(6)
    check(schedule, memory_limit=2)
    assert simulate(schedule).makespan == 18.5


@given(p=st.integers(1, 6), more=st.integers(0, 6), overlap=st.sampled_from([0, 0.5, 1]), t=time_)
def test_dualpipes_bubble(p, more, overlap, t):
    """(P/2 - 1)(F&B + B - 3W) on the rank that idles most; P = 2p stages, each half of a rank's share."""
    m, costs = 2 * p + more, Costs(t, t, t, overlap=overlap)
    run = simulate(dualpipe_v(p, m), costs)
    both = 3 * t - overlap * t
    closed(run.idle.max(), (p - 1) * (both + 2 * t - 3 * t) / 2)
    assert run.peak_activations.max() == p + 1 / 2  # P + 1 activations of a stage, two stages to a microbatch
    two = simulate(dualpipe(2 * p, 2 * m), costs)  # both halves: each rank has one stage of either direction
    closed(two.makespan, 2 * run.makespan)
    assert two.peak_activations.max() == 2 * p + 1


@given(p=st.sampled_from([2, 4, 6, 8]), units=st.integers(1, 3), t=time_)
def test_chimera(p, units, t):
    """2N + D - 2 slots for N microbatches in units of D, where F and B take a slot each."""
    m = p * units
    run = simulate(chimera(p, m), Costs(forward=t, full_backward=t))
    closed(run.makespan, (2 * m + p - 2) * t)
    assert run.peak_activations.max() <= p


@given(p=ranks_, m=microbatches_, waves=st.integers(1, 2))
def test_hanayo_holds_p_and_beats_naive(p, m, waves):
    schedule = hanayo(p, m, 2 * waves)
    check(schedule, memory_limit=p)
    assert simulate(schedule).makespan <= simulate(naive(p, m)).makespan


@given(
    name=st.sampled_from(sorted(RULES)),
    p=st.integers(1, 5),
    m=st.integers(1, 12),
    v=st.integers(1, 3),
    costs=st.lists(time_, min_size=3, max_size=3),
    transfer=st.integers(0, 3),
)
def test_no_rule_beats_the_bounds(name, p, m, v, costs, transfer):
    schedule = made(name, p, m, v)
    run = simulate(schedule, Costs(*costs, transfer=transfer))
    held = run.peak_activations.max()
    for bounds in (run.bounds, lower_bounds(schedule, run.costs, memory_limit=held)):
        assert run.makespan >= bounds.makespan - 1e-9
        assert run.span >= bounds.span - 1e-9
