"""What goes wrong in ranks that are processes is named within seconds, nothing is left running, the kernel lives on."""

import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import types
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tplab import Mesh, P
from tplab.errors import CollectiveMismatchError, DeadlockError, RankError, ReplicationError, ShapeError, SpecError
from tplab.torch import (
    all_gather,
    all_reduce,
    all_to_all,
    axis_index,
    axis_size,
    barrier,
    ppermute,
    receive,
    ring_shift,
    run,
    send,
)
from tplab.torch.processes import shut_down

ROOT = Path(__file__).parents[2]
HERE = "test_processes_faults.py"
LARGE = 5000  # float32 elements: more than fits into one frame


@pytest.fixture(scope="module", autouse=True)
def _no_processes_are_left():
    yield
    shut_down()


def fails(fn, mesh, kind, match=None, on="processes") -> Any:
    """Run and give the error, which must come by itself; afterwards ranks run as before."""
    with pytest.raises(kind, match=match) as caught:
        run(fn, mesh, on=on)
    return caught.value


def lives_on(mesh):
    assert run(lambda: all_reduce(torch.ones(1), "tp"), mesh, on="processes").per_rank[0] == mesh.axis_size("tp")


def test_a_rank_that_raises(capsys):
    def program():
        print("before", axis_index("tp"))
        all_reduce(torch.ones(3), "tp")
        if axis_index("tp") == 2:
            raise KeyError("lost my shard")
        all_reduce(torch.ones(3), "tp")

    error = fails(program, Mesh(tp=3), RankError, r"rank 2 raised KeyError at test_\S+.py:\d+: 'lost my shard'")
    assert error.rank == 2 and isinstance(error.__cause__, KeyError)
    (note,) = error.__cause__.__notes__
    assert "Traceback of rank 2" in note and 'raise KeyError("lost my shard")' in note and "in program" in note
    assert capsys.readouterr().out.splitlines() == [f"[rank {rank}] before {rank}" for rank in range(3)]
    lives_on(Mesh(tp=3))


def test_all_ranks_raise():
    class Odd(Exception):
        def __init__(self, one, two):
            super().__init__(one)

    def program():
        raise Odd("this cannot be unpickled", 2)

    error = fails(program, Mesh(tp=3), RankError, r"rank 0 raised Odd at \S+: this cannot be unpickled")
    assert error.rank == 0 and "this cannot be unpickled" in str(error.__cause__)


def test_the_class_of_an_error_comes_back_with_its_file():
    class Told(Exception):
        def where(self):
            return sys._getframe().f_code.co_filename

    def program():
        raise Told("of a class that only this function has")

    error = fails(program, Mesh(tp=2), RankError, r"rank 0 raised Told at test_\S+.py:\d+: of a class").__cause__
    assert isinstance(error, Told) and error.where() == __file__


def test_an_error_of_ours_comes_as_itself():
    error = fails(lambda: all_reduce(torch.ones(1), "tp") and all_gather(torch.ones(()), "tp"), Mesh(tp=2), ShapeError)
    same = fails(lambda: all_gather(torch.ones(()), "tp"), Mesh(tp=2), ShapeError, on="simulated")
    assert str(error) == str(same)
    assert any(note.startswith("on rank 0 {'tp': 0} at test_processes_faults.py:") for note in error.__notes__)


def test_arguments_and_results_that_do_not_fit():
    pids = run(os.getpid, Mesh(tp=2), on="processes").per_rank
    with pytest.raises(ShapeError, match="dim 0 has size 3"):
        run(lambda x: x, Mesh(tp=2), torch.ones(3), in_specs=P("tp"), on="processes")
    with pytest.raises(SpecError, match="splits a int"):
        run(lambda x: x, Mesh(tp=2), 3, in_specs=P("tp"), on="processes")
    with pytest.raises(ReplicationError, match="ranks 0, 1 return the same"):
        run(lambda: torch.tensor([axis_index("tp") + 0.5]), Mesh(tp=2), out_specs=P(), on="processes")
    assert run(os.getpid, Mesh(tp=2), on="processes").per_rank == pids  # none of these is the processes' fault


