"""The modelled clock: against an event simulator that shares no code with it, by hand, and under renaming."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.cost.event_simulator import (
    BANDWIDTH,
    LATENCY,
    Op,
    Span,
    random_programs,
    renamed,
    simulated,
)
from tplab.cost import Chip, Cluster, Link
from tplab.cost.clock import Links
from tplab.cost.lanes import AFTER, COMPUTE, ISSUE, MARK, SEND, WAIT, Lanes, Log

CHIP = Chip("z", {"float32": 1e9}, 1e9, 1e9)
WIRE = Link("wire", LATENCY, BANDWIDTH)
SWITCH = Cluster("c", CHIP, WIRE)
LAYOUTS = [
    (2, [(0, 1)]),
    (3, [(0, 1, 2), (0, 1), (1, 2)]),
    (4, [(0, 1), (2, 3), (0, 2), (1, 3), (0, 1, 2, 3)]),
    (6, [(0, 1, 2), (3, 4, 5), (0, 3), (1, 4), (2, 5)]),
    (8, [(0, 1, 2, 3), (4, 5, 6, 7), (0, 4), (1, 5), (2, 6), (3, 7), (0, 1, 4, 5)]),
]


def clocked(programs: list[list[Op]], cluster: Cluster = SWITCH, order: list[int] | None = None) -> dict[str, Span]:
    """What `simulated` says, by the clock. Ranks note what they do one after another, in this order."""
    log, entries, meetings = Log(), {}, {}
    lanes = [log.lane(rank) for rank in range(len(programs))]
    place = [0] * len(programs)
    waits: list[str] = []
    ends = {}
    while any(place[rank] < len(programs[rank]) for rank in lanes):
        for rank in order or lanes:
            while place[rank] < len(programs[rank]):
                kind, *about = programs[rank][place[rank]]
                if kind == "compute":
                    ends[rank] = log.add(rank, COMPUTE, about[0])
                elif kind == "send":
                    name, target, num_bytes, said = about
                    entries[name] = log.add(rank, SEND, log.message_form(rank, target, num_bytes, *said))
                elif kind == "issue":
                    name, group, num_bytes, said = about
                    if name not in meetings:
                        meetings[name] = log.next_collective()
                    form = log.collective_form("all_reduce", group, num_bytes, *said)
                    entries[name] = log.add(rank, ISSUE, meetings[name], form)
                elif about[0] not in entries:
                    break
                else:
                    waits.append(about[0])
                    ends[rank] = log.add(rank, WAIT, entries[about[0]])
                place[rank] += 1
    for rank in lanes:
        ends[rank] = log.add(rank, MARK, 0.0)
    start, end, _ = Lanes(log, Links(cluster)).times()
    spans = {name: (float(start[entry]), float(end[entry])) for name, entry in entries.items()}
    return spans | {f"end {rank}": (float(end[entry]), float(end[entry])) for rank, entry in ends.items()}


@pytest.mark.parametrize("part", range(4))
def test_random_programs_with_overlap_take_as_long_as_events_say(part: int):
    """1,000 programs in all, in which ranks disagree about the order too."""
    for seed in range(250):
        chance = random.Random(1000 * part + seed)
        num_ranks, groups = chance.choice(LAYOUTS)
        programs = random_programs(chance, groups, num_ranks)
        wanted, found = simulated(programs), clocked(programs)
        assert found.keys() == wanted.keys()
        for name, span in wanted.items():
            assert found[name] == pytest.approx(span, rel=1e-9, abs=1e-15), (seed, name)


def test_renaming_ranks_and_another_order_of_turns_change_no_time():
    for seed in range(150):
        chance = random.Random(seed)
        num_ranks, groups = chance.choice(LAYOUTS)
        programs = random_programs(chance, groups, num_ranks)
        names = chance.sample(range(num_ranks), num_ranks)
        wanted = clocked(programs)
        found = clocked(renamed(programs, names), order=chance.sample(range(num_ranks), num_ranks))
        for rank in range(num_ranks):
            assert found[f"end {names[rank]}"] == wanted[f"end {rank}"], seed
        for name in wanted.keys() - {f"end {rank}" for rank in range(num_ranks)}:
            assert found[name] == wanted[name], (seed, name)


# --- by hand ----------------------------------------------------------------------------------------------------------

UNITS = Cluster("units", CHIP, Link("wire", 0.0, 1.0))  # a message of n bytes takes n seconds


def test_what_is_ready_first_goes_first_and_what_is_ready_later_does_not_slip_in():
    """Rank 0's port is busy until 4, so the sum of both waits; so does rank 1's later message, whose port is free."""
    programs: list[list[Op]] = [
        [("send", "long", 1, 4, ()), ("issue", "sum", (0, 1), 2, ()), ("wait", "sum")],
        [("compute", 1.0), ("issue", "sum", (0, 1), 2, ()), ("compute", 1.0), ("send", "late", 0, 1, ())],
    ]
    found = clocked(programs, UNITS)
    assert (found["long"], found["sum"], found["late"]) == ((0, 4), (4, 6), (6, 7))


def test_times_that_differ_by_rounding_are_one_instant_and_the_program_decides():
    tenths = [("compute", 0.1)] * 3  # 0.30000000000000004
    programs: list[list[Op]] = [
        [*tenths, ("issue", "sum", (0, 1), 1, ()), ("wait", "sum")],
        [("issue", "sum", (0, 1), 1, ()), ("compute", 0.3), ("send", "after", 0, 1, ()), ("wait", "sum")],
    ]
    found = clocked(programs, UNITS)
    assert found["sum"] == pytest.approx((0.3, 1.3)) and found["after"] == pytest.approx((1.3, 2.3))


def test_where_ranks_disagree_what_the_program_says_decides_and_what_is_alike_shares():
    """Four ranks in a circle, each in two sums: each is first for one of its ranks, and second for the other."""

    def in_a_circle(said: list[tuple]) -> dict[str, Span]:
        return clocked(
            [
                [("issue", str(sum_), (min(sum_, (sum_ + 1) % 4), max(sum_, (sum_ + 1) % 4)), 1, said[sum_])
                 for sum_ in (rank, (rank - 1) % 4)]
                for rank in range(4)
            ],
            UNITS,
        )  # fmt: skip

    found = in_a_circle([("line 1",), ("line 2",), ("line 3",), ("line 4",)])
    assert [found[str(number)] for number in range(4)] == [(0, 1), (3, 4), (2, 3), (1, 2)]
    alike = in_a_circle([("line 1",)] * 4)
    assert {alike[str(number)] for number in range(4)} == {(0, 2)}


def test_threads_of_a_rank_compute_one_at_a_time_in_the_order_of_time():
    log = Log()
    first, other = log.lane(0), log.lane(0)
    begun = log.add(first, MARK, 0.0)
    log.add(other, AFTER, begun)
    work = [log.add(first, COMPUTE, 2.0), log.add(other, COMPUTE, 3.0), log.add(other, COMPUTE, 1.0)]
    work.append(log.add(first, COMPUTE, 1.0))
    joined = log.add(other, MARK, 0.0)
    last = log.add(first, AFTER, joined)
    start, end, _ = Lanes(log, Links(UNITS)).times()
    assert [(start[entry], end[entry]) for entry in work] == [(0, 2), (2, 5), (6, 7), (5, 6)]
    assert end[last] == 7


def test_times_are_known_once_nobody_can_change_them_any_more():
    """The clock goes on where it stopped, and a moment is known only when nobody can still hold it up."""
    log = Log()
    lanes = [log.lane(rank) for rank in range(2)]
    clock = Lanes(log, Links(UNITS))
    sums = log.collective_form("all_reduce", (0, 1), 1), log.message_form(1, 0, 5)
    number = log.next_collective()
    issued = log.add(0, ISSUE, number, sums[0])
    log.add(0, WAIT, issued)
    moment = log.add(0, MARK, 0.0)
    assert not clock.is_known(moment, lambda lane: lane == 1)
    log.add(1, COMPUTE, 1.0)
    assert not clock.is_known(moment, lambda lane: lane == 1)
    log.add(1, SEND, sums[1])
    log.add(1, ISSUE, number, sums[0])
    assert not clock.is_known(moment, lambda lane: lane == 1)  # it might issue something else at once
    log.add(1, COMPUTE, 1.0)
    assert clock.is_known(moment, lambda lane: lane == 1) and clock.end(moment) == 7
    assert lanes == [0, 1] and clock.times().end.tolist()[-1] == 2


def test_a_long_log_is_kept_in_blocks():
    log = Log()
    lane = log.lane(0)
    for _ in range(100_000):
        last = log.add(lane, COMPUTE, 1.0)
    assert len(log.since(0)) == 100_000 and Lanes(log, Links(UNITS)).times().end[last] == 100_000


# --- ports, cards, and what communication takes from computing --------------------------------------------------------

NODES = Cluster("nodes", CHIP, Link("wire", 0.0, 1.0), node_size=2, outer_link=Link("net", 0.0, 1.0))
ONE_CARD = replace(NODES, cards=1)


def test_messages_within_a_node_take_the_port_and_those_to_another_node_the_card():
    programs: list[list[Op]] = [
        [("send", "in", 1, 3, ()), ("send", "out", 2, 5, ()), ("send", "in2", 1, 1, ())],
        [],
        [],
    ]
    found = clocked([*programs, []], NODES)
    assert (found["in"], found["out"], found["in2"]) == ((0, 3), (0, 5), (3, 4))


def test_a_collective_between_nodes_takes_ports_and_cards_of_all_groups_and_axes():
    """Ranks 0 and 2 are in different nodes. What rank 0 sends in its node, or to another group in a third, waits."""
    programs: list[list[Op]] = [
        [("issue", "sum", (0, 2), 6, ()), ("send", "in", 1, 1, ()), ("send", "out", 4, 1, ())],
        [("send", "other", 0, 1, ()), ("send", "far", 4, 1, ("later",))],
        [("issue", "sum", (0, 2), 6, ())],
        [],
        [],
        [],
    ]
    own, shared = clocked(programs, NODES), clocked(programs, ONE_CARD)
    end = NODES.collective_seconds("all_reduce", 6, (0, 2))
    assert own["sum"] == (0, end)
    assert (own["in"], own["out"], own["other"]) == ((end, end + 1), (end, end + 1), (0, 1))
    assert own["far"] == (0, 1)  # rank 1 has a card of its own
    assert (shared["sum"][0], shared["out"][0], shared["far"][0]) == (0, end, end + 1)  # here it does not


def test_a_card_that_ranks_share_goes_to_what_the_program_says_first():
    def of(said: list[tuple]) -> list[Span]:
        programs: list[list[Op]] = [[("send", str(rank), rank + 2, 4, said[rank])] for rank in range(2)]
        found = clocked([*programs, [], []], ONE_CARD)
        return [found["0"], found["1"]]

    assert of([("line 1",), ("line 2",)]) == [(0, 4), (4, 8)]
    assert of([("line 2",), ("line 1",)]) == [(4, 8), (0, 4)]
    assert of([("line 1",), ("line 1",)]) == [(0, 8), (0, 8)]  # nothing tells them apart: each has half of it
    assert [clocked([[("send", str(rank), rank + 2, 4, ("line",))] for rank in range(2)] + [[], []], NODES)[str(rank)]
            for rank in range(2)] == [(0, 4), (0, 4)]  # fmt: skip


def test_data_parallel_groups_that_cross_one_card_take_as_long_as_one_after_the_other():
    programs: list[list[Op]] = [[("issue", f"{rank % 2}", (rank % 2, rank % 2 + 2), 4, ("line",))] for rank in range(4)]
    seconds = ONE_CARD.collective_seconds("all_reduce", 4, (0, 2))
    found = clocked(programs, ONE_CARD)
    assert found["0"] == found["1"] == (0, 2 * seconds)
    assert clocked(programs, NODES)["0"] == (0, seconds)


def test_collectives_slow_the_computing_beside_them():
    """Half of the chip: a sum from 0 to 4 and one from 6 to 10 leave 2, and 2, and so on of what is computed."""
    half = replace(UNITS, communication_share=0.5)
    programs: list[list[Op]] = [
        [("issue", "a", (0, 1), 4, ()), ("compute", 3.0), ("compute", 4.0), ("compute", 1.0)],
        [("issue", "a", (0, 1), 4, ()), ("compute", 4.0), ("issue", "b", (0, 1), 4, ())],
        [("compute", 4.0)],
    ]
    programs[0].insert(2, ("issue", "b", (0, 1), 4, ()))
    found = clocked(programs, half)
    assert (found["a"], found["b"]) == ((0, 4), (6, 10))  # rank 1 computes 2 until 4, and 2 until 6
    # rank 0 computes 3 until 5, of 4 one until 6, two until 10, one until 11, and 1 until 12
    assert (found["end 0"][0], found["end 1"][0], found["end 2"][0]) == (12, 6, 4)
    assert clocked(programs, UNITS)["end 0"][0] == 8


def test_threads_of_a_rank_are_slowed_one_at_a_time():
    log = Log()
    first, other, peer = log.lane(0), log.lane(0), log.lane(1)
    form, number = log.collective_form("all_reduce", (0, 1), 4), log.next_collective()
    for lane in (first, peer):
        log.add(lane, ISSUE, number, form)
    work = [log.add(first, COMPUTE, 1.0), log.add(other, COMPUTE, 1.0), log.add(first, COMPUTE, 1.0)]
    start, end, _ = Lanes(log, Links(replace(UNITS, communication_share=0.5))).times()
    assert [(start[entry], end[entry]) for entry in work] == [(0, 2), (2, 4), (4, 5)]
