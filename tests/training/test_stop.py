"""Ctrl-C at awkward moments."""

import signal

from tplab.training.progress import Stop


class PressedMeanwhile(int):
    """A step at which somebody presses Ctrl-C while it is asked for."""

    def __gt__(self, other):
        signal.raise_signal(signal.SIGINT)
        return int(self) > other


def test_a_press_while_the_main_thread_asks():
    """The handler runs in the thread that asks, in the middle of it: it must not wait for what that thread holds."""
    with Stop() as stop:
        assert stop.may_begin(0)
        assert stop.may_begin(PressedMeanwhile(1))
        assert stop.is_asked
        assert stop.may_begin(1)  # another rank, of the step that has begun
        assert not stop.may_begin(2)


def test_all_ranks_stop_after_the_step_that_any_of_them_has_begun():
    stop = Stop()
    assert stop.may_begin(0) and stop.may_begin(1)
    stop.after_this_step()
    assert stop.may_begin(1)
    assert not stop.may_begin(2)
    stop.after_this_step()
    assert not stop.may_begin(2)
