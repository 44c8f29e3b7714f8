"""Why a real run hung: what the files of its ranks say was never finished, and that they say nothing else."""

from __future__ import annotations

from pathlib import Path

from tests.trace.rank_files import begin, end, write_ranks
from tplab.trace import merge


def test_a_receive_from_any_rank_to_which_nothing_came(tmp_path: Path):
    write_ranks(tmp_path, [begin(0, "receive", "train.py:7", peer=-1)], [])
    assert merge(tmp_path).unfinished == [
        "never finished, over 'world':\n  rank 0: receive from any rank at train.py:7"
    ]


def test_a_broadcast_whose_root_went_on(tmp_path: Path):
    calls = [begin(0, "broadcast", "train.py:7")]
    write_ranks(tmp_path, [*calls, end(0)], calls, calls)
    assert merge(tmp_path).unfinished == [
        "never finished, over 'world':\n"
        "  rank 0: broadcast at train.py:7, which it finished\n"
        "  rank 1: broadcast at train.py:7\n"
        "  rank 2: broadcast at train.py:7"
    ]
    assert merge(tmp_path).trace.warnings == merge(tmp_path).unfinished  # so a page of the trace says it, too


def test_a_rank_that_did_not_come(tmp_path: Path):
    write_ranks(tmp_path, [begin(0, "broadcast", "train.py:7")], [], killed=[0, 1])
    assert merge(tmp_path).unfinished == [
        "never finished, over 'world':\n  rank 0: broadcast at train.py:7\n  rank 1 never reached it",
        "the files of ranks 0, 1 break off: their processes were killed, or were still running",
    ]


def test_a_message_that_was_received_was_sent(tmp_path: Path):
    """A program need not wait for what isend returns. What irecv returns has to be waited for."""
    send, receive = begin(0, "send", "train.py:3", peer=1), begin(0, "receive", "train.py:5", peer=0)
    write_ranks(tmp_path, [send], [receive, end(0)])
    assert merge(tmp_path).unfinished == []
    write_ranks(tmp_path, [send, end(0)], [receive])
    assert merge(tmp_path).unfinished == [
        "never finished, over 'world':\n"
        "  rank 0: send at train.py:3, which it finished\n"
        "  rank 1: receive at train.py:5"
    ]


def test_collectives_that_differ_and_ended_all_the_same(tmp_path: Path):
    write_ranks(
        tmp_path,
        [begin(0, "all_reduce", "train.py:7"), end(0)],
        [begin(0, "broadcast", "train.py:9"), end(0)],
    )
    assert merge(tmp_path).unfinished == [
        "the ranks called different collectives, over 'world':\n"
        "  rank 0: all_reduce at train.py:7\n"
        "  rank 1: broadcast at train.py:9"
    ]
