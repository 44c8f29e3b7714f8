"""The exchange: frames and tensors between the processes of a run, through torch.distributed's gloo."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import permutations
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from tplab.errors import RankError
from tplab.mesh import Mesh
from tplab.torch.private import backend_of
from tplab.torch.processes import frames
from tplab.torch.processes.engine import POISON_TAG, Engine, break_off
from tplab.torch.processes.frames import Header, Side
from tplab.torch.ranks.rank import Apart

_UNWATCHED_SENDS = 512
Awaited = dict[int, tuple[Tensor, Any]]
"""Frames that have not arrived, by the ranks that send them: the memory for each, and what `wait` takes."""


class ConnectionLost(RankError):
    """Another rank's process is gone, or has closed its connections. The cause is to be found there."""


class Exchange:
    """Sends and receives for one process. Sending never waits.

    A tag distinguishes messages between two processes; messages with the same tag arrive in order. A frame precedes
    each tensor, so that the receiver need not know its shape, and each collective, so that ranks only enter one that is
    the same on all of them.

    engine   carries the tensors of collectives
    """

    def __init__(self, gloo: Any, rank: int, engine: Engine):
        self._gloo, self._rank, self.engine = gloo, rank, engine
        self._sends: deque[tuple[Any, Tensor]] = deque()  # in flight, with the memory that they read from

    def start(self, tag: int, outgoing: Mapping[int, Header], sources: Iterable[int]) -> Awaited:
        """Send a frame to each rank in `outgoing`; prepare to receive one from each of `sources`."""
        awaited: Awaited = {}
        for source in sources:
            frame = frames.empty_frame()
            awaited[source] = frame, self.receive(source, tag, frame)
        for target, header in outgoing.items():
            self.send(target, tag, frames.encode(header))
        return awaited

    def finish(self, awaited: Awaited, check: Callable[[Side], None]) -> dict[int, Header]:
        """Wait for all these frames, and return their headers by rank. `check` may refuse a side."""
        arrived = {}
        for source, (frame, work) in list(awaited.items()):
            self.wait(work)
            arrived[source] = frames.decode(frame)
            del awaited[source]
            check(arrived[source].side)
        return arrived

    def send(self, target: int, tag: int, data: Tensor) -> None:
        """Send bytes. They must not be written to until they have arrived."""
        with self.connected():
            self._sends.append((self._gloo.send([data], target, tag), data))
        if len(self._sends) > _UNWATCHED_SENDS:  # most have long arrived, but only a wait shows it
            batch = [self._sends.popleft() for _ in range(_UNWATCHED_SENDS // 2)]
            Thread(target=_wait_for_all, args=(batch,), daemon=True).start()

    def receive(self, source: int, tag: int, into: Tensor) -> Any:
        """Prepare to receive bytes from `source`. Returns an object for `wait`."""
        with self.connected():
            return self._gloo.recv([into], source, tag)

    def wait(self, work: Any) -> None:
        """Wait for what `receive` returned."""
        with self.connected():
            work.wait()

    def all_sent(self) -> None:
        """Wait until everything sent has arrived. For the end of a run in which everything was received."""
        while self._sends:
            self.wait(self._sends.popleft()[0])

    def break_off(self) -> None:
        """Close all connections, which releases ranks that wait here or for this one, with ConnectionLost."""
        break_off(self._gloo)
        self.engine.break_off()

    @contextmanager
    def connected(self) -> Iterator[None]:
        """A context in which an error of gloo is a ConnectionLost."""
        try:
            yield
        except RuntimeError as error:
            text = f"rank {self._rank} lost its connection to another rank ({_first_line(error)})"
            raise ConnectionLost(text, self._rank) from None


class Tags:
    """A tag for each collective, from its group and its number among the group's collectives.

    Every process numbers the groups in the same way, from the mesh alone.
    """

    def __init__(self, mesh: Mesh):
        groups: dict[tuple[int, ...], int] = {}
        for count in range(1, len(mesh.axis_names) + 1):
            for names in permutations(mesh.axis_names, count):
                for group in mesh.groups(names):
                    groups.setdefault(group, len(groups))
        for pair in permutations(mesh.ranks, 2):
            groups[Apart(pair)] = len(groups)
        self._groups = groups
        self._window = (POISON_TAG - 1) // len(groups)

    def of(self, group: tuple[int, ...], number: int) -> int:
        return self._groups[group] * self._window + number % self._window


def gloo_of(group: Any) -> Any:
    """The gloo backend of a torch.distributed group, which sends and receives without the group's checks."""
    return backend_of(group, torch.device("cpu"))


def _wait_for_all(batch: list[tuple[Any, Tensor]]) -> None:
    with suppress(RuntimeError):  # the connection is gone; the rank itself will notice
        for work, _ in batch:
            work.wait()


def _first_line(error: BaseException) -> str:
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return text.rsplit("] ", 1)[-1].split(". This is typically", 1)[0]
