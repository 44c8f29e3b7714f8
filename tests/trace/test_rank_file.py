"""A rank's file, written while the times of a GPU are not known yet."""

from __future__ import annotations

import time
from pathlib import Path

from tests.trace.rank_files import begin
from tplab.trace.recorded.rank_file import About, Later, Writer, read

ABOUT = About(0, 1, "a", "m", "host", "train", 0.0)


class At(Later):
    """A time that is known when the clock has shown it."""

    def __init__(self, seconds: float):
        self._seconds = seconds

    def seconds(self) -> float | None:
        return self._seconds if time.perf_counter() >= self._seconds else None


class Broken(Later):
    """A time that a GPU will never tell, because it has failed."""

    def seconds(self) -> float | None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def writer(folder: Path) -> Writer:
    made = Writer(folder / "rank0.jsonl", ABOUT)
    made.note("group", "0", "default_pg", [0])
    return made


def test_a_collective_of_a_gpu_that_was_refused(tmp_path: Path):
    """When it would have started is known after it was dropped."""
    notes, soon = writer(tmp_path), At(time.perf_counter() + 0.05)
    for number in (0, 1):
        notes.note(*begin(number, "all_reduce", "train.py:3"))
        notes.note("start", number, soon)
        if number == 0:
            notes.note("drop", number)
    notes.close(time.perf_counter(), patience=1.0)
    (kept,) = read(tmp_path / "rank0.jsonl").operations
    assert kept.begin == soon._seconds


def test_the_end_waits_for_what_the_gpu_has_still_to_do(tmp_path: Path):
    notes, soon = writer(tmp_path), At(time.perf_counter() + 0.05)
    notes.note(*begin(0, "all_reduce", "train.py:3"))
    notes.note("end", 0, soon)
    start = time.perf_counter()
    notes.close(start, patience=5.0)
    file = read(tmp_path / "rank0.jsonl")
    assert file.operations[0].end == file.stop == soon._seconds
    assert time.perf_counter() - start < 2.0  # no longer than it takes


def test_the_end_does_not_wait_for_ever(tmp_path: Path):
    notes = writer(tmp_path)
    notes.note(*begin(0, "all_reduce", "train.py:3"))
    notes.note("end", 0, At(float("inf")))
    notes.close(1.0, patience=0.05)
    assert read(tmp_path / "rank0.jsonl").operations[0].end is None


def test_a_gpu_that_failed_takes_no_other_notes_with_it(tmp_path: Path):
    notes = writer(tmp_path)
    notes.note(*begin(0, "all_reduce", "train.py:3"))
    notes.note("end", 0, Broken())
    notes._write()
    notes.note(*begin(1, "all_reduce", "train.py:4"))
    notes.note("end", 1, 2.0)
    notes.close(3.0, patience=1.0)
    assert [one.end for one in read(tmp_path / "rank0.jsonl").operations] == [None, 2.0]


def test_a_time_of_zero_is_a_time(tmp_path: Path):
    notes = writer(tmp_path)
    notes.note(*begin(0, "all_reduce", "train.py:3", at=-1.0))
    notes.note("end", 0, At(0.0))
    notes.close(3.0)
    assert read(tmp_path / "rank0.jsonl").operations[0].end == 0.0
