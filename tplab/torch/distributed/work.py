"""What torch.distributed returns for a started collective, for the program to wait on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tplab.torch.private import at_end_of_backward, c10d_C, graph_task, no_dispatch
from tplab.torch.ranks.simulated import SimulatedRank
from tplab.torch.ranks.watches import OF_THREADS

Future = torch.futures.Future
_PATIENCE = 100  # questions


class Work(c10d_C.Work):
    """A request to a process group, with the tensors that get its results. Here it is completed."""

    def __init__(self, *results: Tensor):
        super().__init__()
        self._results = results

    def wait(self, timeout: Any = None) -> bool:
        return True

    def synchronize(self) -> None:
        self.wait()

    block_current_stream = synchronize

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return self.is_completed()

    def exception(self) -> None:
        return None

    def source_rank(self) -> int:
        return self._source_rank()

    def _source_rank(self) -> int:
        raise RuntimeError("only a message that was received has a source rank")

    def result(self) -> list[Tensor]:
        self.wait()
        return [*self._results]

    def get_future(self) -> Future[Any]:
        return _done(self.result())


class Taken(Work):
    """Completed work whose results have been written. DistributedDataParallel reads those of sparse gradients."""


class Started(Work):
    """A collective or a message in flight.

    x       what is sent
    take    writes the result where the program wants it; None for a message sent
    into    the tensors that get the result
    queue   what its group has started but not yet waited for, oldest first
    is_done whether the program has the result
    """

    def __init__(
        self,
        member: SimulatedRank,
        pending: Any,
        x: Tensor,
        take: Callable[[Tensor], None] | None,
        into: Sequence[Tensor],
        source: int = -1,
        queue: deque[Started] | None = None,
    ):
        super().__init__(*into)
        self._member, self._queue = member, queue
        if queue is not None:
            queue.append(self)
        self._pending, self._x, self._take, self._source = pending, x, take, source
        self.is_done = self._is_finishing = False
        self._has_data = False
        self._num_asked = 0

    def wait(self, timeout: Any = None) -> bool:
        """Finish first what the group had started before this, so that results arrive in order."""
        queue = self._queue
        while queue and not self.is_done:
            queue.popleft()._finish()
        self._finish()
        return True

    def _finish(self) -> None:
        """Wait until it has arrived, also on the rank's clock."""
        if self.is_done:
            return
        if self._is_finishing:  # another thread of the rank waits for it
            self._member.here().wait_until(lambda: self.is_done, "wait", None, OF_THREADS)
            return
        self._is_finishing = True
        if self._take is None:  # a message sent: the receiver must be ready to take it
            self._member.here().await_receiver(self._pending)
        else:
            self._write(self._pending.read())
        self.is_done = True

    def _write(self, y: Tensor) -> None:
        if not self._has_data:
            self._has_data = True
            assert self._take is not None
            with on_one_stream(self._member, self._x), no_dispatch():  # not an operation of the program
                self._take(y)

    def is_completed(self) -> bool:
        """Whether it is done. Repeated calls let other ranks continue in between, and finally wait: a loop that asks
        forever would hide a deadlock."""
        self._num_asked += 1
        if not self.is_done and (self._num_asked > _PATIENCE or self._member.here().has_come(self._pending)):
            self.wait()
        return self.is_done

    def _source_rank(self) -> int:
        return self._source

    def get_future(self) -> Future[Any]:
        """A completed future with the result. torch's C++ code waits for futures where no other rank could take its
        turn, so the data is fetched now. In a backward pass the rank's clock continues: it waits at the end of the
        pass, where DistributedDataParallel waits for its buckets."""
        if self.is_done or graph_task() == -1 or self._take is None:
            self.wait()
        else:
            self._write(self._member.here().fetch(self._pending))
            at_end_of_backward(self.wait)
        return _done([*self._results])


class Several(Work):
    """Several collectives of one group as one. Waiting for the last one waits for all before it."""

    def __init__(self, works: Sequence[Work]):
        super().__init__(*(x for work in works for x in work._results))
        self.last = works[-1]

    def wait(self, timeout: Any = None) -> bool:
        return self.last.wait()

    def is_completed(self) -> bool:
        return self.last.is_completed()


def _done(result: list[Tensor]) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future


# --- streams ----------------------------------------------------------------------------------------------------------


@contextmanager
def on_one_stream(member: SimulatedRank, x: Tensor) -> Iterator[None]:
    """A context in which work on x's GPU is queued on the stream that all ranks share: another rank reads what this one
    sends, and a GPU runs the work of two streams in any order. The shared stream first waits for the rank's own stream,
    which then waits for the shared one."""
    if not x.is_cuda:
        yield
        return
    mine, shared = torch.cuda.current_stream(x.device), member.world.stream
    if shared is None or shared.device != x.device:
        shared = torch.cuda.default_stream(x.device)
    if mine == shared:
        yield
        return
    shared.wait_stream(mine)
    with torch.cuda.stream(shared):
        yield
    mine.wait_stream(shared)
