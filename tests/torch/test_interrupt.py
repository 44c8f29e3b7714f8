"""Ctrl-C ends all ranks, whatever they are doing; the kernel lives on and no thread is left."""

import signal
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT to itself")

SCRIPT = """
import os, signal, sys, threading, time, weakref
import torch
from tplab import Mesh
from tplab.torch import all_reduce, axis_index, barrier, ring_shift, run, start

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin deaf to it

def press(after):
    '''Ctrl-C, so many seconds from now.'''
    def pressing():
        time.sleep(after)
        os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=pressing).start()

def python_loop():
    k = 0
    while True:
        k += 1

def loop_of_collectives():
    x = torch.ones(4)
    while True:
        x = ring_shift(x, "tp") / 2

def loop_of_sums():
    while True:
        all_reduce(torch.ones(2, requires_grad=True), "tp").sum().backward()

def loop_that_swallows_exceptions():
    while True:
        try:
            ring_shift(torch.ones(4), "tp")
        except Exception:
            pass

def one_loops_while_the_others_wait():
    if axis_index("tp") == 2:
        python_loop()
    barrier()

def in_short_tensor_operations():
    x = torch.randn(200, 200)
    while True:
        x = (x @ x).tanh()

def in_a_run_inside_a_rank():
    if axis_index("tp") == 1:
        run(loop_of_collectives, Mesh(tp=3))
    barrier()

def in_a_loop_of_a_run_inside_a_rank():
    if axis_index("tp") == 1:
        run(python_loop, Mesh(tp=3))
    barrier()

def in_runs_inside_all_ranks():
    while True:
        run(lambda: all_reduce(torch.ones(1), "q"), Mesh(q=3))
        barrier()

class Something:
    pass

def in_callbacks_that_swallow_exceptions():
    while True:  # whatever is raised while a WeakSet drops what has gone, Python prints and forgets
        for something in [Something() for _ in range(1000)]:
            many.add(something)
            something = None

many = weakref.WeakSet()
gate = threading.Lock()
gate.acquire()

def waits_for_something_else():
    with gate:  # no exception reaches a thread that waits for a lock
        pass

before = torch.get_rng_state()
torch.manual_seed(5)
state = torch.get_rng_state()
pressed = 0
for program, left_behind in PROGRAMS:
    pressed += 1
    try:
        press(0.3 + 0.01 * pressed)
        run(program, Mesh(tp=4))
    except KeyboardInterrupt as interrupt:
        notes = getattr(interrupt, "__notes__", [])
    assert left_behind == bool(notes), (program.__name__, notes)
    assert torch.equal(torch.get_rng_state(), state)
    assert sys.stdout is sys.__stdout__
    # the kernel lives on, at once
    assert run(lambda: all_reduce(torch.ones(1), "tp").item(), Mesh(tp=4)).per_rank == [4.0] * 4
    if left_behind:
        gate.release()
    deadline = time.monotonic() + 30
    while threading.active_count() > 1 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threading.active_count() == 1, threading.enumerate()
    print(program.__name__, flush=True)
"""


def interrupted(*names: str, left_behind: bool = False) -> None:
    programs = "[" + ", ".join(f"({name}, {left_behind})" for name in names) + "]"
    out = subprocess.run(
        [sys.executable, "-c", SCRIPT.replace("PROGRAMS", programs)],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert out.returncode == 0, out.stderr
    assert out.stdout.split() == list(names)
    assert not out.stderr


def test_ctrl_c_ends_ranks_that_compute_talk_or_wait():
    interrupted(
        "python_loop",
        "loop_of_collectives",
        "loop_of_sums",
        "loop_that_swallows_exceptions",
        "one_loops_while_the_others_wait",
        "in_short_tensor_operations",
        *["in_callbacks_that_swallow_exceptions"] * 6,
        "in_a_run_inside_a_rank",
        "in_a_loop_of_a_run_inside_a_rank",
        *["in_runs_inside_all_ranks"] * 6,
    )


def test_ctrl_c_leaves_a_rank_behind_that_cannot_be_interrupted_and_says_so():
    interrupted("waits_for_something_else", left_behind=True)


def test_ctrl_c_at_any_moment():
    """Many times, each a little later: while threads are started, while turns change, while results are taken in."""
    script = """
    import signal, sys, threading, time
    import torch
    from tplab import Mesh
    from tplab.torch import all_reduce, run

    def program():
        for _ in range(6):
            all_reduce(torch.ones(2), "tp")

    run(program, Mesh(tp=3))
    finished = interrupted = 0
    for k in range(80):
        signal.setitimer(signal.ITIMER_REAL, 0.0002 + 0.0001 * k)
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        try:
            try:
                run(program, Mesh(tp=3))
                finished += 1
            finally:
                signal.signal(signal.SIGALRM, signal.SIG_IGN)
        except KeyboardInterrupt:
            interrupted += 1
        signal.setitimer(signal.ITIMER_REAL, 0)
        assert sys.stdout is sys.__stdout__
    deadline = time.monotonic() + 30
    def ranks():
        return [thread for thread in threading.enumerate() if thread.is_alive() and thread.name.startswith("rank")]
    while ranks() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not ranks()
    assert run(lambda: all_reduce(torch.ones(1), "tp").item(), Mesh(tp=3)).per_rank == [3.0] * 3
    print(finished, interrupted)
    """
    out = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=110, check=False
    )
    assert out.returncode == 0, out.stderr
    finished, interrupted = map(int, out.stdout.split())
    assert finished + interrupted >= 80  # one that has finished may be interrupted on the next line, and counts twice
    assert interrupted >= 5
    assert signal.getsignal(signal.SIGINT) is not None


def test_ctrl_c_while_another_run_has_the_floor():
    """It comes out of the run that waits, at once, and the other one goes on."""
    script = """
    import os, signal, threading, time
    import torch
    from tplab import Mesh
    from tplab.torch import barrier, run

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin deaf to it
    asleep, wake, found = threading.Event(), threading.Event(), []

    def sleeper():
        asleep.set()
        wake.wait()
        barrier()
        return "woken"

    def press():
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)

    other = threading.Thread(target=lambda: found.extend(run(sleeper, Mesh(tp=2)).per_rank))
    other.start()
    asleep.wait()
    threading.Thread(target=press).start()
    try:
        run(barrier, Mesh(tp=2))
    except KeyboardInterrupt:
        wake.set()
    other.join()
    print(*found, *run(lambda: "next", Mesh(tp=2)).per_rank)
    """
    out = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60, check=False
    )
    assert out.stdout.split() == ["woken", "woken", "next", "next"], out.stderr
    assert not out.stderr


def test_ctrl_c_while_threading_holds_its_own_lock(monkeypatch):
    """There it comes out of Thread.start as an error of the lock, and the interrupt is only what it happened beside."""
    import threading

    import torch

    from tplab import Mesh
    from tplab.torch import all_reduce, run

    begin = threading.Thread.start

    def interrupted(thread):
        begin(thread)
        if thread.name == "rank 1":
            try:
                raise KeyboardInterrupt
            finally:
                threading.Lock().release()

    def program():
        return all_reduce(torch.ones(1), "tp").item()

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(program, Mesh(tp=3))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rank ")]
    assert run(program, Mesh(tp=3)).per_rank == [3.0] * 3
