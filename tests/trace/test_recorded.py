"""Merging the files of ranks: what is one collective, the clocks of several machines, and files that do not fit."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from tests.trace.rank_files import write_ranks
from tplab import Mesh
from tplab import merge as command
from tplab.errors import TraceError
from tplab.trace import merge, summary
from tplab.trace.recorded.clocks import advances
from tplab.trace.recorded.rank_file import About, Writer

STEPS = 20
LATENCY = 1e-4


def write(
    folder: Path,
    ahead: tuple[float, ...] = (0.0, 0.0),
    machines: str = "one",
    world: int | None = None,
    run: str = "a",
    seed: int = 0,
    drift: tuple[float, ...] | None = None,
) -> None:
    """The files of ranks that do all_reduces and then one message, whose clocks are `ahead` by so many seconds.

    machines   "one" for all ranks; "each" has one of its own
    drift      by how many seconds each clock gets further ahead in a second
    """
    random = np.random.default_rng(seed)
    num_ranks = len(ahead)
    speeds = [1 + fast for fast in drift or (0.0,) * num_ranks]
    writers = []

    def shown(rank: int, time: float) -> float:
        return float(time * speeds[rank] + ahead[rank])

    for rank in range(num_ranks):
        machine = "m" if machines == "one" else f"m{rank}"
        about = About(rank, world or num_ranks, run, machine, f"host{rank}", "train", shown(rank, 0.0))
        writers.append(Writer(folder / f"rank{rank}.jsonl", about))
        writers[-1].note("group", "0", "default_pg", list(range(num_ranks)))
    time = 1.0
    for number in range(STEPS):
        begins = time + random.uniform(0, 1e-2, num_ranks)
        ends = begins.max() + random.uniform(LATENCY, 3 * LATENCY, num_ranks)
        for rank, writer in enumerate(writers):
            begin, end = shown(rank, begins[rank]), shown(rank, ends[rank])
            about = 80, [10], "float64", "train.py:3", "forward", "sum", None, 0
            writer.note("begin", number, "all_reduce", "0", begin, *about)
            writer.note("wait", number, begin, end, "train.py:3")
            writer.note("end", number, end)
        time = ends.max() + 1e-3
    for rank, op, peer, start, end in ((0, "send", 1, time, time + 1e-4), (1, "receive", 0, time, time + LATENCY)):
        about = 8, [1], "float64", "train.py:5", "backward", "", peer, 0
        writers[rank].note("begin", STEPS, op, "0", shown(rank, start), *about)
        writers[rank].note("wait", STEPS, shown(rank, start), shown(rank, end), "train.py:5")
        writers[rank].note("end", STEPS, shown(rank, end))
    for rank, writer in enumerate(writers):
        writer.close(shown(rank, time + 0.01))


def test_one_trace_of_all_ranks(tmp_path: Path):
    write(tmp_path)
    merged = merge(tmp_path)
    trace = merged.trace
    assert (merged.doubt, merged.unfinished) == (0.0, [])
    assert trace.mesh == Mesh(world=2) and trace.clock == "measured" and trace.title == "train"
    assert trace.bytes_sent(op="all_reduce") == 2 * STEPS * 80 and trace.num_steps == STEPS + 1
    meetings = [event.message for event in trace.select(kind="collective", rank=0).events]
    assert meetings == [event.message for event in trace.select(kind="collective", rank=1).events]
    (send,), (receive,) = trace.select(kind="send").events, trace.select(kind="receive").events
    assert (send.rank, send.peer, receive.rank, receive.peer) == (0, 1, 1, 0) and send.message == receive.message
    assert merge(tmp_path, Mesh(tp=2)).trace.bytes_sent(axis="tp") == 2 * STEPS * 80 + 8


@pytest.mark.parametrize("ahead", [(0.0, 0.0), (0.0, 512.25), (3.5, -100.0, 7.0)])
def test_clocks_of_several_machines_are_aligned(tmp_path: Path, ahead: tuple[float, ...]):
    """To half the quickest collective's time; and the true difference is within what is said."""
    write(tmp_path / "one", (0.0,) * len(ahead))
    write(tmp_path / "each", ahead, "each")
    true, merged = merge(tmp_path / "one").trace, merge(tmp_path / "each")
    assert 0 < merged.doubt <= 6 * LATENCY
    for one, other in zip(true.select(kind="wait").events, merged.trace.select(kind="wait").events, strict=True):
        assert (one.rank, one.op, one.where) == (other.rank, other.op, other.where)
        assert abs(one.start - other.start) <= merged.doubt and abs(one.end - other.end) <= merged.doubt


