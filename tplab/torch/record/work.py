"""A watched work: the real one of a started collective, with a look at the clock before and after each wait."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from tplab.torch.private import c10d_C, graph_task
from tplab.torch.record.listener import Heard
from tplab.torch.record.notes import Notes
from tplab.trace.recorded.rank_file import ANY


class Watched(c10d_C.Work):
    """What the program waits for. The real work does everything, and also raises the errors."""

    def __init__(self, notes: Notes, begun: list[tuple[int, Heard]], work: Any, rank_at: Callable[[int], int]):
        super().__init__()
        self._notes, self._begun, self._work, self._rank_at = notes, begun, work, rank_at
        first = begun[0][1]
        self._gpu = first.gpu
        self._tells_its_end = False
        if first.is_async and (first.gpu is not None or first.peer is None):
            with suppress(RuntimeError, NotImplementedError):  # not every backend has futures
                work.get_future().add_done_callback(self._done)
                self._tells_its_end = True

    def _done(self, future: Any) -> None:
        """Called when it is done, by the thread that did it."""
        with suppress(Exception):
            future.value()  # raises if it failed
            self._notes.end(self._begun)

    def wait(self, *args: Any, **kwargs: Any) -> bool:
        start = self._notes.now(self._gpu)
        result = self._work.wait(*args, **kwargs)
        self._note_source()
        self._notes.waited(self._begun, start)
        return result

    def synchronize(self) -> None:
        start = self._notes.now(self._gpu)
        self._work.synchronize()
        self._notes.waited(self._begun, start)

    def is_completed(self) -> bool:
        is_completed = self._work.is_completed()
        if is_completed and not self._tells_its_end:
            self._note_source()
            self._notes.end(self._begun)
        return is_completed

    def get_future(self) -> Any:
        """The real future. DistributedDataParallel waits for it in C++, at the end of the backward pass."""
        future = self._work.get_future()
        if graph_task() != -1 and self._gpu is None:
            self._notes.watch_backward(self._begun, future)
        return future

    def _note_source(self) -> None:
        """Note which rank sent a message that was accepted from any rank."""
        if self._begun[0][1].peer == ANY:
            with suppress(RuntimeError):
                self._notes.came_from(self._begun[0][0], self._rank_at(self._work._source_rank()))

    # --- as it is ------------------------------------------------------------------------------------------------

    def block_current_stream(self) -> None:
        self._work.block_current_stream()

    def is_success(self) -> bool:
        return self._work.is_success()

    def exception(self) -> Any:
        return self._work.exception()

    def source_rank(self) -> int:
        return self._work.source_rank()

    def _source_rank(self) -> int:
        return self._work._source_rank()

    def result(self) -> Any:
        return self._work.result()

    def get_future_result(self) -> Any:
        return self._work.get_future_result()

    def _get_duration(self) -> float:
        return self._work._get_duration()

    def _get_op_type(self) -> Any:
        return self._work._get_op_type()

    def boxed(self) -> Any:
        return self._work.boxed()
