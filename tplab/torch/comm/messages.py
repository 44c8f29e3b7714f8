"""Messages from one rank to another. Only these two take part, and sending never waits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tplab.comm import position_of
from tplab.errors import MeshError
from tplab.mesh import Axis
from tplab.torch.ranks.outcomes import check_tensor
from tplab.torch.ranks.rank import Call, Pending, this_rank

Payload = Tensor | tuple[Tensor, ...]


def send(x: Payload, axis: Axis, target: int) -> None:
    """Send x, a tensor or a tuple of them, to the rank at position `target` of `axis`, and go on at once.

    Later writes to x do not change what is sent. The k-th send to a rank matches the k-th `receive` there, whatever the
    shapes and axes are; other ranks take no part. Each tensor is a message of its own.
    No graph is sent: the gradient is a message in the other direction, which the program sends itself.
    Raises ValueError for a tensor that requires grad, MeshError for a position that the axis does not have.
    """
    parts = x if isinstance(x, tuple) else (x,)
    if not parts:
        raise ValueError("send needs a tensor, or a tuple of at least one; this tuple is empty")
    target = _other("send", axis, target, "target")
    for part in parts:
        if check_tensor("send", part).requires_grad:
            raise ValueError(
                f"send: the graph of a tensor {list(part.shape)} that requires grad would end here; send x.detach(), "
                "and in the backward pass send its gradient back"
            )
    rank, is_tuple = this_rank(), isinstance(x, tuple)
    for place, part in enumerate(parts):
        about = (len(parts) - 1 - place if is_tuple else -1, part.device.type)
        rank.begin(rank.message("send", axis, target, about), part)


def receive(axis: Axis, source: int) -> Payload:
    """Wait for the next message from position `source` of `axis`: a tensor, or a tuple if one was sent.

    `start(receive, axis, source)` only reserves the message, and returns a handle whose `wait` returns it.
    """
    return start_receive(axis, source).wait()


def start_receive(axis: Axis, source: int) -> Receipt:
    """What `start(receive, axis, source)` returns."""
    rank, source = this_rank(), _other("receive", axis, source, "source")
    call = rank.message("receive", axis, source)
    pair = call.place.group
    made = rank.receipts[pair] = Receipt(call, rank.receipts.get(pair))
    return made


class Receipt(Pending):
    """A message that this rank will receive. It may be a tuple of several tensors, so the next receipt from the same
    sender begins only when this one is complete."""

    __slots__ = ("_before", "_call", "_first", "_next", "_result")

    def __init__(self, call: Call, before: Receipt | None):
        self._call = call
        self._first: Pending | None = None
        self._next: Receipt | None = None
        self._result: Payload | None = None
        self._before = before if before is not None and before._result is None else None
        if self._before is None:
            self._begin()
        else:
            self._before._next = self

    def wait(self) -> Any:
        """The message, once it has arrived."""
        if self._result is None:
            if self._before is not None:
                self._before.wait()
            assert self._first is not None
            parts = [self._first.wait()]
            num_following = self._first.sent_with[1]
            for _ in range(num_following):
                parts.append(self._begin().wait())
            self._result = parts[0] if num_following < 0 else tuple(parts)
            self._first = None
            if self._next is not None:
                self._next._before = None
                self._next._begin()
        return self._result

    def _begin(self) -> Pending:
        self._first = this_rank().begin(self._call, torch.empty(0, device="cpu"))
        return self._first


def _other(op: str, axis: Axis, position: int, name: str) -> int:
    """The position of another rank of `axis`. Raises MeshError if it is not one."""
    place = this_rank().place(axis)
    position = position_of(op, position, len(place.group), place.label, name)
    if position == place.index:
        raise MeshError(f"{op}: position {position} of axis {place.label!r} is this rank itself; it has the tensor")
    return position