@pytest.mark.parametrize("drift", [(0.0, 0.02), (0.0, -0.01, 0.01)])
def test_clocks_that_drift(tmp_path: Path, drift: tuple[float, ...]):
    """What is said of how far off clocks can be is about true for the whole run: within each part of it that has bounds
    which agree, drift is not seen."""
    ahead = (0.0, 9.0, -5.0)[: len(drift)]
    write(tmp_path / "one", (0.0,) * len(drift))
    write(tmp_path / "each", ahead, "each", drift=drift)
    true, merged = merge(tmp_path / "one").trace, merge(tmp_path / "each")
    apart = (max(drift) - min(drift)) * true.makespan
    assert apart / 2 - 6 * LATENCY <= merged.doubt <= 2 * apart
    for one, other in zip(true.select(kind="wait").events, merged.trace.select(kind="wait").events, strict=True):
        assert abs(one.start - other.start) <= 2 * merged.doubt


def test_bounds_that_contradict_each_other():
    """A clock that gets further ahead: by 5 s early in the run, by 6 s late in it."""
    early, late = {(1, 0): -4.9, (0, 1): 5.1}, {(1, 0): -5.9, (0, 1): 6.1}
    found, doubt = advances([early, {}, late], ["a", "b"])
    np.testing.assert_allclose(found, [0, -5.5])
    np.testing.assert_allclose(doubt, [0, 0.6])
    impossible = {(1, 0): -4.9, (0, 1): 4.0}  # of a file that was changed
    np.testing.assert_allclose(advances([early, impossible], ["a", "b"]), [[0, -5], [0, 0.1]])
    with pytest.raises(TraceError, match="the clocks of a and b cannot be compared"):
        advances([impossible], ["a", "b"])


def test_bounds_add_up_along_a_chain():
    """Machine 2 has met machine 1 only."""
    bounds = [{(1, 0): 5.2, (0, 1): -4.8}, {(2, 1): -2.9, (1, 2): 3.1}]
    found, doubt = advances(bounds, ["a", "b", "c"])
    np.testing.assert_allclose(found, [0, 5, 2])
    np.testing.assert_allclose(doubt, [0, 0.2, 0.3])
    with pytest.raises(TraceError, match="the clocks of a and c cannot be compared"):
        advances([{(1, 0): 5.2, (0, 1): -4.8}], ["a", "b", "c"])


CUBE = {"mesh_tp": (1, 2), "mesh_cp": (2, 2), "mesh_dp": (4, 2)}


@pytest.mark.parametrize(
    "dims, mesh",
    [
        (CUBE, Mesh(dp=2, cp=2, tp=2)),
        ({"mesh_dp_cp": (2, 4), **CUBE}, Mesh(dp=2, cp=2, tp=2)),
        ({"mesh_all": (1, 8), **CUBE}, Mesh(dp=2, cp=2, tp=2)),
        ({"mesh_cp_tp": (1, 4), "mesh_dp": (4, 2)}, Mesh(dp=2, cp_tp=4)),
        ({"mesh_tp": (1, 2), "mesh_dp": (4, 2)}, Mesh(world=8)),
    ],
)
def test_dims_of_a_device_mesh_name_the_axes(tmp_path: Path, dims: dict[str, tuple[int, int]], mesh: Mesh):
    """Also where some of them were flattened into one, whose groups there are too. Each is (distance, size)."""
    apart = [0, 1, 4, 5]  # dp and tp, flattened
    groups = [
        ("group", str(number), name, [distance * place for place in range(size)])
        for number, (name, (distance, size)) in enumerate(dims.items(), 1)
    ]
    write_ranks(tmp_path, *[[("group", "f", "mesh_dp_tp", apart), *groups]] * 8)
    assert merge(tmp_path).trace.mesh == mesh


def test_files_that_are_not_of_one_run(tmp_path: Path):
    with pytest.raises(TraceError, match=r"has no files rank\*\.jsonl"):
        merge(tmp_path)
    with pytest.raises(TraceError, match="there is no folder"):
        merge(tmp_path / "nowhere")
    write(tmp_path, (0.0,) * 3, run="old")
    (tmp_path / "rank1.jsonl").unlink()
    with pytest.raises(TraceError, match=r"has the files of 2 of 3 ranks, without rank1\.jsonl; copy the files of all"):
        merge(tmp_path)
    write(tmp_path, run="new")
    with pytest.raises(TraceError, match=r"rank2\.jsonl is of one with 3 ranks, and the newest file, rank\d\.jsonl"):
        merge(tmp_path)
    (tmp_path / "rank2.jsonl").unlink()
    with pytest.raises(TraceError, match=r"the files of 2 ranks, and Mesh\(tp=4\) has 4; give a mesh of 2"):
        merge(tmp_path, Mesh(tp=4))
    (tmp_path / "rank1.jsonl").write_text("[]\n")
    with pytest.raises(TraceError, match=r"rank1\.jsonl is not the file of a rank"):
        merge(tmp_path)


