"""The summary that commands print after a run."""

from __future__ import annotations

from pathlib import Path

from tests.trace.rank_files import begin, end, write_ranks
from tplab import Mesh
from tplab.trace import Recorder, Trace, merge, summary


def of_groups(*groups: tuple[int, ...], calls: int = 1) -> Trace:
    """Eight ranks; each of these groups, which are no axes, calls all_reduce so often."""
    recorder = Recorder(Mesh(world=8), "groups", "torch")
    for time in range(calls):
        for group in groups:
            label, message = "ranks " + ",".join(map(str, group)), recorder.next_message()
            for rank in group:
                recorder.add(rank, "wait", "all_reduce", time, time + 1, axis=label, where="a.py:3")
                about = {"axis": label, "group": group, "bytes": 10, "message": message, "step": time}
                recorder.add(rank, "collective", "all_reduce", time, time + 1, where="a.py:3", **about)
    return recorder.trace(unit="steps")


def table(trace: Trace) -> list[str]:
    """The table's lines, with single blanks."""
    return [" ".join(line.split()) for line in summary(trace).split("\n\n")[1].splitlines()[1:]]


def test_calls_are_counted_for_each_rank_of_the_group(tmp_path: Path):
    """Ranks that are in another group have nothing to do with it."""
    calls = [note for number in (0, 1) for note in (begin(number, "all_reduce", "train.py:3", group="1"), end(number))]
    notes = [[("group", "1", "", pair), *calls] for pair in ([0, 1], [0, 1], [2], [2])]
    write_ranks(tmp_path, *notes[:2], [], [])
    assert table(merge(tmp_path).trace) == ["ranks 0,1 all_reduce 2 32 B"]


def test_groups_that_are_alike_are_one_line():
    pairs = [(rank, rank + 4) for rank in range(4)]
    assert table(of_groups(*pairs)) == ["4 groups of 2 (0,4 ...) all_reduce 1 80 B"]
    assert table(of_groups(*pairs, (0, 2, 4), calls=2)) == [
        "4 groups of 2 (0,4 ...) all_reduce 2 160 B", "ranks 0,2,4 all_reduce 2 60 B",
    ]  # fmt: skip
    neighbours = [(rank, rank + 1) for rank in range(3)]
    assert table(of_groups(*pairs, *neighbours)) == [
        "4 groups of 2 (0,4 ...) all_reduce 1 80 B", "3 groups of 2 (0,1 ...) all_reduce 1 to 2 60 B",
    ]  # fmt: skip
    assert table(of_groups((0, 7), (1, 6), (2, 5))) == ["3 groups of 2 (0,7 ...) all_reduce 1 60 B"]


def test_groups_that_are_not_in_the_trace_are_not_counted():
    assert table(of_groups((0, 4), (1, 5)).select(axis="ranks 0,4")) == ["ranks 0,4 all_reduce 1 20 B"]


def test_a_line_in_which_groups_of_one_kind_wait_is_listed_once():
    waits = summary(of_groups((0, 4), (1, 5))).split("longest waits:\n")[1]
    assert waits == "  rank 0: 1 step in all_reduce over ranks 0,4 at a.py:3; 4 ranks wait there"


def test_half_a_call_per_rank_is_said_as_what_it_is():
    recorder = Recorder(Mesh(tp=2), "one", "torch")
    recorder.add(0, "message", "send", 0, 1, peer=1, axis="tp", group=(0, 1), bytes=8, step=0, where="a.py:1")
    assert table(recorder.trace(unit="steps")) == ["tp send 0 to 1 8 B"]


def test_ranks_that_send_no_message_count_too():
    recorder = Recorder(Mesh(tp=4), "both", "torch")
    for source, target in ((0, 1), (1, 0)):
        recorder.add(source, "message", "send", 0, 1, peer=target, axis="tp", group=(source, target), bytes=8)
    assert table(recorder.trace(unit="steps")) == ["tp send 0 to 1 16 B"]


def test_messages_that_were_never_received_are_named():
    recorder = Recorder(Mesh(tp=2), "lost", "torch")
    numbers = [
        recorder.add(0, "message", "send", 0, 1, peer=1, axis="tp", group=(0, 1), bytes=8, where=f"a.py:{line}")
        for line in range(6)
    ]
    assert "never received" not in summary(recorder.trace(unit="steps"))
    for number in numbers[1:]:
        recorder.lost(number)
    trace = recorder.trace(unit="steps")
    assert [event.message for event in trace.select(kind="receive").events] == numbers[:1]
    said = [f"  send from rank 0 to rank 1, 8 B at a.py:{line}" for line in (1, 2, 3)]
    assert "\n".join(["of these, never received:", *said, "  and 2 more"]) in summary(trace)
