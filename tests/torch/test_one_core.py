"""Ranks that take short turns share one core; those that compute, and all that is not a rank, have all of them."""

import os
import threading
import time

import pytest
import torch

from tplab import Mesh
from tplab.errors import RankError
from tplab.torch import all_reduce, axis_index, barrier, run
from tplab.torch.ranks import simulated
from tplab.torch.ranks.outcomes import results

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs Linux and two cores"
)

NUM_RANKS = 4
MESH = Mesh(tp=NUM_RANKS)
MOST_ROUNDS = 2000  # a moment in which this machine is busy may make a turn long


def cores() -> set[int]:
    return os.sched_getaffinity(0)


def compute() -> None:
    """A long turn."""
    start = time.thread_time()
    while time.thread_time() - start < 0.005:
        pass


def chat(num_cores: int = 1) -> set[int]:
    """Short turns until all ranks have so many cores; which they are."""
    for _ in range(MOST_ROUNDS):
        if all_reduce(torch.tensor(len(cores())), "tp", "max") == num_cores:
            return cores()
    raise AssertionError(f"the ranks have cores {cores()} still")


@pytest.fixture(autouse=True)
def kernels_own():
    before = cores(), os.sched_getscheduler(0)
    yield
    assert (cores(), os.sched_getscheduler(0)) == before


def test_short_turns_share_a_core():
    where = run(chat, MESH).per_rank
    assert len(where[0]) == 1
    assert where == [where[0]] * NUM_RANKS


def test_one_long_turn_gives_every_rank_all_cores():
    def program():
        chat()
        if axis_index("tp") == 2:
            compute()
        barrier()
        barrier()  # where also the last to come to the first one ends its turn
        return cores()

    assert run(program, MESH).per_rank == [cores()] * NUM_RANKS


def test_a_turn_that_goes_on_gets_all_cores():
    def program():
        chat()
        start = time.perf_counter()
        while len(cores()) == 1 and time.perf_counter() - start < 30:
            pass
        return cores()

    assert run(program, MESH).per_rank == [cores()] * NUM_RANKS


def test_ranks_that_compute_never_share_a_core():
    def program():
        seen = []
        for _ in range(2 * NUM_RANKS):
            compute()
            barrier()
            seen.append(cores())
        return seen

    assert run(program, MESH).per_rank == [[cores()] * 2 * NUM_RANKS] * NUM_RANKS


def test_they_meet_again_after_a_long_turn():
    def program():
        chat()
        compute()
        barrier()
        return chat()

    assert all(len(where) == 1 for where in run(program, MESH).per_rank)


def test_a_meeting_of_many_ranks_is_no_long_turn(monkeypatch):
    """The last one to come works for all. Here a short turn is shorter than what it does, and longer than a share."""
    waited = []

    def slow(call, inputs, splits=()):
        start = time.thread_time()
        while time.thread_time() - start < 2e-4 * len(inputs):
            pass
        waited.append(len(inputs))
        return results(call, inputs, splits)

    def program():
        chat()
        monkeypatch.setattr(simulated, "results", slow)
        seen = []
        for _ in range(4):
            barrier()
            seen.append(len(cores()))
        return seen

    seen = run(program, Mesh(tp=16)).per_rank
    assert len(waited) >= 4
    assert sum(of_rank.count(1) for of_rank in seen) > 32, seen  # this machine may be busy for a moment


class Bystander:
    """A thread that a rank starts while all are on one core, as torch starts those that it computes with."""

    def __init__(self) -> None:
        self._leave = threading.Event()
        self.thread = threading.Thread(target=self._leave.wait, daemon=True)
        self.thread.start()

    @property
    def cores(self) -> set[int]:
        assert self.thread.native_id is not None
        return os.sched_getaffinity(self.thread.native_id)

    def end(self) -> None:
        self._leave.set()
        self.thread.join()


@pytest.mark.parametrize("ending", ["return", "compute", "raise"])
def test_threads_born_meanwhile_are_let_go(ending):
    born = []

    def program():
        chat()
        born.append(Bystander())
        inherited = born[-1].cores
        if ending == "raise":
            raise ValueError("broken")
        if ending == "compute":
            compute()
            barrier()
            barrier()
            assert born[-1].cores == cores()
        return len(inherited)

    try:
        if ending == "raise":
            with pytest.raises(RankError, match="broken"):
                run(program, MESH)
        else:
            assert min(run(program, MESH).per_rank) == 1
        assert [one.cores for one in born] == [cores()] * len(born)
    finally:
        for one in born:
            one.end()


def test_a_rank_that_has_chosen_its_core_keeps_it():
    last = {max(cores())}

    def program():
        os.sched_setaffinity(0, last)
        for _ in range(20):
            barrier()
        compute()
        barrier()
        return cores()

    assert run(program, MESH).per_rank == [last] * NUM_RANKS


def test_a_process_with_one_core_stays_there():
    where = []

    def confined():
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        where.append(cores())
        where.extend(run(chat, MESH).per_rank)
        where.append(cores())

    thread = threading.Thread(target=confined)
    thread.start()
    thread.join()
    assert len(where) == NUM_RANKS + 2
    assert all(one == where[0] for one in where)


def test_a_run_inside_of_a_rank_starts_with_all_cores():
    def inner():
        return cores()

    def program():
        chat()
        return run(inner, Mesh(tp=1)).per_rank[0]

    assert run(program, MESH).per_rank == [cores()] * NUM_RANKS


def test_where_the_system_has_no_such_thing(monkeypatch):
    for name in ("sched_setaffinity", "sched_setscheduler"):
        monkeypatch.delattr(os, name)
    before = cores()

    def program():
        for _ in range(20):
            barrier()
        return cores()

    assert run(program, MESH).per_rank == [before] * NUM_RANKS


def test_where_the_system_forbids_it(monkeypatch):
    def refused(*_):
        raise PermissionError("not here")

    for name in ("sched_setaffinity", "sched_setscheduler"):
        monkeypatch.setattr(os, name, refused)
    before = cores()

    def program():
        for _ in range(20):
            barrier()
        return cores()

    assert run(program, MESH).per_rank == [before] * NUM_RANKS
