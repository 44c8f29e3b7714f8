"""What ranks print comes out in the order of ranks, each line labelled; what others print is left alone."""

import contextlib
import io
import logging
import sys
import threading

import pytest
import torch

from tplab import Mesh
from tplab.errors import RankError
from tplab.torch import all_reduce, axis_index, barrier, ring_shift, run

TWO = Mesh(tp=2)


def test_in_the_order_of_ranks_whoever_comes_first(capsys: pytest.CaptureFixture):
    def program() -> None:
        rank = axis_index("tp")
        print("rank", rank, "begins")
        for hop in range(2):
            ring_shift(torch.ones(1), "tp")
            print("hop", hop)

    run(program, Mesh(tp=3))
    wanted = [f"[rank {r}] {text}" for r in range(3) for text in (f"rank {r} begins", "hop 0", "hop 1")]
    assert capsys.readouterr().out.splitlines() == wanted


@pytest.mark.parametrize(
    "pieces, lines",
    [
        (["a\n", "b\n"], ["a", "b"]),
        (["a", "b", "\n"], ["ab"]),
        (["a"], ["a"]),
        (["a\n", "b"], ["a", "b"]),
        (["a\n\nb\n"], ["a", "", "b"]),
        (["\n"], [""]),
        (["\n\n"], ["", ""]),
        ([""], []),
        ([], []),
        (["one\u2028line\x0c\n"], ["one\u2028line\x0c"]),
        (["50%\r100%\n"], ["50%\r100%"]),
    ],
)
def test_lines_are_labelled_however_they_are_written(
    pieces: list[str], lines: list[str], capsys: pytest.CaptureFixture
):
    def program() -> None:
        for piece in pieces:
            print(piece, end="")
            barrier()  # the other rank writes in between

    run(program, TWO)
    assert capsys.readouterr().out.split("\n")[:-1] == [f"[rank {rank}] {text}" for rank in range(2) for text in lines]


def test_every_way_to_write(capsys: pytest.CaptureFixture):
    def program() -> None:
        print("print", flush=True)
        sys.stdout.write("write\n")
        sys.stdout.writelines(["write", "lines\n"])
        print("file", file=sys.stdout)
        sys.stdout.flush()
        assert sys.stdout.encoding.lower() == "utf-8"
        assert not sys.stdout.isatty()

    run(program, Mesh(tp=1))
    assert capsys.readouterr().out == "[rank 0] print\n[rank 0] write\n[rank 0] writelines\n[rank 0] file\n"


def test_what_was_printed_before_a_failure_is_shown(capsys: pytest.CaptureFixture):
    def program() -> None:
        print("before")
        all_reduce(torch.ones(1), "tp")
        if axis_index("tp") == 0:
            raise ValueError("no")
        print("after")
        barrier()
        print("never")

    stdout = sys.stdout
    with pytest.raises(RankError):
        run(program, TWO)
    assert sys.stdout is stdout
    assert capsys.readouterr().out in (
        "[rank 0] before\n[rank 1] before\n",
        "[rank 0] before\n[rank 1] before\n[rank 1] after\n",
    )


def test_what_other_threads_print_goes_through_at_once(capsys: pytest.CaptureFixture):
    seen: list[str] = []

    def outsider() -> None:
        print("from outside")

    def program() -> None:
        print("from inside")
        if axis_index("tp") == 0:
            thread = threading.Thread(target=outsider)
            thread.start()
            thread.join()
            seen.append(capsys.readouterr().out)

    run(program, TWO)
    assert seen == ["from outside\n"]
    assert capsys.readouterr().out == "[rank 0] from inside\n[rank 1] from inside\n"


def test_stderr_is_left_alone(capsys: pytest.CaptureFixture):
    run(lambda: print("warning", file=sys.stderr), TWO)
    assert capsys.readouterr() == ("", "warning\nwarning\n")


def test_a_program_may_redirect_what_it_prints(capsys: pytest.CaptureFixture):
    def program() -> str:
        with contextlib.redirect_stdout(io.StringIO()) as text:
            print("for myself")
        print("for all")
        return text.getvalue()

    assert run(program, TWO).per_rank == ["for myself\n"] * 2
    assert capsys.readouterr().out == "[rank 0] for all\n[rank 1] for all\n"


def test_the_caller_may_redirect_what_ranks_print():
    with contextlib.redirect_stdout(io.StringIO()) as text:
        run(lambda: print("hello"), TWO)
    assert text.getvalue() == "[rank 0] hello\n[rank 1] hello\n"


def test_a_handler_made_inside_a_rank_still_works_afterwards(capsys: pytest.CaptureFixture):
    handlers: list[logging.Handler] = []

    def program() -> None:
        handlers.append(logging.StreamHandler(sys.stdout))
        handlers[-1].emit(logging.LogRecord("x", logging.INFO, "", 0, "inside", (), None))

    run(program, Mesh(tp=1))
    handlers[0].emit(logging.LogRecord("x", logging.INFO, "", 0, "outside", (), None))
    assert capsys.readouterr().out == "[rank 0] inside\noutside\n"


def test_a_run_inside_a_rank_prints_on_that_ranks_sheet(capsys: pytest.CaptureFixture):
    def program() -> None:
        print("outer")
        run(lambda: print("inner"), TWO)

    run(program, TWO)
    lines = ["outer", "[rank 0] inner", "[rank 1] inner"]
    assert capsys.readouterr().out.splitlines() == [f"[rank {rank}] {text}" for rank in range(2) for text in lines]
