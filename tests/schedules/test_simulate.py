"""Simulation: published and proven figures, a slow oracle, idle time and its reasons, memory, lock-step, the trace."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cost import event_simulator
from tests.schedule_oracle import times
from tplab.errors import ScheduleError
from tplab.schedules import (
    RULES,
    Costs,
    Schedule,
    dualpipe_v,
    gpipe,
    interleaved_1f1b,
    interleaved_zb,
    looped_bfs,
    one_f_one_b,
    simulate,
    v_half,
    v_min,
    with_communication,
    zb_h1,
    zb_h2,
    zb_v,
)

# F = I = W = 1, p = 4, m = 8: makespan, span, peak activations in microbatches
UNIT = [
    (gpipe(4, 8), 33, 33, 8),
    (one_f_one_b(4, 8), 33, 33, 4),
    (interleaved_1f1b(4, 8, 2), 28.5, 28.5, 5.5),
    (interleaved_1f1b(4, 8, 4), 26.25, 26.25, 4.75),
    (looped_bfs(4, 8, 2), 28.5, 28.5, 8),
    (zb_h1(4, 8), 27, 27, 4),
    (zb_h2(4, 8), 27, 24, 7),
    (interleaved_zb(4, 8, 2), 25.5, 25.5, 4),
    (zb_v(4, 8), 25.5, 24, 4),
    (v_half(4, 8), 26.5, 26.5, 3),
    (v_min(4, 8), 29.5, 29.5, 2),
    (dualpipe_v(4, 8), 27, 27, 4.5),
]


@pytest.mark.parametrize("schedule, makespan, span, peak", UNIT, ids=lambda value: getattr(value, "name", None))
def test_unit_times(schedule, makespan, span, peak):
    run = simulate(schedule, Costs(forward=1, input_grad=1, weight_grad=1, transfer=0))
    assert (run.makespan, run.span, run.peak_activations.max()) == (makespan, span, peak)


# Qi et al., ICLR 2024, table of bubble rates; ms. ZB-H2 by its span.
PUBLISHED = [
    (8, 24, 18.522, 18.086, 9.337, 0.601, 0.2431, 0.1585, 0.1083),
    (8, 32, 18.513, 18.086, 9.331, 0.626, 0.1985, 0.1242, 0.0837),
    (8, 64, 18.546, 18.097, 9.321, 0.762, 0.1240, 0.0674, 0.0444),
]


@pytest.mark.parametrize("p, m, f, i, w, c, one, h1, h2", PUBLISHED)
def test_published_bubble_rates(p, m, f, i, w, c, one, h1, h2):
    costs = Costs(f, i, w, c, unit="s")
    for schedule, rate in ((one_f_one_b(p, m), one), (zb_h1(p, m), h1), (zb_h2(p, m), h2)):
        run = simulate(schedule, costs)
        assert 1 - run.busy.max() / run.span == pytest.approx(rate, abs=5.1e-5)


def test_lockstep():
    """In one SPMD program a tick costs its slowest rank: there GPipe beats 1F1B."""
    assert simulate(gpipe(4, 8), lockstep=True).makespan == 33
    assert simulate(one_f_one_b(4, 8), lockstep=True).makespan == 40
    assert simulate(zb_h1(4, 8), lockstep=True).makespan == 27
    sends = Costs(transfer=0.5)  # 4 ticks of F, 4 of B; after the last of either nothing is sent
    assert simulate(gpipe(3, 2), sends, lockstep=True).makespan == 4 * 1 + 4 * 2 + 6 * 0.5
    run = simulate(one_f_one_b(2, 2), lockstep=True)
    assert run.start.tolist() == [0, 1, 4, 8, 1, 2, 4, 6]
    assert str(run.idles()[0]) == "rank 0 is idle from 2 to 4: its B0 of stage 0 needs B0 of stage 1 from rank 1"


@given(
    name=st.sampled_from(
        ["naive", "gpipe", "one_f_one_b", "interleaved_1f1b", "looped_bfs", "zb_h1", "zb_h2", "zb_v"]
        + ["interleaved_zb", "v_half", "v_min", "chimera", "hanayo"]
    ),
    p=st.integers(1, 4),
    m=st.integers(1, 6),
    parts=st.lists(st.integers(0, 5), min_size=3, max_size=3),
    transfer=st.integers(0, 3),
    links=st.sampled_from(["free", "queue", "port"]),
    size=st.integers(0, 4),
)
def test_it_agrees_with_the_slow_oracle(name, p, m, parts, transfer, links, size):
    schedule = RULES[name](p + (name == "chimera" and p % 2), m)
    costs = Costs(*parts, transfer=transfer, links=links, message_bytes=size, bandwidth=2.0)
    run, wanted = simulate(schedule, costs), times(schedule, costs)
    assert len(wanted) == len(schedule)
    for (rank, place), (start, end) in wanted.items():
        row = schedule.offsets[rank] + place
        assert (run.start[row], run.end[row]) == (pytest.approx(start), pytest.approx(end))


@given(
    name=st.sampled_from(["one_f_one_b", "interleaved_1f1b", "zb_v", "dualpipe", "dualpipe_v"]),
    p=st.sampled_from([2, 4]),
    more=st.integers(0, 2),
    parts=st.lists(st.sampled_from([0, 0.5, 1, 2, 3]), min_size=8, max_size=8),
    num=st.sampled_from([1, 2, 4, 8]),
    overlap=st.sampled_from([0, 0.25, 1]),
    transfer=st.sampled_from([0, 0.5]),
)
def test_stages_of_unequal_cost_and_overlapped_pairs_agree_with_the_slow_oracle(
    name, p, more, parts, num, overlap, transfer
):
    schedule = RULES[name](p, 2 * p + 2 * more)
    costs = Costs(2, 1, 3, transfer=transfer, overlap=overlap, stage_costs=parts[:num])
    if schedule.num_stages % num and num % schedule.num_stages:
        return
    run, wanted = simulate(schedule, costs), times(schedule, costs)
    assert len(wanted) == len(schedule)
    for (rank, place), (start, end) in wanted.items():
        row = schedule.offsets[rank] + place
        assert (run.start[row], run.end[row]) == (pytest.approx(start), pytest.approx(end))
    assert run.bounds.makespan <= run.makespan + 1e-9


def test_a_stage_that_costs_twice_as_much_sets_the_pace():
    """Rank 3 works all the time but for the three forwards before its first input and the three backwards behind."""
    costs = Costs(stage_costs=[1, 1, 1, 2])
    assert simulate(one_f_one_b(4, 8), costs).makespan == 3 * 1 + 8 * 6 + 3 * 2
    halves = [0.5] * 6 + [1, 1]  # eight stages: each part is cut in two
    run, halved = simulate(zb_v(4, 8), costs), Costs(halves, halves, halves)
    assert run.start.tolist() == simulate(zb_v(4, 8), halved).start.tolist()
    merged = simulate(gpipe(2, 3), costs)
    assert merged.end.tolist() == simulate(gpipe(2, 3), Costs([1, 1.5], [1, 1.5], [1, 1.5])).end.tolist()
    assert simulate(gpipe(2, 3), Costs(stage_costs=[2, 2])).makespan == 2 * simulate(gpipe(2, 3)).makespan


def test_dualpipes_point():
    """8 microbatches through 4 ranks, F = I = W = 1: 26 where nothing is hidden, 22 where F & B takes as long as B."""
    assert [simulate(RULES["dualpipe"](4, 8), Costs(overlap=part)).makespan for part in (0, 0.5, 1)] == [26, 24, 22]


def as_programs(schedule, costs):
    """The schedule as one list per rank of what `event_simulator` knows: computing, sends, and waits for messages; and
    the place of each action."""
    rows, message = schedule.by_rank(), schedule.needs.message
    place = [(rank, at) for rank, row in enumerate(rows) for at in range(len(row))]
    goes_to = {place[producer]: place[consumer][0] for consumer, producer in enumerate(message) if producer >= 0}
    needs = {place[consumer]: place[producer] for consumer, producer in enumerate(message) if producer >= 0}
    lasts, sizes = costs.durations(schedule), costs.message_sizes(schedule)
    programs = [[] for _ in rows]
    for index, (rank, at) in enumerate(place):
        if (rank, at) in needs and needs[rank, at][0] != rank:
            programs[rank].append(("wait", str(needs[rank, at])))
        programs[rank].append(("compute", float(lasts[index])))
        to = goes_to.get((rank, at), rank)
        if to != rank:
            programs[rank].append(("send", str((rank, at)), to, float(sizes[index]), ("", "send", 0, str((rank, at)))))
    return programs, place


@given(
    name=st.sampled_from(sorted(RULES)),
    p=st.sampled_from([2, 4]),
    m=st.sampled_from([8, 12]),
    times=st.lists(st.floats(1e-6, 1e-4), min_size=16, max_size=16),
    seed=st.integers(0, 10**6),
)
def test_messages_go_in_the_order_of_time(name, p, m, times, seed):
    """Against an event simulator that knows nothing of schedules: unequal stages, and messages of unequal length, as
    where some cuts are between nodes."""
    schedule = RULES[name](p, m)
    if schedule.joined.any():
        return  # pairs are no two actions, one after the other
    chance, num = np.random.default_rng(seed), schedule.num_stages
    costs = Costs(
        *(times[:num] if num <= len(times) else list(np.resize(times, num)) for _ in range(3)),
        transfer=event_simulator.LATENCY, bandwidth=event_simulator.BANDWIDTH, links="port", unit="s",
        message_bytes=[float(size) for size in chance.choice([1e3, 2e4, 9e4], num)],
    )  # fmt: skip
    programs, place = as_programs(schedule, costs)
    spans, run = event_simulator.simulated(programs), simulate(schedule, costs)
    for index, action in enumerate(place):
        if str(action) in spans:
            assert run.sent[index] == pytest.approx(spans[str(action)][1] - event_simulator.LATENCY, rel=1e-9)
    ends = [run.end[schedule.offsets[rank + 1] - 1] for rank in range(schedule.num_ranks)]
    assert ends == pytest.approx([spans[f"end {rank}"][0] for rank in range(schedule.num_ranks)], rel=1e-9)


def test_a_rank_that_sends_to_two_has_one_port():
    """Rank 1 of three sends forwards to rank 2 and backwards to rank 0: through one port, one after the other."""
    costs = (Costs(message_bytes=3.0, bandwidth=1.0, links=links) for links in ("free", "queue", "port"))
    makespans = [simulate(one_f_one_b(3, 6), one).makespan for one in costs]
    assert makespans == sorted(makespans) and makespans[1] < makespans[2]


def test_a_queue_on_a_link_delays_what_a_free_link_does_not():
    sends = Costs(message_bytes=2.0, bandwidth=1.0)
    queued = Costs(message_bytes=2.0, bandwidth=1.0, links="queue")
    assert simulate(gpipe(2, 3), sends).makespan < simulate(gpipe(2, 3), queued).makespan
    # F0 F1 F2 end at 1 2 3; the link carries them until 3 5 7; rank 1 is done with its forwards at 8
    run = simulate(gpipe(2, 3), queued)
    assert run.sent[:3].tolist() == [3, 5, 7]
    assert run.start[run.schedule.offsets[1] :][:3].tolist() == [3, 5, 7]


def test_costs_by_stage_and_by_microbatch():
    schedule = gpipe(2, 2)
    run = simulate(schedule, Costs(forward=[1, 3], input_grad=[0, 0], weight_grad=[2, 2]))
    assert run.start.tolist() == [0, 1, 9, 11, 1, 4, 7, 9]
    run = simulate(schedule, Costs(forward=[[1, 5], [1, 1]], input_grad=0, weight_grad=1))
    assert run.end[:2].tolist() == [1, 6]
    split = interleaved_1f1b(2, 2, 2)  # a number is a rank's share, a sequence is each stage's own
    assert simulate(split, Costs(1, 1, 1)).makespan == simulate(split, Costs([0.5] * 4, [0.5] * 4, [0.5] * 4)).makespan


@pytest.mark.parametrize(
    "bad, words",
    [
        (lambda: Costs(forward=-1), "forward is -1"),
        (lambda: Costs(forward=float("nan")), "finite number"),
        (lambda: Costs(overlap=2), "0 to 1"),
        (lambda: Costs(bandwidth=0), "no message would ever arrive"),
        (lambda: Costs(links="slow"), "links is 'slow'; it must be one of free, queue, port"),
        (lambda: simulate(gpipe(3, 1), Costs(forward=[1, 2])), "3 stages"),
        (lambda: simulate(gpipe(3, 1), Costs(message_bytes=[1])), "2 cuts"),
        (lambda: simulate(gpipe(3, 1), Costs(stage_costs=[1, 2])), "2 figures and the schedule has 3 stages"),
        (lambda: Costs(stage_costs=[1, -2]), "stage_costs is .* 0 or more"),
        (lambda: Costs(stage_costs=2), "one number for each stage"),  # type: ignore[arg-type]
        (lambda: Costs(stage_costs=[]), "one number for each stage"),
        (lambda: Costs(forward=[1, 2], stage_costs=[1, 2]), "forward has one figure for each stage"),
        (lambda: simulate(gpipe(3, 1), optimizer="never"), "optimizer is 'never'; it must be one of None, own,"),
    ],
)
def test_bad_costs_say_what_is_wrong(bad, words):
    with pytest.raises(ScheduleError, match=words):
        bad()


def test_what_cannot_run_says_why():
    with pytest.raises(ScheduleError, match="rank 0 \\(index 0\\) cannot run F0 of stage 1 before F0 of stage 0"):
        simulate(Schedule.from_csv("1F0,0F0,0B0,1B0\n"))
    with pytest.raises(ScheduleError, match="runs W0 of stage 0 before I0"):
        simulate(Schedule.from_csv("0F0,0W0,0I0\n"))
    with pytest.raises(ScheduleError, match="runs W0 of stage 0 before I0"):
        simulate(Schedule.from_csv("0F0,0W0,0I0\n"), lockstep=True)


def test_sends_and_receives_that_are_written_out_change_nothing():
    for schedule in (one_f_one_b(3, 4), zb_v(3, 4), dualpipe_v(2, 5)):
        costs = Costs(1, 2, 1.5, 0.25)
        assert simulate(with_communication(schedule), costs).makespan == simulate(schedule, costs).makespan


def test_the_optimizer_step_with_and_without_a_common_wait():
    costs = Costs(optimizer_step=2, gradient_sync=0.5)
    own, together = (simulate(zb_h2(4, 8), costs, optimizer=choice) for choice in ("own", "together"))
    assert own.span == 24 + 2.5
    assert own.makespan == together.makespan == 27 + 2.5
    assert len(set(together.end[own.schedule.offsets[1:] - 1])) == 1
    assert len(set(own.end[own.schedule.offsets[1:] - 1])) == 4
    assert simulate(gpipe(4, 8), Costs(optimizer_step=2), optimizer="together", lockstep=True).makespan == 35


def test_idle_time_and_its_reasons():
    run = simulate(one_f_one_b(3, 4))
    texts = [str(idle) for idle in run.idles()]
    assert texts[0] == "rank 0 is idle from 3 to 7: its B0 of stage 0 needs B0 of stage 1 from rank 1"
    assert "rank 2 is idle from 0 to 2: its F0 of stage 2 needs F0 of stage 1 from rank 1" in texts
    assert texts[-1] == "rank 2 is idle from 14 to 18: it is done, the other ranks are not"
    for rank in range(3):
        assert sum(idle.duration for idle in run.idles() if idle.rank == rank) == run.idle[rank]
    assert "waits longest" in run.table()
    assert repr(run) == (
        "one_f_one_b: makespan 18, span 18, bubble 0.3333 of the makespan (0.5000 of the ideal time), "
        "peak 3 microbatches"
    )


@given(
    name=st.sampled_from(sorted(set(RULES) - {"dualpipe", "dualpipe_v", "chimera"})),
    p=st.integers(1, 5),
    m=st.integers(1, 8),
    transfer=st.integers(0, 2),
)
def test_the_critical_path_and_the_idles_explain_the_makespan(name, p, m, transfer):
    run = simulate(RULES[name](p, m), Costs(1, 2, 1, transfer))
    indices = run.critical_indices()
    assert run.start[indices[0]] == 0
    assert run.end[indices[-1]] == run.makespan
    for before, after in pairwise(indices):
        assert run.start[after] - run.end[before] in (0, transfer)
    assert len(run.critical_path()) == len(indices)
    idle = np.zeros(p)
    for stretch in run.idles():
        idle[stretch.rank] += stretch.duration
    assert idle == pytest.approx(run.idle)


def test_activations_over_time_in_counts_and_bytes():
    run = simulate(zb_h1(2, 2), Costs(activation=100, input_grad_frees=0.75))
    times_, held = run.activations(0)
    # F0 at 0, F1 at 1, I0 3 to 4, W0 ends at 5, W1 at 7
    assert (times_.tolist(), held.tolist()) == ([0, 0, 1, 5, 7], [0, 1, 2, 1, 0])
    times_, held = run.activation_bytes(0)
    assert (times_.tolist(), held.tolist()) == ([0, 0, 1, 4, 5, 6, 7], [0, 100, 200, 125, 100, 25, 0])
    assert run.peak_bytes.tolist() == [200, 125]
    assert run.peak_activations.tolist() == [2, 2]  # rank 1: F0 I0 F1 I1 W0 W1
    by_stage = simulate(gpipe(2, 3), Costs(activation=[10, 1]))
    assert by_stage.peak_bytes.tolist() == [30, 3]


def test_overlapped_pairs():
    schedule = Schedule.parse("0F0 1F0 0F1+1B0 1F1+0B0 1B1 0B1")
    whole = simulate(schedule, Costs(2, 2, 2))
    half = simulate(schedule, Costs(2, 2, 2, overlap=1))
    assert whole.makespan == 12  # two stages on one rank: all its work
    assert half.makespan == 10  # twice a forward of 1 vanishes behind a backward of 2
    assert half.start[2] == half.start[3]
    assert half.end[2] == half.end[3] == half.start[2] + 2
    assert half.busy.tolist() == [10]


def test_the_trace_of_a_run():
    costs = Costs(transfer=0.5, message_bytes=10, bandwidth=20, links="queue")
    run = simulate(one_f_one_b(3, 4), costs)
    trace = run.trace
    assert trace is run.trace
    assert (trace.framework, trace.clock, trace.unit, trace.mesh.size) == ("schedule", "modelled", "steps", 3)
    assert trace.makespan == run.makespan
    assert trace.busy().tolist() == run.busy.tolist()
    assert trace.bytes_sent() == 10 * 2 * 2 * 4
    sends = {event.message: event for event in trace.events if event.kind == "send"}
    receives = {event.message: event for event in trace.events if event.kind == "receive"}
    assert sends.keys() == receives.keys()
    assert len(sends) == 16
    for message, event in sends.items():
        other = receives[message]
        assert (event.peer, other.peer, event.rank) == (other.rank, event.rank, other.peer)
        assert (event.start, event.end, event.op, event.chunk) == (other.start, other.end, other.op, other.chunk)
        assert event.end - event.start == pytest.approx(1)
    waits = [event for event in trace.events if event.kind == "wait"]
    assert len(waits) == sum(idle.waits_for is not None for idle in run.idles())
    for event in waits:
        assert receives[event.message].end == event.end
    first = trace.events[0]
    assert (first.op, first.where, first.chunk, trace.chunks[first.chunk]) == ("F0", "stage 0", 0, (0, 0))


def test_the_trace_of_overlapped_pairs_counts_them_once():
    run = simulate(dualpipe_v(2, 5), Costs(overlap=0.5, transfer=0.25))
    assert run.trace.busy() == pytest.approx(run.busy)
    assert run.trace.makespan == pytest.approx(run.makespan)
    assert any(event.op == "F3+B1" and event.where == "stage 0 + stage 3" for event in run.trace.events)
    received = {event.message for event in run.trace.events if event.kind == "receive"}
    assert {event.message for event in run.trace.events if event.kind == "wait"} <= received


def test_an_empty_schedule_takes_no_time():
    run = simulate(Schedule([[], []]))
    assert (run.makespan, run.span, run.bubble_fraction, run.gap) == (0, 0, 0, 0)
    assert run.critical_path() == run.idles() == []
