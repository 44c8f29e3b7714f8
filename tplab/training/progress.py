"""Progress reports, the result of training, and Ctrl-C while a model trains."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple


class Progress(NamedTuple):
    """The report after a step.

    step, steps     steps done, and steps in total
    loss            of the step's batch, before its update
    held_out        loss on held-out text after the update; None if it was not computed
    gradient_norm   before clipping
    seconds_left    how long the rest will take at this speed; None for the first step
    """

    step: int
    steps: int
    loss: float
    held_out: float | None
    gradient_norm: float
    seconds_left: float | None

    def __str__(self) -> str:
        held_out = "" if self.held_out is None else f", held out {self.held_out:.4f}"
        return f"step {self.step} of {self.steps}: loss {self.loss:.4f}{held_out}"


Show = Callable[[Progress], None]
"""Called after every step: a `LossCurve`, a `PlainLine`, or your own function."""


class PlainLine:
    """Prints a line now and then: about ten in total, and whenever there is a loss on held-out text.

    It decides where to print when it is created, because output of a simulated rank only appears when the run is over.
    """

    def __init__(self) -> None:
        self._stream = sys.stdout

    def __call__(self, progress: Progress) -> None:
        every = max(1, progress.steps // 10)
        if progress.step in (1, progress.steps) or progress.step % every == 0 or progress.held_out is not None:
            left = progress.seconds_left or 0
            ends = f", {left:.0f} s left" if left < 90 else f", {left / 60:.0f} min left"
            print(f"{progress}{ends if left else ''}", file=self._stream, flush=True)


class Clock:
    """Estimates how long the rest will take from the time since the first step, which compiles or warms up."""

    def __init__(self, first: int, steps: int):
        self._first, self._steps, self._since = first, steps, 0.0

    def left(self, done: int) -> float | None:
        """Seconds left after `done` steps; None after the first one."""
        if done == self._first + 1:
            self._since = time.perf_counter()
            return None
        return (time.perf_counter() - self._since) / (done - self._first - 1) * (self._steps - done)


@dataclass
class Trained:
    """The result of `train`.

    state      of the whole GPT: name -> NumPy array, as `split_state` and `save_state` expect it
    losses     of every step of this call, starting with step `first`
    held_out   steps done -> loss on held-out text
    """

    state: dict[str, Any]
    losses: list[float]
    first: int = 0
    held_out: dict[int, float] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """Steps done, including those of earlier calls."""
        return self.first + len(self.losses)

    def __repr__(self) -> str:
        return f"Trained for {self.steps} steps" + (f", to a loss of {self.losses[-1]:.4f}" if self.losses else "")


class Stop:
    """`with Stop() as stop:` Ctrl-C ends training after the current step; a second Ctrl-C ends it at once.

    All ranks that share it stop after the same step. Outside the main thread, it does not change Ctrl-C.
    """

    def __init__(self) -> None:
        self._begun = -1
        self._last: int | None = None  # the last step to run; decided when a rank next asks
        self.is_asked = False
        self._lock = threading.Lock()
        self._before: Any = None

    def may_begin(self, step: int) -> bool:
        """Whether a rank may begin this step; called once per step and rank."""
        with self._lock:
            if self.is_asked and self._last is None:
                self._last = self._begun
            if self._last is not None and step > self._last:
                return False
            self._begun = max(self._begun, step)
            return True

    def after_this_step(self) -> None:
        """Stop after the latest step that a rank has begun.

        A signal handler calls this in the middle of anything, even of `may_begin`, so it must not wait for a lock.
        """
        self.is_asked = True

    def _pressed(self, number: int, frame: FrameType | None) -> None:
        if self.is_asked:
            raise KeyboardInterrupt
        self.after_this_step()

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._pressed)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