def wrong_kind():
    if axis_index("tp") != 1:
        return all_reduce(torch.ones(3), "tp")
    return ring_shift(ring_shift(torch.ones(3), "tp"), "tp")


def wrong_shape():
    return all_reduce(torch.ones(3 + axis_index("tp")), "tp")


def wrong_dtype_of_large():
    return all_gather(torch.ones(LARGE, dtype=torch.float64 if axis_index("tp") else torch.float32), "tp")


def wrong_but_gone_on():
    """Rank 0 sends nothing and takes nothing: the others only notice that nothing comes."""
    if axis_index("tp") == 0:
        return ppermute(torch.ones(3), "tp", [])
    return all_reduce(torch.ones(3), "tp")


@pytest.mark.parametrize("program", [wrong_kind, wrong_shape, wrong_dtype_of_large, wrong_but_gone_on])
def test_collectives_that_do_not_match(program):
    error = fails(by_value(program), Mesh(tp=3), CollectiveMismatchError, "collective number 1 over axis 'tp'")
    same = fails(program, Mesh(tp=3), CollectiveMismatchError, on="simulated")
    lines = str(error).splitlines()
    assert len([line for line in lines if line.startswith("  rank ")]) == 2
    assert lines[0] == str(same).splitlines()[0] and lines[-1] == str(same).splitlines()[-1]
    assert "test_processes_faults.py:" in str(error)


def early():
    if axis_index("tp") == 1:
        return None
    return all_reduce(torch.ones(3), "tp")


def leaves_a_message():
    """Rank 1's process has nothing left to do but to wait until its message is taken."""
    if axis_index("tp") == 1:
        return send(torch.ones(LARGE), "tp", 0)
    return all_reduce(torch.ones(3), "tp")


def other_axes():
    return all_reduce(torch.ones(3), "dp" if axis_index("tp") == 0 else "tp")


def crossed():
    """Each rank of a square waits for the next one."""
    first, second = ("dp", "tp") if axis_index("dp") == axis_index("tp") else ("tp", "dp")
    return all_reduce(all_reduce(torch.ones(LARGE), first), second)


def leaves_one_behind():
    if axis_index("tp") == 1:
        ppermute(torch.ones(3), "tp", [(1, 0)])


SQUARE = Mesh(dp=2, tp=2)


@pytest.mark.parametrize(
    "program, mesh",
    [(early, Mesh(tp=3)), (leaves_a_message, Mesh(tp=3)), (other_axes, SQUARE), (crossed, SQUARE)],
)
def test_deadlocks(program, mesh):
    error = fails(by_value(program), mesh, DeadlockError, "no rank can go on")
    assert str(error) == str(fails(program, mesh, DeadlockError, on="simulated"))
    assert "at test_processes_faults.py:" in str(error)


def test_a_message_that_nobody_takes():
    error = fails(by_value(leaves_one_behind), Mesh(tp=3), CollectiveMismatchError, "ranks 0, 2 returned without")
    assert str(error) == str(fails(leaves_one_behind, Mesh(tp=3), CollectiveMismatchError, on="simulated"))
    lives_on(Mesh(tp=3))


def takes_fewer_rows_than_come():
    received = [1 + axis_index("tp"), 1 + 2 * axis_index("tp")]
    return all_to_all(torch.arange(4.0), "tp", sizes=[1, 3], received=received)


def takes_fewer_of_its_own_rows():
    received = [2 - (place == axis_index("tp")) for place in range(axis_size("tp"))]
    return all_to_all(torch.arange(2.0 * len(received)), "tp", sizes=[2 for _ in received], received=received)


