"""Ctrl-C while a model trains: the current step is finished, and what was trained is kept."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class Stop:
    """`with Stop() as stop:` Ctrl-C ends training after the current step; a second Ctrl-C ends it at once.

    All ranks that share it stop after the same step. Outside the main thread, it does not change Ctrl-C.
    """

    def __init__(self) -> None:
        self._begun = -1
        self._last: int | None = None  # the last step to run; decided when a rank next asks
        self._is_asked = False
        self._lock = threading.Lock()
        self._before: Any = None

    def may_begin(self, step: int) -> bool:
        """Whether a rank may begin this step; called once per step and rank."""
        with self._lock:
            if self._is_asked and self._last is None:
                self._last = self._begun
            if self._last is not None and step > self._last:
                return False
            self._begun = max(self._begun, step)
            return True

    def after_this_step(self) -> None:
        """Stop after the latest step that a rank has begun.

        A signal handler calls this in the middle of anything, even of `may_begin`, so it must not wait for a lock.
        """
        self._is_asked = True

    @property
    def is_asked(self) -> bool:
        return self._is_asked

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
