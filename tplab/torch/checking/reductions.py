"""The all_reduces of a model: which ones a module calls, in which lines, and what they return where something else is
tried."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tplab.checking.tried import LEFT_OUT, SUMMED, Reduction
from tplab.torch.ranks.program import is_program
from tplab.torch.ranks.rank import Call, Pending, this_rank

SAME = 1e-4  # relative: what differs by more is not the same on every rank


class Reductions:
    """While it is open, it notes the all_reduces that this rank's program calls in lines of its own, and changes the
    result of one of them.

    found    each with its place in the order of calls
    change   which one to change, and how
    """

    def __init__(self, change: tuple[Reduction, str] | None = None):
        self.found: list[Reduction] = []
        self.change = change

    def __enter__(self) -> Reductions:
        self.rank: Any = this_rank()
        self._do, self._begin = self.rank.do, self.rank.begin
        self.rank.do, self.rank.begin = self.do, self.begin
        return self

    def __exit__(self, *_: Any) -> None:
        del self.rank.do, self.rank.begin

    def do(self, call: Call, x: Tensor, *more: Any) -> Tensor:
        how = self._noted(call)
        return self._do(call, x, *more) if how is None else self._changed(how, call, x)

    def begin(self, call: Call, x: Tensor) -> Pending:
        how = self._noted(call)
        return self._begin(call, x) if how is None else _Done(self._changed(how, call, x))

    def _noted(self, call: Call) -> str | None:
        """What to try on this call."""
        frame = self.rank.lines.frame()
        if call.op != "all_reduce" or not is_program(frame.f_code.co_filename):
            return None
        one = Reduction(call.reduction, call.place.label, self.rank.lines.text(frame))
        self.found.append(one)
        return self.change[1] if self.change is not None and self.change[0] == one else None

    def _changed(self, how: str, call: Call, x: Tensor) -> Tensor:
        rank, num_ranks = self.rank, len(call.place.group)
        total = self._do(rank.call("all_reduce", call.axis, ("sum",)), x)
        if how == SUMMED:
            return total
        if how != LEFT_OUT:
            return total * num_ranks
        gap = (total - num_ranks * x).abs().amax() if x.numel() else x.new_zeros(())
        gap = self._do(rank.call("all_reduce", call.axis, ("max",)), gap)
        return x.clone() if bool(gap <= SAME * total.abs().amax()) else torch.full_like(x, torch.nan)


class _Done(Pending):
    """A collective that is done."""

    __slots__ = ("result",)

    def __init__(self, result: Tensor):
        self.result = result

    def wait(self) -> Tensor:
        return self.result