@pytest.mark.parametrize("on", ["simulated", "processes"])
def test_rows_for_which_there_is_no_room(on):
    own, others = takes_fewer_of_its_own_rows, takes_fewer_rows_than_come
    for fn, ranks, lines in ((others, 2, 2), (own, 1, 1), (own, 2, 1)):
        program = by_value(fn) if on == "processes" else fn
        error = fails(program, Mesh(tp=ranks), CollectiveMismatchError, r"outputs of rank \d have sizes \[", on=on)
        assert str(error).count("test_processes_faults.py:") == lines


def by_value(fn):
    """The function as if it came from a notebook, so that new processes need not import this file."""
    return types.FunctionType(fn.__code__, {**fn.__globals__, "__name__": "__main__"}, fn.__name__)


def checked(step: int) -> None:
    if axis_index("tp") == 1 and step == 1:
        raise ValueError(f"loss is nan in step {step}")


def cleans_up_with_another_collective() -> None:
    try:
        for step in range(3):
            checked(step)
            all_reduce(torch.ones(7), "tp")
    finally:
        barrier()


def handles_it_while_another_rank_waits() -> None:
    for step in range(3):
        try:
            checked(step)
            if axis_index("tp") == 0 and step == 1:
                receive("tp", 1)
        except ValueError:
            all_reduce(torch.ones(2), "tp")


@pytest.mark.parametrize("on", ["simulated", "processes"])
@pytest.mark.parametrize("program", [cleans_up_with_another_collective, handles_it_while_another_rank_waits])
def test_what_a_rank_was_about_to_say_is_said_first(program: Callable[[], None], on: str):
    with pytest.raises(RankError) as caught:
        run(program, Mesh(tp=2), on=on)
    first, rest = str(caught.value).split("\n", 1)
    assert re.match(
        r"rank 1 raised ValueError at test_processes_faults.py:\d+: loss is nan in step 1, and calls \w+\(", first
    )
    assert (
        first.endswith("while handling it;") and caught.value.rank == 1 and rest.count("test_processes_faults.py:") == 2
    )
    if on == "simulated":
        assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize("on", ["simulated", "processes"])
def test_a_rank_that_raises_after_a_collective_in_its_finally_says_it_itself(on: str):
    """All of its ranks come to it, so nothing is wrong with the collective."""

    def program() -> None:
        try:
            checked(1)
        finally:
            barrier()

    with pytest.raises(RankError, match=rf"^rank 1 raised ValueError at {HERE}:\d+: loss is nan in step 1$"):
        run(program, Mesh(tp=2), on=on)


def test_slow_ranks_are_no_deadlock():
    def program():
        if axis_index("tp") == 0:
            time.sleep(1.5)  # seconds; longer than it takes to find a deadlock
        return all_reduce(torch.ones(2), "tp")

    assert run(program, Mesh(tp=2), on="processes").per_rank[1].tolist() == [2, 2]


@pytest.mark.parametrize(
    "end, match",
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), r"rank 1's process ended with signal 9 \(SIGKILL\)"),
        (lambda: ctypes.string_at(0), r"ended with signal 11 \(SIGSEGV\)(.|\n)*The last it said(.|\n)*in program"),
        (lambda: os._exit(3), "ended with exit status 3"),
    ],
    ids=["killed", "crashed", "left"],
)
def test_a_process_that_ends(end, match):
    def program():
        all_reduce(torch.ones(3), "tp")
        if axis_index("tp") == 1:
            end()
        return all_reduce(torch.ones(3), "tp")

    pids = run(os.getpid, Mesh(tp=2), on="processes").per_rank
    error = fails(program, Mesh(tp=2), RankError, match)
    assert error.rank == 1
    assert are_gone(pids, 0)  # not only the one
    lives_on(Mesh(tp=2))


