"""A rank that is a process of its own: its collectives are exchanges of frames and tensors.

Over gloo every collective is built from pieces that ranks send each other, and sums are added up in the order of
positions, by the same function that simulated ranks use: the results are the same, bit for bit.

    all_reduce       small: each rank's x to every rank, and each rank adds all up
                     large: piece j to index j, which adds the pieces up and sends the sum to every rank;
                     2(R-1)/R of x is sent by each rank, as in a ring, in 2 rounds
    reduce_scatter   piece j to index j, which adds up       all_to_all   piece j to index j
    all_gather       x to every rank                         broadcast    the root's x to every rank

If a rank has its own GPU, its CUDA tensors go through NCCL's collectives instead (native.py), which add up in their own
order: results are equal up to rounding.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from torch import Tensor

from tplab.mesh import Mesh
from tplab.torch.private import no_dispatch
from tplab.torch.processes import waits
from tplab.torch.processes.exchange import Exchange, Tags
from tplab.torch.processes.frames import INLINE_UP_TO, Side, check_dense, side_of
from tplab.torch.processes.pending import Alone, Message, ProcessPending, Receipt, Together
from tplab.torch.processes.recorded import RecordedRank
from tplab.torch.processes.waits import Report, Wait
from tplab.torch.ranks.rank import Call, Pending
from tplab.trace.journal import Group


class ProcessRank(RecordedRank):
    """The rank whose program this process runs."""

    def __init__(self, rank: int, mesh: Mesh, exchange: Exchange, **options: Any):
        super().__init__(rank, mesh, exchange, **options)
        self._tags = Tags(mesh)
        self._begun: dict[Group, int] = {}
        self._last_sides: deque[tuple[Group, int, Side]] = deque(maxlen=waits.REMEMBERED)

    def report(self) -> Report:
        """What this rank has begun, and what it waits for. Another thread asks while the rank is waiting."""
        pending = self.waits_in
        wait = None if pending is None else Wait(pending.side, pending.group, pending.number, pending.missing)
        sides = {(group, number): side for group, number, side in list(self._last_sides)}
        return Report(self.rank, wait, dict(self._begun), sides)

    def begin(self, call: Call, x: Tensor) -> Pending:
        with no_dispatch():  # what follows is no operation of the program
            flies = call.op == "receive" or (x.nbytes > INLINE_UP_TO and call.op != "send")
            return self._begin(call, x, flies)

    def do(self, call: Call, x: Tensor) -> Tensor:
        with no_dispatch():
            return self._begin(call, x, False).wait()

    def _begin(self, call: Call, x: Tensor, flies: bool) -> ProcessPending:
        check_dense(call.op, x)
        now = self.catch_up()
        group = call.place.group
        number = self._begun.get(group, 0)
        side = side_of(call, x, self.rank, self.lines)
        self._begun[group] = number + 1
        self._last_sides.append((group, number, side))
        kind = Receipt if call.op == "receive" else Message if call.peers else Together
        if len(group) == 1 or call.peers == (self.rank, self.rank):
            kind = Alone
        elif self.native is not None and self.native.carries(call, x):
            kind = self.native.kind(call)
        pending = kind(self, call, side, number, self._tags.of(group, number), now)
        pending.depart(x)
        if flies:
            pending.fly()
        self.num_in_flight += call.op != "send"  # no rank waits for a send
        self.go_on()
        return pending
