"""Stand-ins for collectives of torch.distributed and tplab, and for switches of gradient synchronisation."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import accumulate
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tplab.torch.checking.watched import Watched
from tplab.torch.data.parallel import DataParallel
from tplab.torch.distributed import asked
from tplab.torch.distributed.asked import several
from tplab.torch.distributed.group import Group
from tplab.torch.distributed.work import Taken
from tplab.torch.private import graph_task
from tplab.torch.ranks.rank import Call
from tplab.torch.ranks.simulated import SimulatedRank

StandIn = tuple[Any, str, Callable[..., Any]]
"""An object, the name of a function of it, and the function that replaces it while a rank is watched. It is called with
the rank, the original function, and the arguments."""


def _collective(
    rank: Watched, original: Any, group: Group, /, call: Any, put: Any, opts: Any, take: Any, into: Any
) -> Any:
    """Stand in for a collective of torch.distributed: its tensors are still the script's own."""
    if rank.is_looking:
        return original(group, call, put, opts, take, into)
    is_open = opts is None or opts.asyncOp
    rank.send(call, put, is_open)

    def run(take: Any) -> Any:
        return original(group, call, put, opts, take, into)

    with rank.calls(SimulatedRank):
        found = rank.mending.collective(run, call, put, take, Taken)
    if isinstance(found, Taken) and "FSDPModule" not in rank.names.kinds():  # whose gathers are of parameters
        rank.recorder.combine(call.op, put, into)
    return found


def _gathers(op: str, parts: Callable[..., tuple[Sequence[Tensor], Sequence[Tensor]]]) -> Callable[..., Any]:
    """Return the stand-in for a collective that autograd does not see. Only finished ones can pass gradients back.

    parts   (number of ranks, arguments) -> the inputs, one per rank or one for all; the outputs, one per rank
    """

    def gather(rank: Watched, original: Any, group: Group, /, *args: Any, **kwargs: Any) -> Any:
        found, ranks = original(group, *args, **kwargs), group.place.group
        if isinstance(found, Taken):
            rank.gather(op, ranks, lambda: parts(len(ranks), *args, **kwargs))
        return found

    return gather


def _rows(x: Tensor, count: int, sizes: Sequence[int] | None = None) -> list[Tensor]:
    """Return views of one part of the rows for each rank."""
    x, starts = x if x.dim() else x[None], [0]
    sizes = sizes or [len(x) // count] * count
    starts += accumulate(sizes)
    return [x.narrow(0, start, size) for start, size in zip(starts, sizes)]


_all_gather = _gathers("all_gather", lambda _, outputs, inputs, *a, **k: (
    several(inputs), outputs if isinstance(outputs[0], Tensor) else outputs[0]))  # fmt: skip
_all_gather_single = _gathers("all_gather_into_tensor", lambda count, output, x, *a, **k: ([x], _rows(output, count)))
_all_to_all_single = _gathers("all_to_all_single", (
    lambda count, output, x, output_splits=None, input_splits=None, *a, **k: (
        _rows(x, count, input_splits), _rows(output, count, output_splits))))  # fmt: skip


def _in_memory(rank: Watched, original: Any, /, op: str, x: Tensor, elementwise: bool = False) -> Tensor:
    """Stand in for gloo's reading of a tensor in memory order, which may differ from the program's."""
    taken = original(op, x, elementwise)
    if taken is x or rank.is_looking or (elementwise and asked.fills_its_memory(x)):
        return taken
    line = rank.line()
    rank.seen.strided[line] = op, graph_task() != -1
    return x if rank.mending.has("order", line) else taken


def _of_tplab(
    rank: Watched, original: Any, member: SimulatedRank, /, call: Call, x: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Stand in for a collective of tplab. Single messages are not recorded, as in torch.distributed."""
    if not rank.is_looking and SimulatedRank not in rank.inside:
        rank.seen.has_sent = rank.seen.has_sent or len(call.place.group) > 1
        if call.op not in ("send", "receive"):
            rank.send(call, x)
            return rank.mending.of_tplab(lambda y: original(member, call, y, *args, **kwargs), call, x)
    return original(member, call, x, *args, **kwargs)


def _join(
    rank: Watched, original: Any, group: Group, /, member: Any, ranks: Sequence[int], *args: Any, **kwargs: Any
) -> None:
    rank.seen.groups.add(len(ranks))
    rank.seen.members.add(tuple(ranks))
    original(group, member, ranks, *args, **kwargs)


# --- turning off gradient synchronisation -----------------------------------------------------------------------------


def _no_sync(rank: Watched, original: Any, module: Any, /) -> Any:
    rank.keep_apart()
    return nullcontext() if rank.mending.has("sync") else original(module)


def _set(rank: Watched, original: Any, module: Any, name: str, value: Any, /) -> None:
    is_off = name == "require_backward_grad_sync" and value is False
    if is_off and sys._getframe(2).f_code.co_name != "no_sync":
        rank.keep_apart()
        value = rank.mending.has("sync")
    original(module, name, value)


def require_sync(
    rank: Watched, original: Any, module: Any, /, requires_gradient_sync: bool, *args: Any, **kwargs: Any
) -> None:
    """Stand in for FSDP's set_requires_gradient_sync."""
    if not requires_gradient_sync:
        rank.keep_apart()
        requires_gradient_sync = rank.mending.has("sync")
    original(module, requires_gradient_sync, *args, **kwargs)


GROUPS: Sequence[StandIn] = (
    (Group, "_carry", _collective),
    (asked, "in_memory", _in_memory),
    (Group, "allgather", _all_gather),
    *((Group, name, _all_gather_single) for name in ("all_gather_single", "_allgather_base")),
    *((Group, name, _all_to_all_single) for name in ("all_to_all_single", "alltoall_base")),
    (Group, "__init__", _join),
    (SimulatedRank, "do", _of_tplab),
    (SimulatedRank, "begin", _of_tplab),
    (DistributedDataParallel, "no_sync", _no_sync),
    (DistributedDataParallel, "__setattr__", _set),
    (DataParallel, "no_sync", _no_sync),
)