def test_a_rank_that_is_lost_is_named_and_not_those_that_notice_first():
    """A process closes its connections one after another, so that others may have ended before its end is noticed."""

    def program():
        all_reduce(torch.ones(3), "tp")
        if axis_index("tp") == 1:
            for fd in map(int, os.listdir("/dev/fd")):
                with suppress(OSError), socket.socket(fileno=os.dup(fd)) as one:  # some are no sockets
                    if one.family == socket.AF_INET and one.getpeername():  # and some are not connected
                        one.shutdown(socket.SHUT_RDWR)
            time.sleep(0.5)  # seconds, in which rank 0 fails and ends
            os._exit(3)
        return all_reduce(torch.ones(3), "tp")

    for _ in range(3):
        error = fails(program, Mesh(tp=2), RankError, "rank 1's process ended with exit status 3")
        assert error.rank == 1


def test_a_process_that_ended_between_two_runs_is_replaced():
    pids = run(os.getpid, Mesh(tp=2), on="processes").per_rank
    os.kill(pids[0], signal.SIGKILL)
    assert are_gone(pids[:1], 60)
    assert not set(run(os.getpid, Mesh(tp=2), on="processes").per_rank) & set(pids)


def test_ctrl_c(tmp_path):
    pids = run(os.getpid, Mesh(tp=2), on="processes").per_rank
    asleep = tmp_path / "asleep"

    def sleep_on():
        asleep.touch()
        time.sleep(3600)  # far longer than a test may take

    def press_once_asleep():
        while not asleep.exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin deaf to it
    try:
        threading.Thread(target=press_once_asleep).start()
        with pytest.raises(KeyboardInterrupt):
            run(sleep_on, Mesh(tp=2), on="processes")
    finally:
        signal.signal(signal.SIGINT, before)
    assert are_gone(pids, 0)
    lives_on(Mesh(tp=2))


def test_processes_end_when_their_kernel_is_killed():
    script = textwrap.dedent("""
        import os, time
        from tplab import Mesh
        from tplab.torch import run
        print(*run(os.getpid, Mesh(tp=2), on="processes").per_rank, flush=True)
        run(lambda: time.sleep(600), Mesh(tp=2), on="processes")
    """)
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True) as kernel:
        assert kernel.stdout is not None
        pids = [int(pid) for pid in kernel.stdout.readline().split()]
        assert len(pids) == 2 and not are_gone(pids, 0)
        kernel.kill()
    assert are_gone(pids, 60)


def test_a_fork_of_the_kernel_leaves_its_processes_alone():
    script = textwrap.dedent("""
        import os
        from tplab import Mesh
        from tplab.torch import run
        from tplab.torch.processes import shut_down
        pids = run(os.getpid, Mesh(tp=2), on="processes").per_rank
        fork = os.fork()
        if fork == 0:
            shut_down()
            os._exit(0)
        os.waitpid(fork, 0)
        assert run(os.getpid, Mesh(tp=2), on="processes").per_rank == pids
    """)  # in a kernel of its own: JAX, which other tests of this process import, warns of every fork
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, timeout=60)


def are_gone(pids, within_seconds):
    """Whether none of these processes is left; one that has ended and was not asked after counts as gone."""
    deadline = time.monotonic() + within_seconds
    while any(_is_running(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state != "Z" or len(os.listdir(f"/proc/{pid}/task")) > 1  # threads that end after the main one
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_what_cannot_be_sent_is_named():
    lock = threading.Lock()

    def program():
        return lock

    with pytest.raises(TypeError, match=r"variable 'lock' cannot be sent(.|\n)*make it inside program"):
        run(program, Mesh(tp=2), on="processes")
    with pytest.raises(TypeError, match="argument 1 cannot be sent"):
        run(lambda a, b: None, Mesh(tp=2), 1, lock, on="processes")
    with pytest.raises(RankError, match=r"what rank 0 returned cannot be sent back.*generator"):
        run(lambda: (n for n in range(3)), Mesh(tp=2), on="processes")
