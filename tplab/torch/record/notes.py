"""The notes of one rank: the events of its process groups, as lines of its file."""

from __future__ import annotations

import os
import platform
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from tplab.torch.private import at_end_of_backward, graph_task, phase
from tplab.torch.ranks.rank import Lines
from tplab.torch.record.listener import Heard
from tplab.trace.recorded.rank_file import About, Later, Writer

SECONDS_TO_END = 1.0
"""How long the end of the process waits for collectives that the program has started and never waited for."""

Begun = Sequence[tuple[int, Heard]]
"""Operations, each with its number in this rank's file."""


class Notes:
    """The notes of one process. Its file begins when the process has joined the others."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._lines = _Lines()
        self._numbers = count()
        self._num_worlds = 0
        self._names: Counter[tuple[int, str]] = Counter()
        self._open: set[int] = set()  # begun, but not ended
        self._going: set[int] = set()  # those of them that end by themselves
        self._in_backward: dict[int, list[tuple[Begun, Any]]] = {}  # backward pass -> what it began, and its future
        self._ends: dict[int, float] = {}  # of what was started in a backward pass
        self._writer: Writer | None = None
        self._gpus: dict[int, GpuClock] = {}

    def close(self) -> None:
        """Write what is left. Nothing is noted afterwards."""
        deadline = time.monotonic() + SECONDS_TO_END
        while self._going and time.monotonic() < deadline:
            time.sleep(0.01)
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close(time.perf_counter(), deadline - time.monotonic())

    # --- events of a group -----------------------------------------------------------------------------------------

    def joined(self, store: Any, rank: int, size: int, is_world: bool) -> None:
        """Note a new group. The first one has all ranks, also after `destroy_process_group()`."""
        self._num_worlds += is_world
        if self._writer is None:
            title = Path(sys.argv[0]).stem if sys.argv and sys.argv[0] else ""
            about = About(rank, size, _run_of(store), _machine(), platform.node(), title, time.perf_counter())
            self._writer = Writer(self.folder / f"rank{rank}.jsonl", about)

    def id_of_new(self, name: str) -> str:
        """A new group's name in the file: the same on all of its ranks, and different from every other group's.

        torch reuses names. After `destroy_process_group()` it counts from 0 again, and a group that is made with
        use_local_synchronization=True is named after its ranks.
        """
        self._names[self._num_worlds, name] += 1
        return f"{self._num_worlds}:{name}:{self._names[self._num_worlds, name]}"

    def meet(self, group: str, description: str, ranks: Sequence[int]) -> None:
        self._note("group", group, description, ranks)

    def begin(self, group: str, heard: Heard) -> int:
        number = next(self._numbers)
        self._open.add(number)
        if heard.is_async and heard.peer is None:
            self._going.add(number)
        self._note(
            "begin",
            number,
            heard.op,
            group,
            time.perf_counter(),
            heard.num_bytes,
            heard.shape,
            heard.dtype,
            self._lines.here(),
            phase(),
            heard.reduction,
            heard.peer,
            heard.tag,
        )
        if heard.gpu is not None:
            self._note("start", number, self.now(heard.gpu))
        return number

    def drop(self, begun: Begun) -> None:
        """Drop operations that were refused."""
        for number, _ in begun:
            self._open.discard(number)
            self._going.discard(number)
            self._note("drop", number)

    def end(self, begun: Begun, at: float | Later | None = None) -> None:
        """Note that operations are done. Only the first note counts."""
        at = self.now(begun[0][1].gpu) if at is None else at
        for number, _ in begun:
            if number in self._open:
                self._open.discard(number)
                self._going.discard(number)
                if number in self._ends and isinstance(at, float):
                    self._ends[number] = at
                self._note("end", number, at)

    def waited(self, begun: Begun, start: float | Later) -> None:
        """Note that the rank waited from `start` until now, and that these operations are done."""
        now = self.now(begun[0][1].gpu)
        self._note("wait", begun[-1][0], start, now, self._lines.here())
        self.end(begun, now)

    def came_from(self, number: int, rank: int) -> None:
        self._note("from", number, rank)

    def now(self, gpu: int | None = None) -> float | Later:
        """The current time; for a GPU's work, the time when the GPU gets here."""
        if gpu is None:
            return time.perf_counter()
        if gpu not in self._gpus:
            self._gpus[gpu] = GpuClock(gpu)
        return self._gpus[gpu].now()

    # --- backward passes -------------------------------------------------------------------------------------------

    def watch_backward(self, begun: Begun, future: Any) -> None:
        """Follow operations that torch's C++ code will wait for at the end of the backward pass, unseen by Python.

        A callback queued now is called just before that wait, and one queued by that callback after it. If all
        operations are done by then, the rank has waited until the last of them was. A future wakes its waiters before
        it calls back: an operation that is done without having called back ends now.
        """
        task = graph_task()
        self._ends.update((number, 0.0) for number, _ in begun)
        if task in self._in_backward:
            self._in_backward[task].append((begun, future))
            return
        waited_for = self._in_backward[task] = [(begun, future)]
        where = self._lines.here()

        def before() -> None:
            start = time.perf_counter()
            at_end_of_backward(lambda: after(start))

        def after(start: float) -> None:
            del self._in_backward[task]
            for begun, future in waited_for:
                if future.done():
                    self.end(begun)
            numbers = [number for begun, _ in waited_for for number, _ in begun]
            ends = {number: self._ends.pop(number) for number in numbers if number in self._ends}
            if ends and not self._open.intersection(numbers):
                last = max(ends, key=ends.__getitem__)
                if start < ends[last]:
                    self._note("wait", last, start, min(ends[last], time.perf_counter()), where)

        at_end_of_backward(before)

    def _note(self, *fields: Any) -> None:
        if self._writer is not None:
            self._writer.note(*fields)


class _Lines(Lines):
    """Lines of the program. Autograd's GPU threads run none; for them it is the line that waits for them."""

    def frame(self) -> FrameType:
        if threading.current_thread() is threading.main_thread():
            return super().frame()
        main = sys._current_frames().get(threading.main_thread().ident or 0)
        return self.program_frame(main) or super().frame()


def _run_of(store: Any) -> str:
    """A name for this run, the same on all ranks: the first rank to arrive chooses it."""
    try:
        return store.compare_set("tplab/record", "", uuid.uuid4().hex).decode()
    except Exception:  # a store that cannot do it: then use torchrun's own name, if any
        return os.environ.get("TORCHELASTIC_RUN_ID", "")


def _machine() -> str:
    """An identifier of the clock that ranks share: one boot of one machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"{platform.node()} {uuid.getnode()}"


# --- the clock of a GPU, which runs behind the program ----------------------------------------------------------------


COMPARE_EVERY = 10.0
"""Seconds between two comparisons with the machine's clock: events measure spans in milliseconds of 24 bits."""


class GpuClock:
    """Times on the current stream of one GPU, in seconds of the machine's clock.

    An event is put into the stream when the time is asked for, and read when the GPU has reached it. From time to time
    we wait for an event on a separate stream that has no other work: at that moment both clocks show the same.
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
