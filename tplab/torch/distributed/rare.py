"""Collectives that few programs use, built from others: of sparse tensors, and a barrier that names missing ranks."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp
from torch.distributed import distributed_c10d as c10d

from tplab.torch.distributed.replaced import Value, taking_turns
from tplab.torch.private import c10d_C, no_dispatch

_DEFAULT_SECONDS = 1800.0
"""torch's own timeout of half an hour."""


def all_reduce_sparse(x: Tensor, opts: Any, gather: Callable[[Tensor], list[Tensor]]) -> None:
    """Add up sparse tensors as gloo does: every rank gets the indices and values of all ranks, and adds them up.

    gather   this rank's tensor -> those of all ranks, which differ only in dim 0
    Raises TypeError for tensors and reductions that gloo does not support.
    """
    op = getattr(opts, "reduceOp", ReduceOp.SUM)
    if x.layout is not torch.sparse_coo or getattr(op, "op", op) != ReduceOp.SUM:
        raise TypeError(f"all_reduce of a tensor with the layout {x.layout} can only add up sparse_coo tensors")
    with no_dispatch(), torch.no_grad():
        whole = x.coalesce()
        indices = gather(whole.indices().t().contiguous())
        values = gather(whole.values())
        sum = torch.sparse_coo_tensor(
            torch.cat(indices).t(), torch.cat(values), x.shape, check_invariants=False
        ).coalesce()
        x.copy_(sum)


def monitored_barrier(group: Any, timeout: timedelta | float | None, wait_all_ranks: bool) -> bool:
    """Wait until all ranks have arrived; returns False if the program sets no timeout of its own. If they cannot all
    arrive in time, rank 0 names the missing ones. No rank waits for the timeout itself if nothing can change any more.

    Raises RuntimeError in torch's words.
    """
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if seconds is None or seconds >= _DEFAULT_SECONDS:
        return False
    here, position, size = group.member.here(), group.rank(), group.size()
    if seconds <= 0:
        raise RuntimeError(f"[Rank {position}]: Rank {position} timed out in monitoredBarrier after 0 ms.")
    number, group.num_monitored = group.num_monitored, group.num_monitored + 1
    groups: Any = c10d._world
    come: set[Any] = groups.shared.others["monitored_barrier", group.name_, number].arrived
    come.add(position)
    here.look()
    what = f"monitored_barrier({group.label!r})"
    here.wait_until(lambda: len(come) == size or _FAILED in come, what, seconds, gives_up=True)
    missing = [other for other in range(size) if other not in come]
    if not missing:
        return True
    said = f"[Rank {position}]: "
    if position == 0:
        come.add(_FAILED)
        here.look()
        named = f"Ranks {', '.join(map(str, missing))}" if wait_all_ranks and missing[1:] else f"Rank {missing[0]}"
        raise RuntimeError(f"{said}{named} failed to pass monitoredBarrier in {seconds * 1000:.0f} ms")
    raise RuntimeError(
        f"{said}Rank {position} successfully reached monitoredBarrier, but received errors while waiting for send/recv "
        "from rank 0. Please check rank 0 logs for faulty rank."
    )


_FAILED = "failed"


def all_gather_into(x: Tensor, group_size: int, group_name: str, *, out: Tensor) -> Tensor:
    """`torch.ops._c10d_functional.all_gather_into_tensor_out`, which torch's C++ code would run without the group's
    methods. The result is there when `wait_tensor` returns."""
    group: Any = c10d_C._resolve_process_group(group_name)
    c10d_C._register_work(out, group.all_gather_single(out, x))
    return out


_OPERATIONS: Any = torch.ops._c10d_functional
_gather_into = _OPERATIONS.all_gather_into_tensor_out


class _GatherInto:
    """The operation under its name, and also as its only overload."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_gather_into, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return (_gather_into if taking_turns() is None else all_gather_into)(*args, **kwargs)

    @property
    def default(self) -> _GatherInto:
        return self


RARE: list[Value] = [(_OPERATIONS, "all_gather_into_tensor_out", _GatherInto())]
