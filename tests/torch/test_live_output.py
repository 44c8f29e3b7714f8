"""What the ranks of `tplab.torchrun` print appears as they print it, with their numbers, whatever they print with."""

from __future__ import annotations

import io
import logging
import re
import sys
from pathlib import Path

import pytest

from tplab.errors import RankError
from tplab.torch import launch
from tplab.torch.ranks.printing import LiveOutput, Screen

BEGIN = "import sys, torch, torch.distributed as dist\ndist.init_process_group('gloo')\nrank = dist.get_rank()\n"


@pytest.fixture
def shown(tmp_path: Path, capfd: pytest.CaptureFixture):
    """Runs a script on two ranks; returns what was written to stdout and stderr."""

    def run(script: str, fails: bool = False) -> tuple[str, str]:
        path = tmp_path / "train.py"
        path.write_text(BEGIN + script)
        if fails:
            with pytest.raises(RankError):
                launch(path, ranks=2, print_live=True)
        else:
            launch(path, ranks=2, print_live=True)
        return capfd.readouterr()

    return run


def test_lines_appear_in_the_order_in_which_they_are_printed(shown):
    out, _ = shown("for step in range(2):\n    print('step', step)\n    dist.barrier()\n")
    assert out.splitlines() == ["[rank 0] step 0", "[rank 1] step 0", "[rank 1] step 1", "[rank 0] step 1"]


def test_a_line_is_there_before_the_program_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The other rank finds it in the file that stdout is; nothing waits for the end of the run."""
    path, log = tmp_path / "train.py", tmp_path / "log"
    path.write_text(
        f"{BEGIN}import pathlib\nif rank == 0: print('ready')\ndist.barrier()\n"
        f"if rank == 1: assert pathlib.Path({str(log)!r}).read_text() == '[rank 0] ready\\n'\n"
    )
    with open(log, "w") as file:
        monkeypatch.setattr(sys, "stdout", file)
        launch(path, ranks=2, print_live=True)
        monkeypatch.undo()


def test_parts_of_a_line(shown):
    """What is flushed appears at once, and again as a whole if another rank was first; what is not, when it ends."""
    out, _ = shown(
        "print('loading ...', end='', flush=rank == 0)\ndist.barrier()\nprint(' done')\n"
        "dist.barrier()\nif rank == 0: print('alone', end=' ', flush=True); print('too', end='', flush=True)\n"
    )
    assert out == ("[rank 0] loading ...\n[rank 1] loading ... done\n[rank 0] loading ... done\n[rank 0] alone too\n")


def test_stderr_loggers_and_warnings(shown):
    """Loggers are shared by the ranks here: rank 0 sets them up, and each record has the rank that wrote it."""
    level, handlers = logging.root.level, list(logging.root.handlers)
    try:
        out, err = shown(
            "import logging, warnings\nlogging.basicConfig(level='INFO', format='%(message)s', force=True)\n"
            "dist.barrier()\nlogging.info('from %d', rank)\nsys.stderr.write('an ')\ndist.barrier()\n"
            "print('error', file=sys.stderr)\n"
        )
        logging.info("after the run")
    finally:
        logging.root.setLevel(level)
        logging.root.handlers[:] = handlers
    assert out == ""
    assert sorted(err.splitlines()) == [
        "[rank 0] an error", "[rank 0] from 0", "[rank 1] an error", "[rank 1] from 1"
    ]  # fmt: skip


def test_what_was_printed_before_a_failure_is_shown(shown):
    out, err = shown("print('half', end='')\ndist.barrier()\nif rank == 1: raise ValueError('no')\n", fails=True)
    assert (out, err) == ("[rank 0] half\n[rank 1] half\n", "")


def test_tqdm_stays_on_one_line(shown):
    pytest.importorskip("tqdm")
    out, err = shown(
        "from tqdm import tqdm\nfor i in tqdm(range(3), mininterval=0, disable=rank != 0, ncols=30):\n"
        "    dist.barrier()\n    if rank == 1: print('step', i)\n"
    )
    assert out.splitlines() == [f"[rank 1] step {i}" for i in range(3)]
    assert err.count("\n") == 1 and err.endswith("\n")
    assert all(re.match(r"\[rank 0\] +\d+%\|", frame) for frame in err.strip().split("\r"))


class Writers:
    """Two streams on one screen, written to by ranks in turns."""

    def __init__(self):
        self.shown, self.rank = io.StringIO(), 0
        screen = Screen()
        self.streams = [LiveOutput(self.shown, lambda: self.rank, screen) for _ in range(2)]

    def __call__(self, rank: int, text: str, stream: int = 0, flush: bool = True) -> None:
        self.rank = rank
        self.streams[stream].write(text)
        if flush:
            self.streams[stream].flush()


@pytest.mark.parametrize(
    "writes, shown",
    [
        ([(0, "\r10%"), (0, "\r20%"), (0, "\n")], "[rank 0] 10%\r[rank 0] 20%\n"),
        ([(0, "\rlong bar"), (1, "x\n"), (0, "\r2\n")], "[rank 0] long bar\r[rank 1] x       \n[rank 0] 2\n"),
        ([(0, "one\r"), (0, "two\r")], "[rank 0] one\r[rank 0] two\n"),
        ([(0, "windows\r\n")], "[rank 0] windows\n"),
        ([(0, "a"), (1, "b"), (1, "c\n"), (0, "d\n")], "[rank 0] a\n[rank 1] bc\n[rank 0] ad\n"),
        ([(0, "bar\r"), (0, "   \r")], "[rank 0] bar\r[rank 0]    \n"),
        ([(0, "a\n\nb")], "[rank 0] a\n[rank 0] \n[rank 0] b\n"),
        ([(0, "")], ""),
    ],
)
def test_a_screen_with_one_open_line(writes: list[tuple[int, str]], shown: str):
    write = Writers()
    for rank, text in writes:
        write(rank, text)
    for stream in write.streams:
        stream.end()
    write.streams[0]._screen.end()
    assert write.shown.getvalue() == shown


def test_what_no_rank_writes_is_left_alone():
    write = Writers()
    write(None, "a library")  # type: ignore[arg-type]
    assert write.shown.getvalue() == "a library" and write.streams[0].encoding == write.shown.encoding
