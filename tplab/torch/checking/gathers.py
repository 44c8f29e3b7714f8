"""The two ways to gather: whether gradients are right with the other one.

All ranks use the result of `gather_from` in the same way, and each goes on with its piece of the gradient. Each rank
uses the result of `all_gather` in its own way, and the gradients of all are added up. Their outputs are the same, so
only gradients show that one is used where the other belongs.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tplab.mesh import Axis
from tplab.torch.comm.collectives import all_reduce
from tplab.torch.ranks.rank import this_rank

SAME = 1e-4  # relative: what differs by more was not computed in the same way


class OtherGathers:
    """Called with the loss before its backward pass, it finds the gathers that are not used as their kind requires, and
    makes them pass gradients back as the other kind does. `found` lists them as (op, shape of its result)."""

    def __init__(self) -> None:
        self.found: list[tuple[str, tuple[int, ...]]] = []

    def __call__(self, loss: Tensor) -> None:
        for node in _nodes(loss.grad_fn):
            call: Any = getattr(getattr(node, "exchange", None), "call", None)
            if type(node).__name__ == "_GatherBackward":
                node.register_prehook(partial(self._pass_on, "gather_from", node.axis))
            elif type(node).__name__ in ("_BlockingBackward", "_WaitBackward") and call.op == "all_gather":
                node.register_prehook(partial(self._pass_on, "all_gather", call.axis))

    @torch.no_grad()
    def _pass_on(self, op: str, axis: Axis, grads: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        (dy,) = grads
        num_ranks, total = len(this_rank().place(axis).group), all_reduce(dy, axis)
        gap, size = (all_reduce(x.abs().max(), axis, "max") for x in (total - num_ranks * dy, total))
        is_same = bool(gap <= SAME * size)
        if num_ranks == 1 or is_same == (op == "gather_from"):
            return None
        self.found.append((op, tuple(dy.shape)))
        return (dy / num_ranks,) if is_same else (total,)


def words_of(op: str, shape: tuple[int, ...], right: str) -> str:
    """What to say about a gather that is used where the other belongs. `right`: what the other one makes right."""
    if op == "gather_from":
        how, other, does = "in different ways", "all_gather", "adds their gradients up"
    else:
        how, other, does = "in the same way", "gather_from", "adds no gradients up"
    return (
        f"ranks use what {op} returns ({list(shape)}) {how}: with {other} in its place, whose backward pass {does}, "
        f"{right}"
    )


def _nodes(root: Any) -> Iterator[Any]:
    """Every node of a graph, once."""
    seen, waiting = {root}, [root]
    while waiting:
        node = waiting.pop()
        if node is not None:
            yield node
            new = {other for other, _ in node.next_functions} - seen
            seen |= new
            waiting += new
