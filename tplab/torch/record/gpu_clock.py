"""The clock of a GPU's work, which runs behind the program."""

from __future__ import annotations

import time
from typing import Any

import torch

from tplab.trace.recorded.rank_file import Later

COMPARE_EVERY = 10.0
"""Seconds between two comparisons with the machine's clock: events tell of a span in milliseconds of 24 bits."""


class GpuClock:
    """Times on the current stream of one GPU, in seconds of the machine's clock.

    An event is put into the stream where the time is asked for, and read when the GPU has reached it. Now and then we
    wait for an event on a separate stream that has nothing else to do: at that moment both clocks show the same.
    """

    def __init__(self, gpu: int) -> None:
        self._gpu = gpu
        self._stream = torch.cuda.Stream(gpu)
        self._compare()

    def _compare(self) -> None:
        with torch.cuda.device(self._gpu):
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(self._stream)
            self._event.synchronize()
            self._time = time.perf_counter()

    def now(self) -> float | Later:
        with torch.cuda.device(self._gpu):
            if torch.cuda.is_current_stream_capturing():  # a CUDA graph: nothing happens now
                return time.perf_counter()
            if time.perf_counter() - self._time > COMPARE_EVERY:
                self._compare()
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return _Moment(self._event, self._time, event)


class _Moment(Later):
    """The time when the GPU reaches an event."""

    def __init__(self, origin: Any, time: float, event: Any):
        self._origin, self._time, self._event = origin, time, event

    def seconds(self) -> float | None:
        return self._time + self._origin.elapsed_time(self._event) / 1e3 if self._event.query() else None
