"""A rank that is a process of its own: torch.distributed carries its tensors, preceded by frames.

Before a collective, each rank tells the others of its group in a frame over gloo which one it calls, with what tensor
and on which line. So a mismatch is an error with the lines, and never a sum of tensors that do not belong together.
Then gloo's own collective carries the tensors; between GPUs, NCCL's. A message (ppermute, ring_shift, send, receive)
follows its frame.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import Event, Thread
from typing import Any

from torch import Tensor

from tplab.errors import TplabError
from tplab.mesh import Mesh
from tplab.torch.private import no_dispatch
from tplab.torch.processes import waits
from tplab.torch.processes.exchange import Exchange, Tags
from tplab.torch.processes.frames import Side, side_of
from tplab.torch.processes.pending import Alone, Message, ProcessPending, Together
from tplab.torch.processes.recorded import RecordedRank
from tplab.torch.processes.waits import Report, Wait, verdict
from tplab.torch.ranks.rank import Call, Pending
from tplab.trace.journal import Group


class ProcessRank(RecordedRank):
    """The rank whose program this process runs."""

    def __init__(self, rank: int, mesh: Mesh, exchange: Exchange, **options: Any):
        super().__init__(rank, mesh, exchange, **options)
        self._tags = Tags(mesh)
        self._over: dict[Group, Event] = {}  # for each group, set when its last started collective is over
        self._begun: dict[Group, int] = {}
        self._last_sides: deque[tuple[Group, int, Side]] = deque(maxlen=waits.REMEMBERED)

    def report(self) -> Report:
        """What this rank has started, and what it waits for. Another thread calls this while the rank is waiting."""
        pending = self.waits_in
        wait = None if pending is None else Wait(pending.side, pending.group, pending.number, pending.missing)
        sides = {(group, number): side for group, number, side in list(self._last_sides)}
        return Report(self.rank, wait, dict(self._begun), sides)

    def begin(self, call: Call, x: Tensor) -> Pending:
        with no_dispatch():  # what follows is not an operation of the program
            pending = self._begun_as(call, x)
            if call.op != "send":  # no rank waits for a send
                pending.fly()
                self.num_in_flight += 1
            return pending

    def do(self, call: Call, x: Tensor) -> Tensor:
        with no_dispatch():
            pending = self._begun_as(call, x)
            self.num_in_flight += 1
            return pending.wait()

    def _begun_as(self, call: Call, x: Tensor) -> ProcessPending:
        now = self.catch_up()
        group = call.place.group
        number = self._begun.get(group, 0)
        side = side_of(call, x, self.rank, self.lines, self.written(self.lines.here()))
        self._begun[group] = number + 1
        self._last_sides.append((group, number, side))
        kind = Message if call.peers else Together
        if call.peers == (self.rank, self.rank) or (len(group) == 1 and kind is Together):
            kind = Alone
        pending = kind(self, call, side, number, self._tags.of(group, number), now)
        between_gpus = kind is Message and x.is_cuda and self.engine.carries(call, x)
        if kind is Together or between_gpus:  # the engine needs the same order on every rank
            pending.before, self._over[group] = self._over.get(group), pending.over
        pending.depart(x)
        self.go_on()
        return pending


# --- a rank that is stuck ---------------------------------------------------------------------------------------------


LOOK_EVERY = 0.25
"""Seconds between two looks. A rank that is in the same wait at two looks reports it."""


class Watch:
    """Watches one rank of one run until `close`. A rank that is stuck posts in the store what it waits for; if no rank
    can go on, the run ends.

    store       of this run alone, where ranks read each other's reports
    break_off   called once it is certain that no rank can go on, with the reason in the rank's verdict: it closes the
                connections that the rank waits on, so that its program wakes up
    """

    def __init__(self, rank: ProcessRank, store: Any, break_off: Callable[[], None]):
        self._rank, self._store, self._break_off = rank, store, break_off
        self._is_over = Event()
        self._thread = Thread(target=self._look, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()

    def _look(self) -> None:
        seen = posted = None
        while not self._is_over.wait(LOOK_EVERY):
            waits_in = "the others, at its end" if self._rank.has_returned else self._rank.waits_in
            if waits_in is not None and waits_in is seen:
                if waits_in is not posted:
                    self._store.set(str(self._rank.rank), self._rank.report().to_text())
                    posted = waits_in
                if not self._rank.has_returned and (error := self._judged(self._rank.mesh)):  # else one that waits will
                    self._rank.verdict = error
                    self._break_off()
                    return
            seen = waits_in

    def _judged(self, mesh: Mesh) -> TplabError | None:
        reports = {
            rank: Report.from_text(self._store.get(str(rank))) for rank in mesh.ranks if self._store.check([str(rank)])
        }
        return verdict(reports, mesh)
