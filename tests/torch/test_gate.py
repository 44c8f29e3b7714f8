"""Another thread may raise an exception in this one while its gate is open, and not when it is closed."""

import cProfile
import threading

import pytest

from tplab.torch.ranks.gate import Gate


class Raised(BaseException):
    pass


def test_it_is_raised_while_the_gate_is_open_and_only_then():
    gate, steps, seen = Gate(), [threading.Event() for _ in range(4)], []

    def until_raised() -> None:
        try:
            gate.open()
            steps[1].set()
            while True:
                pass
        except Raised:
            seen.append("in the program")

    def work() -> None:
        steps[0].wait()  # until it was tried before the gate was open
        until_raised()
        gate.close()
        steps[2].set()
        steps[3].wait()  # until it was tried after that
        seen.append("to the end")

    thread = threading.Thread(target=work)
    thread.start()
    gate.raise_through(Raised)
    steps[0].set()
    steps[1].wait()
    gate.raise_through(Raised)
    steps[2].wait()
    gate.raise_through(Raised)
    steps[3].set()
    thread.join()
    assert seen == ["in the program", "to the end"]


def test_what_was_raised_comes_until_the_gate_is_closed_or_never():
    """Raised without pause while the gate is opened and closed: nothing comes in between two that follow it."""
    gate, is_over, missed = Gate(), threading.Event(), []

    def work() -> None:
        for _ in range(2000):
            try:
                gate.open()
                gate.close()
            except Raised:
                pass
            for _ in range(3):  # closed now for certain
                try:
                    gate.close()
                    break
                except Raised:
                    continue
            try:
                sum(range(50))
            except Raised:
                missed.append(True)
        is_over.set()

    thread = threading.Thread(target=work)
    thread.start()
    while not is_over.is_set() and thread.is_alive():
        gate.raise_through(Raised)
    thread.join()
    assert is_over.is_set() and not missed


@pytest.mark.parametrize("is_used", [False, True])
def test_a_closed_gate_leaves_nothing_that_a_profiled_thread_would_stumble_over(is_used):
    gate, is_open = Gate(), threading.Event()

    def work() -> None:
        try:
            gate.open()
            is_open.set()
            while is_used:
                pass
        except Raised:
            pass
        gate.close()

    def profiled() -> None:
        cProfile.Profile().runcall(lambda: [str(number) for number in range(10)])

    worker = threading.Thread(target=work)
    worker.start()
    is_open.wait()
    if is_used:
        gate.raise_through(Raised)
    worker.join()
    thread = threading.Thread(target=profiled, daemon=True)
    thread.start()
    thread.join(timeout=20)
    assert not thread.is_alive()