def test_a_world_that_nobody_has(tmp_path: Path):
    write(tmp_path)
    for path in tmp_path.iterdir():
        about, *notes = path.read_text().splitlines()
        about = json.dumps(json.loads(about) | {"world": 1_000_000_000})
        path.write_text("\n".join([about, *notes, ""]))
    files = r"of 2 of 1000000000 ranks, without rank2\.jsonl, .*, rank9\.jsonl, \.\.\.; copy"
    with pytest.raises(TraceError, match=files):
        merge(tmp_path)


def test_whatever_is_changed_the_error_is_tplabs(tmp_path: Path):
    """Values, lines and files at random: a trace, or an error with a file and a line, in few words."""
    write(tmp_path)
    draw, whole = random.Random(0), {path: path.read_text().splitlines() for path in tmp_path.iterdir()}
    values = [
        None,
        -1,
        0,
        7,
        10**9,
        10**400,
        1.5,
        1e308,
        float("nan"),
        True,
        "",
        "0",
        "all_reduce",
        [],
        [0, 0],
        [[]],
        {},
    ]
    num_told = 0
    for _ in range(400):
        place, value, kind = draw.randrange(6), draw.choice(values), draw.choice(["field", "line", "cut"])
        for path in draw.sample(sorted(whole), draw.choice([1, 2])):
            lines = list(whole[path])
            if kind == "field":
                note = json.loads(lines[place])
                note[draw.choice(list(note) if isinstance(note, dict) else range(len(note)))] = value
                lines[place] = json.dumps(note)
            elif kind == "line":
                lines[place] = draw.choice([lines[0], lines[-1], json.dumps(value), "[" * 50_000])
            else:
                lines[place] = lines[place][: draw.randrange(len(lines[place]))]
            path.write_text("\n".join([*lines, ""]))
        try:
            summary(merge(tmp_path).trace)
        except TraceError as error:
            num_told += len(str(error)) < 1000
        else:
            num_told += 1
        for path, lines in whole.items():
            path.write_text("\n".join([*lines, ""]))
    assert num_told == 400


def test_a_file_that_is_cut_off_or_damaged(tmp_path: Path):
    write(tmp_path)
    path = tmp_path / "rank1.jsonl"
    whole = path.read_text()
    path.write_text(whole[:-300])  # in the middle of a line
    merged = merge(tmp_path)
    assert merged.unfinished == [
        "never finished, over 'world':\n  rank 0: all_reduce at train.py:3, which it finished\n"
        "  rank 1: all_reduce at train.py:3",
        "the file of rank 1 breaks off: its process was killed, or was still running",
    ]
    assert len(merged.trace.select(kind="receive")) == 1  # it was sent, and so it arrives
    assert len(merged.trace.select(kind="wait", rank=1)) < len(merged.trace.select(kind="wait", rank=0))
    lines = whole.splitlines()
    path.write_text("\n".join([*lines[:3], '["end", 99, 1.0]', *lines[3:], ""]))
    with pytest.raises(TraceError, match=r"rank1\.jsonl, line 4 is damaged: ValueError: there is no operation 99"):
        merge(tmp_path)


def test_what_was_never_done_is_said(tmp_path: Path):
    write(tmp_path)
    for rank, op, line in ((0, "all_reduce", 7), (1, "barrier", 9)):
        path = tmp_path / f"rank{rank}.jsonl"
        *lines, _ = path.read_text().splitlines()  # without its stop
        last = f'["begin", 50, "{op}", "0", {3.0 + rank}, 80, [10], "float64", "train.py:{line}", "", "", null, 0]'
        path.write_text("\n".join([*lines, last, ""]))
    merged = merge(tmp_path)
    assert merged.unfinished == [
        "the ranks called different collectives, over 'world':\n"
        "  rank 0: all_reduce at train.py:7\n  rank 1: barrier at train.py:9",
        "the files of ranks 0, 1 break off: their processes were killed, or were still running",
    ]
    assert merged.trace.select(op="barrier").events[0].where == "train.py:9"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write(tmp_path / "traces", (0.0, 9.0), "each")
    page = tmp_path / "run.html"
    assert command.main([str(tmp_path / "traces"), "--mesh", "dp=2", "--html", str(page)]) == 0
    shown = capsys.readouterr().out
    assert "train on Mesh(dp=2), measured" in shown
    assert "after alignment, the clocks of two machines may still be off by up to" in shown
    assert f"open {page} in a browser" in shown and "<title>" in page.read_text()
    assert command.main([str(tmp_path)]) == 2
    assert "tplab.merge: " in capsys.readouterr().err
