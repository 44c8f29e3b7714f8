"""A rank's file, written while the times of a GPU are not known yet."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.trace.rank_files import begin
from tplab.errors import TraceError
from tplab.trace.recorded import rank_file
from tplab.trace.recorded.rank_file import FORMAT, About, Later, Writer, read

ABOUT = About(0, 1, "a", "m", "host", "train", 0.0)


class Clock:
    """In place of this machine's time: it goes on while somebody sleeps, and not by itself."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.seconds = 1.0
        monkeypatch.setattr(rank_file, "time", SimpleNamespace(monotonic=lambda: self.seconds, sleep=self.sleep))

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


class At(Later):
    """A time that is known when the clock has shown it."""

    def __init__(self, clock: Clock, seconds: float):
        self._clock, self._seconds = clock, seconds

    def seconds(self) -> float | None:
        return self._seconds if self._clock.seconds >= self._seconds else None


class Broken(Later):
    """A time that a GPU will never tell, because it has failed."""

    def seconds(self) -> float | None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def writer(folder: Path) -> Writer:
    made = Writer(folder / "rank0.jsonl", ABOUT)
    made.note("group", "0", "default_pg", [0])
    return made


def test_a_collective_of_a_gpu_that_was_refused(tmp_path: Path, clock: Clock):
    """When it would have started is known after it was dropped."""
    notes, soon = writer(tmp_path), At(clock, 1.5)
    for number in (0, 1):
        notes.note(*begin(number, "all_reduce", "train.py:3"))
        notes.note("start", number, soon)
        if number == 0:
            notes.note("drop", number)
    notes.close(clock.seconds, patience=1.0)
    (kept,) = read(tmp_path / "rank0.jsonl").operations
    assert kept.begin == 1.5


def test_the_end_waits_for_what_the_gpu_has_still_to_do(tmp_path: Path, clock: Clock):
    notes, soon = writer(tmp_path), At(clock, 1.5)
    notes.note(*begin(0, "all_reduce", "train.py:3"))
    notes.note("end", 0, soon)
    notes.close(clock.seconds, patience=5.0)
    file = read(tmp_path / "rank0.jsonl")
    assert file.operations[0].end == file.stop == 1.5
    assert clock.seconds == pytest.approx(1.5, abs=0.1)  # no longer than it takes


def test_the_end_does_not_wait_for_ever(tmp_path: Path, clock: Clock):
    notes = writer(tmp_path)
    notes.note(*begin(0, "all_reduce", "train.py:3"))
    notes.note("end", 0, At(clock, float("inf")))
    notes.close(1.0, patience=0.5)
    assert read(tmp_path / "rank0.jsonl").operations[0].end is None
    assert clock.seconds == pytest.approx(1.5, abs=0.1)


def test_a_gpu_that_failed_takes_no_other_notes_with_it(tmp_path: Path):
    notes = writer(tmp_path)
    notes.note(*begin(0, "all_reduce", "train.py:3"))
    notes.note("end", 0, Broken())
    notes._write()
    notes.note(*begin(1, "all_reduce", "train.py:4"))
    notes.note("end", 1, 2.0)
    notes.close(3.0, patience=1.0)
    assert [one.end for one in read(tmp_path / "rank0.jsonl").operations] == [None, 2.0]


def test_a_time_of_zero_is_a_time(tmp_path: Path, clock: Clock):
    notes = writer(tmp_path)
    notes.note(*begin(0, "all_reduce", "train.py:3", at=-1.0))
    notes.note("end", 0, At(clock, 0.0))
    notes.close(3.0)
    assert read(tmp_path / "rank0.jsonl").operations[0].end == 0.0


BEGIN = '["begin", 0, "all_reduce", "0", 1.0, 8, [1], "float64", "train.py:3", "", "sum", null, 0]'
MESSAGE = BEGIN.replace("null", "PEER")


