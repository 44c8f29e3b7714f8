"""The summary that commands print after a run."""

from __future__ import annotations

from pathlib import Path

from tests.trace.rank_files import begin, end, write_ranks
from tplab.trace import merge, summary


def test_calls_are_counted_for_each_rank_of_the_group(tmp_path: Path):
    """Ranks that are in another group have nothing to do with it."""
    calls = [note for number in (0, 1) for note in (begin(number, "all_reduce", "train.py:3", group="1"), end(number))]
    notes = [[("group", "1", "", pair), *calls] for pair in ([0, 1], [0, 1], [2, 3], [2, 3])]
    write_ranks(tmp_path, *notes)
    table = [line.split() for line in summary(merge(tmp_path).trace).splitlines() if line.startswith("ranks")]
    assert table == [[*f"ranks {pair} all_reduce 2 32 B".split()] for pair in ("0,1", "2,3")]
