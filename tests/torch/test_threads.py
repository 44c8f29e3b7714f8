"""Runs in several threads take turns with what a process has one of: random numbers, sys.stdout, the default dtype."""

import contextlib
import io
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tplab import Mesh
from tplab.errors import RankError
from tplab.torch import all_reduce, axis_index, barrier, ring_shift, run
from tplab.torch.ranks.floor import Ticket

TWO = Mesh(tp=2)


@pytest.fixture(autouse=True)
def kernels_own() -> Iterator[None]:
    """The kernel finds everything as it was, and the floor free."""
    before = torch.get_rng_state(), torch.get_default_dtype(), sys.stdout
    yield
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (torch.get_default_dtype(), sys.stdout) == before[1:]
    assert not Ticket._queue


def in_threads(*work: Callable[[], Any]) -> list[Any]:
    """What each of these gives, all called at once."""
    found: list[Any] = [None] * len(work)

    def call(place: int) -> None:
        try:
            found[place] = work[place]()
        except BaseException as error:
            found[place] = error

    threads = [threading.Thread(target=call, args=(place,)) for place in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def draws() -> float:
    return sum(float(all_reduce(torch.rand(1), "tp")) for _ in range(200))


def test_the_same_seed_gives_the_same_bits_also_in_two_threads_at_once():
    alone = run(draws, Mesh(tp=4), seed=1).per_rank
    for out in in_threads(*[lambda: run(draws, Mesh(tp=4), seed=1)] * 3):
        assert out.per_rank == alone


def test_many_runs_in_several_threads_leave_stdout_alone(capsys: pytest.CaptureFixture):
    def many() -> None:
        for _ in range(40):
            run(lambda: print("hello"), TWO)

    assert in_threads(*[many] * 4) == [None] * 4
    assert sorted(capsys.readouterr().out.splitlines()) == ["[rank 0] hello"] * 160 + ["[rank 1] hello"] * 160


def test_what_fails_in_one_thread_is_that_threads_own():
    def fails() -> None:
        barrier()
        raise ValueError("no")

    failed, fine = in_threads(lambda: run(fails, TWO), lambda: run(draws, TWO, seed=3).per_rank)
    assert isinstance(failed, RankError)
    assert fine == run(draws, TWO, seed=3).per_rank


@pytest.mark.parametrize("is_nested", [False, True])
def test_a_long_run_lets_another_one_go_on(is_nested: bool):
    """Also where its ranks' turns are all taken inside of one of its own runs."""
    begun, is_done = threading.Event(), threading.Event()

    def hops() -> int:
        begun.set()
        for hop in range(20_000):
            if all_reduce(torch.tensor(is_done.is_set()), "tp"):
                return hop
            ring_shift(torch.rand(1), "tp")
        raise AssertionError("the other run has never been done")

    def program() -> list[int]:
        barrier()
        inside = run(hops, TWO).per_rank if is_nested else [hops()]
        barrier()
        return inside

    def short() -> list[float]:
        begun.wait()
        out = run(draws, TWO, seed=5).per_rank
        is_done.set()
        return out

    long, out = in_threads(lambda: run(program, TWO).per_rank, short)
    assert all(isinstance(hop, int) for inside in long for hop in inside)
    assert out == run(draws, TWO, seed=5).per_rank


def test_a_default_dtype_is_that_of_the_rank_that_sets_it():
    def program() -> list[torch.dtype]:
        seen = [torch.ones(1).dtype]
        if axis_index("tp") == 0:
            torch.set_default_dtype(torch.float64)
        barrier()
        seen.append(torch.ones(1).dtype)
        inside = run(lambda: torch.ones(1).dtype, TWO).per_rank
        barrier()
        return [*seen, *inside, torch.ones(1).dtype]

    f32, f64 = torch.float32, torch.float64
    assert run(program, TWO).per_rank == [[f32, f64, f64, f64, f64], [f32] * 5]
    assert torch.ones(1).dtype is f32

    def fails() -> None:
        torch.set_default_dtype(torch.float64)
        raise ValueError("no")

    with pytest.raises(RankError):
        run(fails, TWO)


def test_what_a_rank_redirects_is_what_it_prints_itself(capsys: pytest.CaptureFixture):
    """Also while it waits, and others print; and if it never takes it back."""

    def program() -> str:
        with contextlib.redirect_stdout(io.StringIO()) as text:
            print("before")
            barrier()
            print("after")
        barrier()
        print("for all")
        sys.stdout = io.StringIO()
        barrier()
        print("for nobody")
        return text.getvalue()

    assert run(program, TWO).per_rank == ["before\nafter\n"] * 2
    assert capsys.readouterr().out == "[rank 0] for all\n[rank 1] for all\n"


def test_a_sheet_that_another_thread_puts_back_does_not_pile_up(capsys: pytest.CaptureFixture):
    """redirect_stdout in a thread, around the end of a run: what it puts back is that run's."""
    real, left = sys.stdout, []
    try:
        for _ in range(3):
            run(lambda: left.append(sys.stdout), Mesh(tp=1))
            sys.stdout = left[-1]
        run(lambda: print("hello"), Mesh(tp=1))
        assert [sheet.stream for sheet in left] == [real] * 3
    finally:
        sys.stdout = real
    assert capsys.readouterr().out == "[rank 0] hello\n"