@pytest.mark.parametrize(
    "line, why",
    [
        (BEGIN.replace('"0"', '"9"'), "there is no group '9'"),
        ('["group", "0", "default_pg", [0, 1]]', "group '0' is there twice"),
        ('["group", "1", "", [0, 2]]', "2 is not one of the 2 ranks"),
        ('["group", "1", "", [0, "1"]]', "'1' is not a whole number"),
        (MESSAGE.replace("PEER", "7"), "7 is not one of the 2 ranks"),
        (MESSAGE.replace("PEER", "-2"), "-2 is not one of the 2 ranks"),
        (BEGIN.replace("1.0", "NaN"), "nan is not a time"),
        (BEGIN.replace("1.0", "null"), "None is not a time"),
        (BEGIN.replace("8", '"8"'), "'8' is not a whole number"),
        (BEGIN.replace("[1]", '["1"]'), "'1' is not a whole number"),
        (BEGIN.replace('"train.py:3"', "3"), "3 is not a text"),
        (BEGIN.replace(", 0]", "]"), "it has 10 fields after the number, and not 11"),
        ('["stop", 1e400]', "inf is not a time"),
        ('["stop"]', "IndexError"),
        ('["end", 5, 1.0]', "there is no operation 5"),
        ('["end", [], 1.0]', "TypeError"),
        ('["start", 5, 1.0]', "there is no operation 5"),
        ('["from", 5, 1]', "there is no operation 5"),
        ('["wait", 5, 1.0, 2.0, "train.py:3"]', "there is no operation 5"),
        ('["hello"]', "there is no note 'hello'"),
        ('["group", "1", "", []]', "group '1' has no ranks"),
        ('["group", "1", "", [0, 0]]', "group '1' has a rank twice"),
        ("[" * 100_000, "brackets are nested too deeply"),
        (f'["stop", 1{"0" * 400}]', "is not a time"),
        (f'["stop", "{"x" * 10_000}"]', "xxx... is not a time"),
        (BEGIN.replace("8", "1" + "0" * 30), "is not a whole number"),
        ("7", "TypeError"),
        ("", "JSONDecodeError"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, line: str, why: str):
    path = tmp_path / "rank0.jsonl"
    Writer(path, ABOUT._replace(world=2)).close(1.0)
    about, *_ = path.read_text().splitlines()
    path.write_text("\n".join([about, '["group", "0", "default_pg", [0, 1]]', line, ""]))
    with pytest.raises(TraceError, match=rf"rank0\.jsonl, line 3 is damaged: .*{re.escape(why)}"):
        read(path)


@pytest.mark.parametrize(
    "change, why",
    [
        ({"world": "2"}, "'2' is not a whole number"),
        ({"world": 0}, "0 is not one of the 0 ranks"),
        ({"rank": 1}, "1 is not one of the 1 ranks"),
        ({"start": None}, "None is not a time"),
        ({"host": 3}, "3 is not a text"),
        ({"more": 3}, "unexpected keyword"),
    ],
)
def test_a_damaged_first_line_is_named(tmp_path: Path, change: dict[str, object], why: str):
    path = tmp_path / "rank0.jsonl"
    path.write_text(json.dumps({"format": FORMAT, **ABOUT._asdict(), **change}) + "\n")
    with pytest.raises(TraceError, match=rf"rank0\.jsonl, line 1 is damaged: .*{re.escape(why)}"):
        read(path)


def test_a_first_line_of_brackets(tmp_path: Path):
    path = tmp_path / "rank0.jsonl"
    path.write_text("[" * 100_000 + "\n")
    with pytest.raises(TraceError, match=r"rank0\.jsonl is not the file of a rank"):
        read(path)


def test_a_file_that_is_no_text(tmp_path: Path):
    path = tmp_path / "rank0.jsonl"
    path.write_bytes(b"\xff\xfe\n")
    with pytest.raises(TraceError, match=r"rank0\.jsonl is not the file of a rank"):
        read(path)
